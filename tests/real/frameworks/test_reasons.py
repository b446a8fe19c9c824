"""Why files are as they are: `stepfs why` and `user.stepfs.why` for each file, `stepfs inspect` and the log for those that stay whole."""

import bz2
import gzip
import io
import lzma
import os
import shutil
import sqlite3
import subprocess
import tarfile
import zipfile

import h5py
import numpy as np
import pytest
from harness import BIN, FAILURE, objects, run, run_json, shell, wait_until
from series import save_walk

UNPACKED = "files without compression to shrink them"


def values(step):
    return np.frombuffer(np.random.default_rng(step).bytes(120_000), np.int32)


def deflated(path, data):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights.bin", data.tobytes())


def packed_torch(path, data):
    """A zip of torch.save that another tool has packed again."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr("archive/data/0", data.tobytes())


def tar(path, data):
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("weights.bin")
        info.size = data.nbytes
        archive.addfile(info, io.BytesIO(data.tobytes()))


def sqlite(path, data):
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE blobs (value BLOB)")
        database.execute("INSERT INTO blobs VALUES (?)", (data.tobytes(),))
    database.close()


def filtered(path, data):
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=data.reshape(300, 100), compression="gzip")


def zstd(path, data):
    path.write_bytes(subprocess.run(["zstd", "-c"], input=data.tobytes(), capture_output=True, check=True).stdout)


# The file's writer, and what is said of it.
WRITERS = {
    "a.bin.gz": (lambda path, data: path.write_bytes(gzip.compress(data.tobytes())), "compressed with gzip", UNPACKED),
    "a.bin.bz2": (lambda path, data: path.write_bytes(bz2.compress(data.tobytes())), "compressed with bzip2", UNPACKED),
    "a.bin.xz": (lambda path, data: path.write_bytes(lzma.compress(data.tobytes())), "compressed with xz", UNPACKED),
    "a.zip": (deflated, "a zip that neither torch, numpy nor Keras wrote (1 of 1 members compressed)", "by themselves"),
    "packed.pt": (packed_torch, "torch: the zip is compressed", "write it as torch.save does"),
    "a.tar": (tar, "a tar archive", "save the files in it by themselves"),
    "a.db": (sqlite, "an SQLite database", "no tensors that stepfs could shrink"),
    "a.npz": (lambda path, data: np.savez_compressed(path, w=data), "npz: 1 arrays are compressed", "save with numpy.savez"),
    "a.h5": (filtered, "HDF5: 1 dataset has chunks compressed with gzip", "save with compression=None"),
    "a.bin.zst": (zstd, "compressed with zstd", UNPACKED),
}


@pytest.mark.stepfs
@pytest.mark.parametrize("name", WRITERS)
def test_a_format_that_stays_whole_is_named_with_the_next_step(mount, name):
    write, what, advice = WRITERS[name]
    if write is zstd and not shutil.which("zstd"):
        pytest.skip("no zstd")
    paths = [mount / f"step_{step}" / name for step in (1, 2)]
    for step, path in enumerate(paths):
        path.parent.mkdir()
        write(path, values(step))
    mount.sync()
    for path in paths:
        why = os.getxattr(path, "user.stepfs.why").decode()
        assert what in why and advice in why and "would not become smaller" not in why, why
        said = run("inspect", path).stdout
        assert said.count(why) == 1, said
    wait_until(lambda: f"{name}: stays as it is: {why}" in mount.log_tail(400), 10, "a line in the log")
    assert "released" not in mount.states().values(), mount.states()
    # It is as it was written, and can be written again.
    shell(f"cp {paths[0]} {paths[1]} && cmp {paths[0]} {paths[1]}")


def answers(path):
    return {row["path"]: row["why"] for row in run_json("why", "--json", path)}


def save_log(folder, step):
    (folder / f"log_step_{step}.txt").write_text("".join(f"{line} of {step}\n" for line in range(20_000)))


@pytest.mark.stepfs
def test_every_file_has_a_reason(mount):
    (mount / "config.json").write_text("{}")
    (mount / "empty").touch()
    for name in ("exact", "pinned", "logs"):
        (mount / name).mkdir()
    run("profile", "--set", "exact", mount / "exact")
    run("pin", mount / "pinned")
    names = save_walk(mount.dir, 4, seed=1)
    save_walk(mount.dir, 1, seed=2, name="model.pt")
    save_walk(mount.dir, 2, seed=3, name="best_step_{}.pt")
    save_walk(mount / "exact", 2, seed=4)
    save_walk(mount / "pinned", 2, seed=5)
    save_log(mount / "logs", 1)
    save_log(mount / "logs", 2)
    mount.sync()
    mount.require_released(*names[:-1], "best_step_1.pt", "exact/step_0001.pt", "logs/log_step_1.txt")
    run("recall", mount / names[1])
    mount.sync()
    expected = {
        "config.json": ["it is small"],
        "empty": ["it is empty"],
        names[0]: ["it is lossy: balanced keeps ", "errors of at most weight ", "Its object, a keyframe, takes ", "stepfs inspect"],
        names[1]: ["it was recalled; `stepfs release`", "It holds reconstructed values, with errors of at most weight "],
        names[2]: ["it is lossy: balanced keeps ", "Its object, a difference, takes "],
        names[3]: ["it is the newest of its lineage, and stays exact", "a later step_#.pt"],
        "model.pt": ["it is the newest of its lineage, and stays exact", "no number in this name is known to count training", "step_N"],
        "best_step_1.pt": ["it is exact: a rule of stepfs.toml asks for exact, because its path has `best` or `final`"],
        "exact/step_0001.pt": ["it is exact: `stepfs profile` has set exact for exact/"],
        "exact/step_0002.pt": ["it is the newest of its lineage"],
        "pinned/step_0001.pt": ["it is pinned; `stepfs unpin` lets it go"],
        "logs/log_step_1.txt": ["it is exact: stepfs knows no tensors in its format"],
    }
    with open(mount / "logs/log_step_3.txt", "w") as file:
        file.write("half of it\n" * 10_000)
        file.flush()
        found = answers(mount.dir)
        assert found[str(mount / "logs/log_step_3.txt")].startswith("it is open for writing"), found
    for name, words in expected.items():
        why = found[str(mount / name)]
        assert all(said in why for said in words) and why.startswith(words[0]), (name, why)
        assert os.getxattr(mount / name, "user.stepfs.why").decode() == why
        assert run("why", mount / name).stdout == f"{mount / name}: {why}\n"
    # All of them, and a directory's by themselves.
    assert set(found) == {row for row in map(str, mount.dir.rglob("*")) if os.path.isfile(row)}
    assert set(answers(mount / "exact")) == {str(mount / "exact" / name) for name in names[:2]}
    # Below the path that the user wrote.
    assert shell(f"'{BIN}' why exact/step_0001.pt", cwd=mount.dir).stdout.startswith("exact/step_0001.pt: it is exact")
    mount.umount()
    at_rest = answers(mount.store)
    for name in ("config.json", "empty", names[0], names[2], "best_step_1.pt", "exact/step_0001.pt"):
        assert at_rest[name] == found[str(mount / name)], name
    for name, words in {names[1]: "it was recalled", names[3]: "only a mount knows why", "pinned/step_0001.pt": "it is pinned"}.items():
        assert words in at_rest[name], at_rest[name]


@pytest.mark.stepfs
def test_names_whose_numbers_do_not_count_training_are_told(mount):
    patterns = ["ckpt-2024-01-0{0}_12-3{0}-05.pt", "checkpoint_{0}_{0}000.pt", "ckpt_e{0}_s{0}000.pt"]
    for seed, pattern in enumerate(patterns):
        save_walk(mount.dir, 3, seed=seed, name=pattern)
    mount.sync()
    found = answers(mount.dir)
    assert len(found) == 9
    for name, why in found.items():
        assert why.startswith("it is the newest of its lineage, and stays exact; "), (name, why)
        assert "known to count training" in why and "write step_N (or epoch_N, iter_N, checkpoint-N)" in why, (name, why)


@pytest.mark.stepfs
def test_an_object_that_is_gone_is_told(mount):
    names = save_walk(mount.dir, 3, seed=1)
    mount.sync()
    mount.require_released(*names[:-1])
    lost = mount.entry(names[0])["object"]
    [file] = [path for path in objects(mount.store) if lost in str(path)]
    file.unlink()
    why = answers(mount / names[0])[str(mount / names[0])]
    assert why.startswith(f"its object {lost} cannot be read: ") and "stepfs verify --repair" in why, why


@pytest.mark.stepfs
def test_a_path_that_nobody_knows_is_an_error(mount, plain):
    (plain / "step_1.pt").write_bytes(bytes(100_000))
    for path, words in [(mount / "gone.pt", "No such file"), (plain / "step_1.pt", "neither a stepfs store nor in a stepfs mount")]:
        done = run("why", path, check=False)
        assert done.returncode == FAILURE and words in done.stderr and str(path) in done.stderr and not done.stdout, done.stderr
