"""Files that say what they are only with others beside them: DeepSpeed's Universal checkpoint and zarr."""

import os

import numpy as np
import pytest
import torch
from formats import COUNT, trained
from harness import BIN, run, run_json, shell

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]

PARTS = ("fp32", "exp_avg", "exp_avg_sq")


def parameters(state):
    """Each parameter's name, value and moments, as DeepSpeed calls them."""
    names = [name for name in state["model"] if not name.split(".")[-1].startswith(("running_", "num_"))]
    slots = state["optimizer"]["state"]
    return {name: (state["model"][name], slots[i]["exp_avg"], slots[i]["exp_avg_sq"]) for i, name in enumerate(names)}


def imported(folder):
    """Imports the directories of a series; gives the bytes of a file of the second, as the store has them."""
    store = folder / "store"
    run("import", store, *sorted((folder / "run").iterdir(), key=lambda path: path.stat().st_mtime))

    def back(file):
        copy = folder / "back"
        shell(f"{BIN} cat {store} {file} > {copy}")
        return copy

    return store, back


def universal(folder, drop=()):
    for number, state in enumerate(trained()):
        for name, tensors in parameters(state).items():
            directory = folder / "run" / f"global_step{number}_universal" / "zero" / name
            directory.mkdir(parents=True)
            for part, tensor in zip(PARTS, tensors):
                if part not in drop:
                    torch.save({"cat_dim": 0, "param": tensor}, directory / f"{part}.pt")
    return imported(folder)


def changed(back, folder, name):
    """The files of the second state's parameter `name` that lost anything."""
    found = set()
    for file in (folder / "run" / "global_step1_universal" / "zero" / name).iterdir():
        written = torch.load(file)
        now = torch.load(back(file.relative_to(folder / "run")))
        assert now.keys() == written.keys() and now["cat_dim"] == 0 and now["param"].shape == written["param"].shape
        if not torch.equal(now["param"], written["param"]):
            found.add(file.stem)
            error = (now["param"] - written["param"]).norm() / written["param"].norm()
            assert error < 0.3, f"{file}: {error}"
    return found


def test_the_weights_of_a_universal_checkpoint_are_quantized(tmp_path):
    store, back = universal(tmp_path)
    for name in ("0.weight", "2.weight", "4.weight"):
        assert changed(back, tmp_path, name) == {"fp32"}, name
    rows = run_json("ls", "--json", store)
    large = [row for row in rows if row.get("logical_bytes", 0) > 1 << 17 and f"global_step{COUNT - 1}" not in row["path"]]
    assert large
    shares = {part: np.mean([row["stored_bytes"] / row["logical_bytes"] for row in large if row["path"].endswith(f"/{part}.pt")])
              for part in PARTS}
    print(shares)
    assert shares["fp32"] < 0.15 and min(shares["exp_avg_sq"], shares["exp_avg"]) > 0.5, shares


def test_the_newest_checkpoint_is_exact_though_layers_have_numbers(tmp_path):
    """`zero/2.weight` and `zero/4.weight` look like two states of one file."""
    _, back = universal(tmp_path)
    newest = tmp_path / "run" / f"global_step{COUNT - 1}_universal"
    for file in newest.rglob("*.pt"):
        assert back(file.relative_to(tmp_path / "run")).read_bytes() == file.read_bytes(), file


@pytest.mark.parametrize("gone", PARTS)
def test_a_universal_checkpoint_without_one_file_is_exact(tmp_path, gone):
    _, back = universal(tmp_path, {gone})
    assert changed(back, tmp_path, "2.weight") == set()


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_of_zarr(tmp_path, version):
    zarr = pytest.importorskip("zarr")
    for number, state in enumerate(trained()):
        group = zarr.open_group(tmp_path / "run" / f"step_{number}.zarr", mode="w", zarr_format=version)
        for name, (weight, first, second) in parameters(state).items():
            for tree, tensor in (("params", weight), ("opt_state/mu", first), ("opt_state/nu", second)):
                path = f"{tree}/{name.replace('.', '/')}"
                group.create_array(path, data=tensor.numpy(), chunks=tuple(tensor.shape), compressors=None)
        os.utime(tmp_path / "run" / f"step_{number}.zarr")
    store, back = imported(tmp_path)
    lossy = set()
    for file in (tmp_path / "run" / "step_1.zarr").rglob("*"):
        if file.is_file() and back(file.relative_to(tmp_path / "run")).read_bytes() != file.read_bytes():
            lossy.add(str(file.relative_to(tmp_path / "run" / "step_1.zarr")))
    chunk = "0.0" if version == 2 else "c/0/0"
    assert lossy == set()
    rows = {row["path"]: row for row in run_json("ls", "--json", store)}
    kept = [rows[f"step_1.zarr/params/{name}/weight/{chunk}"] for name in (0, 2, 4)]
    # Planes, and a difference to the state before.
    assert all(row["stored_bytes"] < 0.85 * row["logical_bytes"] for row in kept if row["logical_bytes"] > 1 << 17), kept
    # zarr reads what the store gives.
    whole = tmp_path / "whole"
    run("export", store, "step_1.zarr", whole)
    for name in (0, 2, 4):
        now, written = (zarr.open_group(root, mode="r")[f"params/{name}/weight"][:] for root in (whole, tmp_path / "run" / "step_1.zarr"))
        assert (now == written).all()
