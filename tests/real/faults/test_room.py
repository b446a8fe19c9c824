"""A disk without room for the next save: programs wait while stepfs frees room, and whatever has a promise stays."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from harness import Mount, require_clean, run, wait_dead, wait_until
from series import bits_equal, save_walk, tensors_of, walk
from test_bad_input import fill

pytestmark = [pytest.mark.stepfs, pytest.mark.slow,
              pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own")]

# Its archiving takes long enough to wait for.
SCALE = 10
STATE = 17_712_730
# Saves a walk, and says how long each save took. All states are made first: on a busy machine room is freed between saves else.
TRAIN = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
from series import walk
folder, count, seed, scale = sys.argv[2], *map(int, sys.argv[3:])
for step, state in enumerate(list(walk(count, seed=seed, scale=scale)), 1):
    began = time.monotonic()
    torch.save(state, f"{folder}/step_{step:04d}.pt")
    print(time.monotonic() - began, flush=True)
"""


@pytest.fixture(params=[True, False], ids=["passthrough", "no-passthrough"])
def disk(plain, request):
    """Makes a store on a file system of its own, as large as so many states: an ext4, or a tmpfs."""
    made = []

    def make(states, kind="ext4", scale=SCALE):
        size = int(states * STATE * scale / SCALE)
        image, folder = plain / "image", plain / "disk"
        folder.mkdir()
        with open(image, "wb") as f:
            # The journal and the inodes take 5 MB.
            f.truncate(size + (5 << 20))
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-J", "size=4", "-N", "2048", image], check=True)
        how = ["-o", "loop", image] if kind == "ext4" else ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
        subprocess.run(["mount", *how, folder], check=True)
        mount = Mount(plain / "base", passthrough=request.param, store=folder / "store")
        made.append((mount, folder))
        return mount.mount()

    yield make
    for mount, folder in made:
        mount.close()
        subprocess.run(["umount", folder], check=True)


def train(folder, count, seed=1, scale=SCALE):
    support = Path(__file__).parents[1] / "support"
    return subprocess.Popen([sys.executable, "-c", TRAIN, *map(str, (support, folder, count, seed, scale))],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def times(trainer):
    out, err = trainer.communicate(timeout=600)
    assert trainer.returncode == 0, f"after {out.split()}: {err}"
    return [float(line) for line in out.split()]


def require_exact(path, count, seed=1, scale=SCALE):
    """A file has exactly the last state of a walk."""
    *_, last = walk(count, seed=seed, scale=scale)
    exact, read = tensors_of(last), tensors_of(torch.load(path))
    assert exact.keys() == read.keys() and all(bits_equal(exact[name], read[name]) for name in exact)


@pytest.mark.parametrize("count, scale", [(8, 3), pytest.param(30, SCALE, marks=pytest.mark.nightly)])
def test_thirty_saves_on_a_disk_for_three(disk, count, scale):
    mount = disk(3.5, scale=scale)
    saved = times(train(mount.dir, count, scale=scale))
    assert len(saved) == count
    waits = mount.status()["waits"]
    print(f"longest save {max(saved):.1f} s, {waits}")
    assert waits["waited"] > 0 and waits["waiting"] == 0, waits
    assert waits["longest_ms"] <= 1000 * max(saved) < 60_000 and waits["total_ms"] >= waits["longest_ms"], (waits, max(saved))
    assert re.search(rf"waits +0 for room now; {waits['waited']} files? did", run("status", mount.dir).stdout)
    assert "its program waited" in mount.log.read_text()
    require_exact(mount / f"step_{count:04d}.pt", count, scale=scale)
    mount.sync()
    mount.require_released(*(f"step_{step:04d}.pt" for step in range(1, count)))
    mount.umount()
    require_exact(mount.store / f"tree/step_{count:04d}.pt", count, scale=scale)
    require_clean(mount.store)


def test_two_writers_at_once(disk):
    mount = disk(5)
    for name in "ab":
        (mount / name).mkdir()
    trainers = [train(mount / name, 6, seed) for seed, name in enumerate("ab", 2)]
    assert [len(times(trainer)) for trainer in trainers] == [6, 6]
    assert mount.status()["waits"]["waited"] > 0
    for seed, name in enumerate("ab", 2):
        require_exact(mount / name / "step_0006.pt", 6, seed)


def test_nothing_to_free_is_told_at_once(disk):
    mount = disk(1.7)
    save_walk(mount.dir, 1, scale=SCALE)
    data = (mount / "step_0001.pt").read_bytes()
    mount.sync()
    began = time.monotonic()
    with pytest.raises(OSError) as error, open(mount / "step_0002.pt", "wb") as f:
        f.write(data)
    assert error.value.errno == errno.ENOSPC and time.monotonic() - began < 10
    named = lambda: [problem["says"] for problem in mount.status()["problems"] if problem["kind"] == "cut-short"]
    wait_until(lambda: any("step_0002.pt is cut short: the disk was full" in says for says in named()), 10, f"the status names the file: {named()}")
    assert "step_0002.pt: is cut short; the disk of the store has" in mount.log.read_text()
    assert (mount / "step_0001.pt").read_bytes() == data
    # Once it is gone, so is the problem.
    os.unlink(mount / "step_0002.pt")
    wait_until(lambda: not named(), 10, "nothing is cut short")


def test_a_file_of_the_kernel_that_is_cut_short_is_named(disk):
    """A first save that is larger than the disk: nobody knew its length."""
    mount = disk(1.2)
    state = next(iter(walk(1, scale=2 * SCALE)))
    with pytest.raises((OSError, RuntimeError)):
        torch.save(state, mount / "step_0001.pt")
    named = lambda: [problem["says"] for problem in mount.status()["problems"] if problem["kind"] == "cut-short"]
    wait_until(lambda: any("step_0001.pt is cut short" in says for says in named()), 20, "the status names the file")
    wait_until(lambda: "step_0001.pt: is cut short" in mount.log.read_text(), 10, "the log names it")


def test_room_of_removed_objects_is_waited_for(disk):
    """A removal frees room only once it is durable."""
    # An ext4 waits itself for room that its journal gives back.
    mount = disk(4, "tmpfs")
    run("profile", "--set", "exact", mount.dir)
    # A removal may be quicker than the write after it, but not each time.
    folders = [mount / f"run_{name}" for name in "abcd"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        old, new = save_walk(folder, 2, scale=2, seed=seed)
        mount.sync()
        mount.require_released(f"{folder.name}/{old}")
        # No newer state needs the object of the first one any more.
        (folder / new).rename(folder / "other.pt")
    mount.sync()
    data = bytes(1 << 20)
    # The later objects may be differences to the earlier ones.
    for folder in reversed(folders):
        (mount.store.parent / "filler").unlink(missing_ok=True)
        # The next open finds a full disk.
        fill(mount.store.parent, 100_000)
        with open(folder / "new", "wb", buffering=0) as f:
            os.unlink(folder / "step_0001.pt")
            left = data
            while left:
                left = left[f.write(left) :]
    wait_until(lambda: mount.status()["waits"]["waited"] > 0, 5, "a write has waited")
    assert "/new: its program waited" in mount.log.read_text()


def test_a_daemon_that_is_killed_during_a_wait_loses_nothing(disk):
    mount = disk(3.5)
    trainer = train(mount.dir, 30)
    wait_until(lambda: "waits for room" in mount.log.read_text(), 30, "a save waits")
    os.kill(mount.pid, signal.SIGKILL)
    out, _ = trainer.communicate(timeout=120)
    assert trainer.returncode != 0
    saved = len(out.split())
    wait_dead(mount.pid)
    mount.mount()
    require_exact(mount / f"step_{saved:04d}.pt", saved)
    mount.sync()
    mount.require_released(*(f"step_{step:04d}.pt" for step in range(1, saved)))
    mount.umount()
    require_clean(mount.store)


@pytest.mark.parametrize("reserve", [None, "1 KB", "1000 TB"])
def test_the_reserve_ends_the_wait_of_a_checkpoint(mount, reserve):
    mount.umount()
    settings = mount.store / "stepfs.toml"
    settings.write_text((f'reserve = "{reserve}"\n' if reserve else "") + settings.read_text())
    mount.mount()
    for step, state in zip((10, 20), walk(2), strict=False):
        folder = mount / f"checkpoint-{step}"
        folder.mkdir()
        torch.save(state, folder / "model.pt")
        # Without a newer state, and needed by no run.
        (folder / f"report_{'ab'[step == 20]}.txt").write_text("\n".join(map(str, range(40_000))))
    # The kernel tells of a close after it has returned.
    released = lambda: mount.released() == ["checkpoint-10/model.pt"]
    if reserve == "1000 TB":
        wait_until(released, 20, "it is released at once")
    else:
        wait_until(lambda: mount.status()["settling"] == 1, 20, "it waits for the report")
        mount.sync()
        assert not mount.released()
