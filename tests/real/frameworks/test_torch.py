"""torch.save and torch.load on a mount: a real training run, the newest exact, the older ones within their bounds."""

import math
import os
import random
import subprocess

import numpy as np
import pytest
import torch
from bounds import check_within_bounds, same_words, stated
from harness import ROOT, shell
from series import bits_equal, copy_in_order, difference, save_walk, tensors_of, walk


def test_the_newest_is_byte_identical(trained):
    shell(f"cmp {trained.mount / trained.newest} {trained.plain / trained.newest}")
    assert trained.mount.state(trained.newest) in ("sealed", "released" if trained.mount.pid == 0 else "sealed")


def test_all_but_the_newest_are_released(trained):
    trained.mount.require_released(*trained.older)


def test_sizes_are_what_they_were(trained):
    for name in trained.names:
        assert os.path.getsize(trained.mount / name) == os.path.getsize(trained.plain / name)


def test_unzip_finds_no_fault(trained):
    for name in trained.names:
        shell(f"unzip -tqq {trained.mount / name}")


@pytest.mark.parametrize("how", [{}, {"weights_only": True}, {"weights_only": False}, {"mmap": True}], ids=str)
def test_load(trained, how):
    quantized = 0
    for name in trained.names:
        exact, read = (torch.load(folder / name, **how) for folder in (trained.plain, trained.mount.dir))
        quantized += check_within_bounds(trained.mount, name, exact, read)
    assert quantized or not trained.mount.pid, "nothing was quantized"


def test_load_from_file_object(trained):
    for name in trained.older:
        with open(trained.mount / name, "rb") as f:
            read = torch.load(f)
        check_within_bounds(trained.mount, name, torch.load(trained.plain / name), read)


def test_tied_weights_stay_tied(trained):
    state = torch.load(trained.mount / trained.older[0])
    assert state["model"]["wte.weight"].data_ptr() == state["model"]["head.weight"].data_ptr()


def test_released_file_is_what_torch_save_writes(trained, plain):
    for name in trained.older:
        torch.save(torch.load(trained.mount / name), plain / name)
        shell(f"cmp {trained.mount / name} {plain / name}")


def weights(row):
    weight = row["roles"]["weight"]
    assert weight["raw_bytes"], f"{row['path']}: no tensor has the role weight"
    return weight["stored_bytes"] / weight["raw_bytes"]


def test_weights_cost_at_most_seven_percent(trained):
    rows = [trained.mount.entry(name) for name in trained.older]
    assert [row["kind"] for row in rows] == ["keyframe", *["delta"] * (len(rows) - 1)]
    for row in rows[1:]:
        assert weights(row) <= 0.07, f"{row['path']}: weights take {100 * weights(row):.2f} %"


def test_what_ls_states_is_complete(trained):
    for row in trained.mount.ls():
        assert {"path", "state", "logical_bytes", "stored_bytes", "profile", "parent", "chain_len", "max_abs_error", "roles"} <= row.keys()
        assert row["logical_bytes"] == os.path.getsize(trained.mount / row["path"].lstrip("/"))


def test_training_resumes_from_a_released_one(trained, plain):
    import gpt

    _, now, then = gpt.evaluate(trained.mount / trained.older[-1])
    assert abs(now - then) < 0.05, f"held-out loss {now}, {then} when it was saved"
    names = gpt.train([str(plain)], iters=5, every=5, resume=trained.mount / trained.older[-1], say=lambda line: None)
    state = torch.load(plain / names[-1])
    assert all(torch.isfinite(t).all() for t in tensors_of(state).values() if t.is_floating_point())


def test_save_to_file_object(both, plain):
    """The archive prefix is `archive/` then, and Python writes, not C++."""

    def save(state, path):
        with open(path, "wb") as f:
            torch.save(state, f)

    names = save_walk(both.dir, 4, save=save, seed=3)
    save_walk(plain, 4, save=save, seed=3)
    both.sync()
    both.require_released(*names[:-1])
    shell(f"cmp {both / names[-1]} {plain / names[-1]}")
    for name in names[:-1]:
        shell(f"unzip -tqq {both / name}")
        check_within_bounds(both, name, torch.load(plain / name), torch.load(both / name))
        save(torch.load(both / name), plain / "again.pt")
        shell(f"cmp {both / name} {plain / 'again.pt'}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_floating_point_types(mount, plain, dtype):
    names = save_walk(mount.dir, 4, dtype=dtype, seed=5)
    save_walk(plain, 4, dtype=dtype, seed=5)
    mount.sync()
    mount.require_released(*names[:-1])
    for name in names:
        check_within_bounds(mount, name, torch.load(plain / name), torch.load(mount / name))
    torch.save(torch.load(mount / names[1]), plain / names[1])
    shell(f"cmp {mount / names[1]} {plain / names[1]}")


@pytest.mark.parametrize("how", [{"pickle_protocol": 4}, {"pickle_protocol": 5}, {"_use_new_zipfile_serialization": False}], ids=str)
def test_other_forms_of_the_file(mount, plain, how):
    # Copied, not saved twice: these forms hold addresses and sizes of frames that differ between two saves.
    names = save_walk(plain, 4, seed=7, save=lambda state, path: torch.save(state, path, **how))
    copy_in_order(plain, mount.dir, names)
    mount.sync()
    for name in names:
        check_within_bounds(mount, name, *(torch.load(folder / name, weights_only=False) for folder in (plain, mount.dir)))
    shell(f"cmp {mount / names[-1]} {plain / names[-1]}")


def test_not_finite_tensors_stay_bit_equal(mount, plain):
    for folder in (mount.dir, plain):
        for step, state in enumerate(walk(4, seed=11), 1):
            state["model"]["block.up.weight"][3, 5] = math.nan
            state["model"]["block.attn.weight"][0, 0] = -math.inf
            state["model"]["wte.weight"][1, 1] = -0.0
            torch.save(state, folder / f"step_{step}.pt")
    mount.sync()
    for step in range(1, 5):
        exact, read = (tensors_of(torch.load(folder / f"step_{step}.pt")) for folder in (plain, mount.dir))
        for name in ("model.block.up.weight", "model.block.attn.weight"):
            assert bits_equal(exact[name], read[name])


def test_a_large_tensor_with_a_row_that_is_not_finite_stays_bit_equal(mount, plain):
    """The ends of a large tensor lie apart from the rest. An embedding's padding may be there."""
    for folder in (mount.dir, plain):
        for step, state in enumerate(walk(3, seed=12, shapes={"wte.weight": (8192, 384), "up.weight": (384, 512)}), 1):
            state["model"]["wte.weight"][0, 7] = -math.inf
            torch.save(state, folder / f"step_{step}.pt")
    mount.sync()
    exact, read = (tensors_of(torch.load(folder / "step_1.pt")) for folder in (plain, mount.dir))
    assert bits_equal(exact["model.wte.weight"], read["model.wte.weight"])
    assert not bits_equal(exact["model.up.weight"], read["model.up.weight"])


def test_objects_a_training_script_may_pickle(mount, plain):
    """Generators' states, numpy arrays, integers, views that share a storage: exact, and loadable as before."""
    rng = np.random.default_rng(1)
    for step, state in enumerate(walk(4, seed=13), 1):
        base = torch.from_numpy(rng.standard_normal((400, 300)).astype(np.float32)) + step / 1000
        state |= {"numpy": np.random.RandomState(step).get_state(), "python": random.Random(step).getstate(),
                  "array": rng.integers(0, 9, 50_000), "ids": torch.arange(30_000) * step, "flags": torch.ones(9000, dtype=torch.bool),
                  "view": base[10:20], "transposed": base.t(), "base": base, "empty": torch.zeros(0, 7), "complex": torch.randn(300) * 1j}
        for folder in (mount.dir, plain):
            torch.save(state, folder / f"step_{step}.pt")
    mount.sync()
    for step in range(1, 5):
        exact, read = (torch.load(folder / f"step_{step}.pt", weights_only=False) for folder in (plain, mount.dir))
        assert exact["python"] == read["python"] and (exact["array"] == read["array"]).all()
        assert all((a == b).all() if isinstance(a, np.ndarray) else a == b for a, b in zip(exact["numpy"], read["numpy"]))
        for name in ("ids", "flags", "rng", "complex", "empty"):
            assert bits_equal(exact[name], read[name]), name
        assert torch.equal(read["view"], read["base"][10:20]) and torch.equal(read["transposed"], read["base"].t())
        shell(f"unzip -tqq {mount / f'step_{step}.pt'}")


@pytest.mark.slow
def test_two_jobs_in_one_mount(mount, plain):
    """Two processes save different models at the same time into directories of their own."""
    program = "import sys; from series import save_walk; save_walk(sys.argv[1], 5, seed=int(sys.argv[2]))"
    jobs = []
    for seed in (1, 2):
        os.mkdir(mount / f"job{seed}")
        os.mkdir(plain / f"job{seed}")
        command = [os.sys.executable, "-c", program, str(mount / f"job{seed}"), str(seed)]
        jobs.append(subprocess.Popen(command, cwd=ROOT / "tests/real/support", stdin=subprocess.DEVNULL))
        save_walk(plain / f"job{seed}", 5, seed=seed)
    assert all(job.wait(timeout=120) == 0 for job in jobs)
    mount.sync()
    for seed in (1, 2):
        mount.require_released(*(f"job{seed}/step_{n:04d}.pt" for n in range(1, 5)))
        name = f"job{seed}/step_0005.pt"
        shell(f"cmp {mount / name} {plain / name}")
        for n in range(1, 5):
            name = f"job{seed}/step_{n:04d}.pt"
            check_within_bounds(mount, name, torch.load(plain / name), torch.load(mount / name))


def test_order_of_writing_decides_not_the_name(mount, plain):
    """A series written newest name first: the file written last stays exact."""
    save_walk(plain, 4, seed=17)
    names = sorted(os.listdir(plain), reverse=True)
    copy_in_order(plain, mount.dir, names)
    mount.sync()
    shell(f"cmp {mount / names[-1]} {plain / names[-1]}")
    for name in names:
        check_within_bounds(mount, name, torch.load(plain / name), torch.load(mount / name))


@pytest.mark.parametrize("how", ["one huge value", "all huge", "not a number", "zeros"])
def test_a_diverged_successor_does_not_coarsen_what_came_before(mount, plain, how):
    """When a run blows up, the previous checkpoint is needed: it must be as good as any other."""
    states = list(walk(5, seed=19))
    for name, tensor in states[-1]["model"].items():
        if how == "one huge value":
            tensor.view(-1)[7] = 1e20
        else:
            tensor.mul_({"all huge": 1e9, "not a number": math.nan, "zeros": 0.0}[how])
    for n, state in enumerate(states):
        torch.save(state, mount / f"step_{n}.pt")
    mount.sync()
    for n, state in enumerate(states[:-1]):
        read = torch.load(mount / f"step_{n}.pt")
        for name, tensor in state["model"].items():
            # Steps between ordinary neighbours. An iteration apart, states get steps of 12 of their rms, and half of that as
            # bound.
            near = states[n + 1] if n < 3 else states[n - 1]
            step = (near["model"][name] - tensor).double().square().mean().sqrt().item()
            assert difference(tensor, read["model"][name]) <= 6.2 * step, f"step_{n}.pt, {name}"
    assert all(bits_equal(t, tensors_of(states[-1])[path]) for path, t in tensors_of(torch.load(mount / "step_4.pt")).items())


def test_large_tensors_are_whole_to_their_edges(mount, plain):
    """In tensors above 8 MiB the first and last pages are stored apart from the rest."""
    generator = torch.Generator().manual_seed(7)
    state = {"model": {f"{n}.weight": torch.randn(rows, 1024, generator=generator) for n, rows in (("a", 2048), ("b", 2047), ("c", 3001))}}
    exact = []
    for step in range(1, 4):
        torch.save(state, mount / f"big_step_{20 * step}.pt")
        exact.append({path: tensor.clone() for path, tensor in tensors_of(state).items()})
        for tensor in state["model"].values():
            tensor += 1e-3 * torch.randn(tensor.shape, generator=generator)
    mount.sync()
    for step in (1, 2):
        name = f"big_step_{20 * step}.pt"
        mount.require_released(name)
        shell(f"unzip -tqq {mount / name}")
        read = torch.load(mount / name)
        said = stated(mount, name)
        for path, tensor in tensors_of(read).items():
            about = said[same_words(path)]
            assert about["codec"] == "lattice", about
            assert difference(exact[step - 1][path], tensor) <= about["bound"]
        torch.save(read, plain / name)
        shell(f"cmp {plain / name} {mount / name}")
    weight = mount.entry("big_step_40.pt")["roles"]["weight"]
    assert weight["stored_bytes"] <= 0.07 * weight["raw_bytes"]
