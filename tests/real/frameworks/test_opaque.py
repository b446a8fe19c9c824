"""Files of formats that stepfs does not understand, written by numpy, SQLite and others: they shrink, and stay bit-exact."""

import os
import random
import shutil
import sqlite3
import struct
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from harness import PLAIN, make_base, open_mount, remove_base, require_clean, run, shell
from series import SHAPES, walk

COUNT = 6


def states():
    """Names and arrays of each state: weights of a random walk, and Adam's moments."""
    for state in walk(COUNT, scale=4):
        slots = state["optimizer"]["state"]
        arrays = {name: tensor.numpy() for name, tensor in state["model"].items()}
        for slot in ("exp_avg", "exp_avg_sq"):
            arrays |= {f"{slot}.{name}": slots[i][slot].numpy() for i, name in enumerate(SHAPES)}
        yield arrays


def raw(path, step, arrays):
    np.concatenate([array.ravel() for array in arrays.values()]).tofile(path)


def container(path, step, arrays, header):
    """Text of this length, then each array behind its length."""
    with open(path, "wb") as file:
        file.write(b"MYNET001" + f"step={step}".encode().ljust(header - 8))
        for array in arrays.values():
            file.write(struct.pack("<I", array.size))
            array.tofile(file)


def fixed(path, step, arrays):
    container(path, step, arrays, 1000)


def moving(path, step, arrays):
    container(path, step, arrays, 1000 + 13 * step)


def torch_zip(path, step, arrays):
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)


@contextmanager
def saved(name, save, profile="balanced"):
    """A mount and a plain directory with the same files, and their names."""
    names, plain = [name.format(step) for step in range(COUNT)], make_base()
    mounts = open_mount(True)
    mount = next(mounts)
    try:
        if not PLAIN:
            run("profile", mount.dir, "--set", profile)
        for step, (name, arrays) in enumerate(zip(names, states())):
            save(plain / name, step, arrays)
            shutil.copyfile(plain / name, mount / name)
        mount.sync()
        yield mount, plain, names
    finally:
        mounts.close()
        remove_base(plain)


def released_share(mount, plain, names):
    """Compares every file, and gives the stored share of the released ones."""
    mount.require_released(*names[:-1])
    for name in names:
        shell(f"cmp {mount / name} {plain / name}")
    rows = [mount.entry(name) for name in names[:-1]]
    assert PLAIN or not any(float(row["lossy"]) for row in rows), rows
    share = sum(row["stored_bytes"] for row in rows) / sum(row["logical_bytes"] for row in rows)
    if not PLAIN:
        mount.umount()
        require_clean(mount.store)
    return share


@pytest.mark.slow
def test_unknown_files_of_floats_take_what_a_torch_zip_takes_under_exact():
    with saved("step_{}.pt", torch_zip, profile="exact") as kept:
        exact = released_share(*kept)
    for name, save, points in [("step_{}.raw", raw, 2), ("step_{}.net", fixed, 2), ("step_{}.net", moving, 2)]:
        with saved(name, save) as kept:
            share = released_share(*kept)
        print(f"{save.__name__}: {share:.2%} of the files, as torch zip under exact {exact:.2%}")
        assert share <= exact + points / 100 and share <= 0.87, f"{save.__name__}: {share:.2%}, exact {exact:.2%}"


def test_a_read_in_the_middle_needs_no_whole_file(mount):
    for step, arrays in enumerate(states()):
        moving(mount / f"step_{step}.net", step, arrays)
        last = arrays
    mount.sync()
    if not PLAIN:
        mount.require_released("step_3.net")
        mount.remount()
    size = os.path.getsize(mount / "step_3.net")
    with open(mount / "step_3.net", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.seek(size // 2)
        assert len(file.read(1000)) == 1000
    assert last and size > 5 << 20
    if not PLAIN:
        assert mount.status()["cache_bytes"] < size


@pytest.mark.slow
def test_a_database_an_event_file_and_a_tokenizer_take_what_changed(mount):
    words = [f"w{i * 7919 % 10007}" for i in range(3000)]
    rng = random.Random(5)
    plain = make_base()
    database = sqlite3.connect(plain / "live.db")
    database.execute("create table runs (id integer primary key, name text, loss real, note text)")
    database.execute("create index names on runs (name)")
    events = b""
    vocabulary = "\n".join(f'"{word}{i}": {i},' for i, word in enumerate(words * 8))
    try:
        for step in range(1, COUNT + 1):
            folder = mount / f"checkpoint-{step}"
            folder.mkdir()
            rows = [(rng.choice(words), rng.random(), " ".join(rng.choices(words, k=8))) for _ in range(5000)]
            database.executemany("insert into runs (name, loss, note) values (?, ?, ?)", rows)
            database.execute("update runs set loss = ? where id = ?", (rng.random(), rng.randrange(1, 5000)))
            database.commit()
            shutil.copyfile(plain / "live.db", folder / "history.db")
            # A record of TensorFlow: length and checksum, an event, its checksum. The checksums are any bytes here.
            for at in range(10_000):
                event = struct.pack("<Bd", 9, 1.7e9 + 1000 * step + at) + b"\x10" + bytes([at % 128]) + b"*\x14\n\x12\n\ntrain/loss\x15"
                event += struct.pack("<f", rng.random())
                events += struct.pack("<QI", len(event), rng.getrandbits(32)) + event + struct.pack("<I", rng.getrandbits(32))
            (folder / "events.out.tfevents").write_bytes(events)
            (folder / "tokenizer.json").write_text(vocabulary + f'\n"step": {step}')
            (plain / f"checkpoint-{step}").mkdir()
            for file in folder.iterdir():
                shutil.copyfile(file, plain / folder.name / file.name)
        mount.sync()
        shell(f"rm {plain}/live.db && diff -r {plain} {mount.dir}")
        check = sqlite3.connect(f"file:{mount / 'checkpoint-3/history.db'}?mode=ro&immutable=1", uri=True)
        assert check.execute("pragma integrity_check").fetchone() == ("ok",)
        assert check.execute("select count(*) from runs").fetchone() == (15_000,)
        check.close()
        for name, most in [("history.db", 0.6), ("events.out.tfevents", 0.5), ("tokenizer.json", 0.15)]:
            rows = [mount.entry(f"checkpoint-{step}/{name}") for step in range(1, COUNT)]
            assert PLAIN or all(row["state"] == "released" for row in rows), rows
            first = rows[0]["stored_bytes"]
            # The log and the database are five times as long as the first by then. Of each file the stub takes 4096 bytes.
            print(name, [row["stored_bytes"] for row in rows], rows[-1]["logical_bytes"])
            alone = first * rows[-1]["logical_bytes"] / rows[0]["logical_bytes"]
            assert PLAIN or rows[-1]["stored_bytes"] < most * alone, f"{name}: {rows[-1]['stored_bytes']} of {alone:.0f}"
    finally:
        database.close()
        remove_base(plain)
    if not PLAIN:
        mount.umount()
        require_clean(mount.store)
