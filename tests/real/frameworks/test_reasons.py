"""Files that stay as they are: `user.stepfs.why`, `stepfs inspect` and the log name the format and the next step."""

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
from harness import run, shell, wait_until

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
