"""Legacy files of torch.save, npz and npy on a mount, each written and read by its own library, beside a torch zip of the same
tensors.
"""

import os
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from bounds import check_within_bounds
from formats import ZIP, ZIP_OF_NAMES, Format, check_like, named
from harness import PLAIN, run, run_json, shell
from series import walk

def legacy(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)


def npz(state, path):
    np.savez(path, **{name: tensor.numpy() for name, tensor in named(state).items()})


def tree(state, path):
    """The same below `params/` and `optimizer/`."""
    arrays = {}
    for name, tensor in named(state).items():
        of_state = name.startswith("state.")
        arrays["optimizer/" + "/".join(name.removeprefix("state.").rsplit(".", 1)) if of_state else f"params/{name}"] = tensor.numpy()
    np.savez(path, **arrays)


def load_npz(path):
    """The arrays as tensors; numpy compares each CRC."""
    with warnings.catch_warnings(action="error"), np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


FORMATS = {
    "zip": ZIP,
    "legacy": Format("step_{}.pt", legacy, torch.load),
    "zip of names": ZIP_OF_NAMES,
    "npz": Format("step_{}.npz", npz, load_npz),
    "tree": Format("step_{}.npz", tree, load_npz),
}


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["balanced", "exact"])
@pytest.mark.parametrize("kind, like", [("legacy", "zip"), ("npz", "zip of names"), ("tree", "zip of names")])
def test_as_small_as_a_zip_and_within_bounds(kind, like, profile):
    check_like(FORMATS[kind], FORMATS[like], profile)


def test_a_released_npz_is_what_numpy_writes(mount, plain):
    """Its CRCs, too, so that every zip tool accepts it."""
    names = [f"step_{step}.npz" for step in range(4)]
    for name, state in zip(names, walk(4)):
        np.savez(mount / name, **{key: tensor.numpy() for key, tensor in named(state).items()})
    mount.sync()
    mount.require_released(*names[:-1])
    for name in names:
        shell(f"unzip -tqq {mount / name}")
        np.savez(plain / name, **dict(np.load(mount / name)))
        shell(f"cmp {mount / name} {plain / name}")
        read = subprocess.run([sys.executable, "-W", "error", "-c", "import numpy, sys; print(len(dict(numpy.load(sys.argv[1]))))",
                               mount / name], capture_output=True, text=True)
        assert (read.stdout, read.stderr) == ("15\n", ""), read


@pytest.mark.slow
def test_legacy_files_of_other_processes_are_one_series(mount, plain):
    """Keys are addresses, and the payloads lie in their order: both differ in each process."""
    names = [f"step_{step}.pt" for step in range(4)]
    code = ("import sys, torch; sys.path.insert(0, sys.argv[3]); from series import walk; step = int(sys.argv[2]); "
            "junk = [torch.randn(1 << 12) for _ in range(100 * step)]; state = list(walk(step + 1))[-1]; "
            "torch.save(state, sys.argv[1], _use_new_zipfile_serialization=False)")
    for step, name in enumerate(names):
        support = os.path.join(os.path.dirname(__file__), "../support")
        subprocess.run([sys.executable, "-c", code, mount / name, str(step), support], check=True)
        shutil.copyfile(mount / name, plain / name)
    mount.sync()
    mount.require_released(*names[:-1])
    quantized = sum(check_within_bounds(mount, name, torch.load(plain / name), torch.load(mount / name)) for name in names[:-1])
    assert quantized or PLAIN, "nothing was quantized"
    assert PLAIN or mount.entry(names[2])["chain_len"] > mount.entry(names[0])["chain_len"], "each is kept by itself"


def arrays(folder, count=4):
    """Arrays that move like weights, with names that prove nothing."""
    names = [f"weight-{step}.npy" for step in range(count)]
    for name, state in zip(names, walk(count, scale=2)):
        np.save(folder / name, state["model"]["block.up.weight"].numpy())
    return names


def test_an_npy_is_exact(mount, plain):
    """Nothing proves that it is a parameter. Yet it becomes small as a difference to the previous one."""
    names = arrays(mount.dir)
    arrays(plain)
    mount.sync()
    mount.require_released(*names[:-1])
    for name in names:
        shell(f"cmp {mount / name} {plain / name}")
    assert PLAIN or mount.entry(names[2])["chain_len"] > 0


@pytest.mark.stepfs
def test_inspect_names_formats_and_says_why_it_does_not_look(plain):
    torch.save({"w": torch.ones(9)}, plain / "w.pt", _use_new_zipfile_serialization=False)
    np.save(plain / "w.npy", np.ones(9))
    np.savez(plain / "w.npz", w=np.ones(9))
    np.savez_compressed(plain / "c.npz", w=np.ones(9))
    np.save(plain / "o.npy", np.array([{}], dtype=object))
    (plain / "w.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99))
    said = {path.name: run("inspect", path).stdout for path in plain.iterdir()}
    assert "legacy torch" in said["w.pt"] and ": npy, " in said["w.npy"] and ": npz, " in said["w.npz"]
    assert "compressed" in said["c.npz"] and "objects" in said["o.npy"] and "HDF5" in said["w.h5"], said


@pytest.mark.stepfs
def test_inspect_takes_many_files_and_directories(plain):
    (plain / "below").mkdir()
    torch.save({"w": torch.ones(9), "v": torch.ones(2)}, plain / "below/a.pt")
    np.savez_compressed(plain / "c.npz", w=np.ones(9))
    lines = run("inspect", plain).stdout.splitlines()
    assert len(lines) == 3 and "below/a.pt" in lines[1] and " 2 " in lines[1] and "compressed" in lines[2], lines
    both = run("inspect", plain / "c.npz", plain / "below/a.pt").stdout
    # Outside a store nothing is promised of the bytes.
    assert " as written " in both and "lossless" not in both, both
    assert both.index("c.npz: ") < both.index("a.pt: "), both
    assert [len(file["tensors"]) for file in run_json("inspect", "--json", plain)] == [2, 0]
    # One that is not there is said, and hides no other.
    done = run("inspect", plain / "none", plain / "c.npz", check=False)
    assert done.returncode == 1 and "none" in done.stderr and "c.npz" in done.stdout, done


@pytest.mark.stepfs
def test_a_bundle_without_its_index_keeps_nobody_waiting(mount):
    """A save of TensorFlow that died: the file with tensors waits for its index, and all else goes on."""
    (mount / "ckpt-1.data-00000-of-00001").write_bytes(os.urandom(1 << 20))
    for step, state in enumerate(walk(3)):
        torch.save(state, mount / f"step_{step}.pt")
    mount.sync()
    assert mount.state("ckpt-1.data-00000-of-00001") == "sealed"
    assert mount.state("step_1.pt") == "released"
