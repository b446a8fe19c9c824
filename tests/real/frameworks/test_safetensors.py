"""safetensors on a mount: written to a temporary name, sized first, renamed while still open; read through mmap."""

import os

import pytest
import torch
from bounds import check_within_bounds
from harness import shell
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from series import save_walk


def save(state, path):
    """Weights with their own names; the optimizer's as a framework flattens them."""
    moments = {f"optimizer.{i}.{name}": state["optimizer"]["state"][i][name] for i in state["optimizer"]["state"]
               for name in ("exp_avg", "exp_avg_sq")}
    save_file({**state["model"], **moments, "steps": torch.tensor([state["step"]])}, path, metadata={"format": "pt"})


def series(mount, plain, **options):
    names = save_walk(mount.dir, 5, name="model-step-{:04d}.safetensors", save=save, **options)
    save_walk(plain, 5, name="model-step-{:04d}.safetensors", save=save, **options)
    mount.sync()
    mount.require_released(*names[:-1])
    return names


def test_series(both, plain):
    names = series(both, plain)
    shell(f"cmp {both / names[-1]} {plain / names[-1]}")
    quantized = sum(check_within_bounds(both, name, load_file(plain / name), load_file(both / name)) for name in names[:-1])
    assert quantized or not both.pid, "nothing was quantized"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(mount, plain, dtype):
    for name in series(mount, plain, dtype=dtype, seed=2):
        check_within_bounds(mount, name, load_file(plain / name), load_file(mount / name))


def test_safe_open_reads_slices_of_released_files(mount, plain):
    for name in series(mount, plain, seed=3):
        with safe_open(mount / name, framework="pt") as f:
            assert f.metadata() == {"format": "pt"}
            rows = f.get_slice("wte.weight")[40:44]
            assert torch.equal(rows, f.get_tensor("wte.weight")[40:44])
            whole = f.get_tensor("optimizer.1.exp_avg")
        # The mapping may outlive the handle: the tensor is used after close.
        assert torch.equal(whole, load_file(mount / name)["optimizer.1.exp_avg"])


def test_header_is_unchanged_and_mode_kept(mount, plain):
    for name in series(mount, plain, seed=4):
        with open(mount / name, "rb") as a, open(plain / name, "rb") as b:
            length = a.read(8)
            assert length == b.read(8)
            size = int.from_bytes(length, "little")
            assert a.read(size) == b.read(size)
        assert os.stat(mount / name).st_mode == os.stat(plain / name).st_mode


def test_rename_over_the_same_name_keeps_costs_flat(mount, plain):
    """`model.safetensors` saved again and again: always the newest bytes, and nothing else is kept."""
    save_walk(mount.dir, 8, name="model.safetensors", save=save, seed=6)
    save_walk(plain, 8, name="model.safetensors", save=save, seed=6)
    mount.sync()
    shell(f"cmp {mount / 'model.safetensors'} {plain / 'model.safetensors'}")
    assert os.listdir(mount.dir) == ["model.safetensors"]
    assert mount.status()["stored_bytes"] <= 1.05 * os.path.getsize(plain / "model.safetensors")
