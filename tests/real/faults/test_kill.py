"""SIGKILL at random instants while saving, archiving, releasing and recalling.

A ledger holds the bytes that each file may show; it is updated only when a call has returned. After each kill and the next
mount every file must hold bytes that the ledger allows: the exact ones, or its final ones. Final bytes may appear at any time,
must lie within the stated bound of the exact ones, and never change again.

    STEPFS_KILLS=100 pytest tests/real/faults/test_kill.py -s      (scripts/kill.sh)
"""

import errno
import io
import os
import random
import subprocess
import threading
import time

import pytest
import torch
from harness import BIN, is_mounted, require_clean, run, wait_until
from series import bits_equal, difference, tensors_of, walk

pytestmark = pytest.mark.stepfs
KILLS = int(os.environ.get("STEPFS_KILLS", 10))
SEED = int(os.environ.get("STEPFS_KILL_SEED", 20))
KEEP = 7  # files per store: enough for chains, few enough that a round stays short


class File:
    """The bytes that one file may show."""

    def __init__(self, exact):
        self.exact = exact  # the bytes of the last write that returned
        self.final = None  # the bytes after it was quantized, once seen
        self.pending = None  # (test of bytes) while a write is under way
        self.becomes = None  # the bytes of an old file once the change under way is complete
        self.gone = False  # an unlink is under way

    def settle(self, data, limit):
        """Judge bytes that were read; remember the final ones. None: all is well. `limit`: the largest error that is stated."""
        if self.pending and self.pending(data):
            self.exact, self.final, self.pending = data, None, None
            return None
        self.pending = None
        becomes, self.becomes = self.becomes, None
        if self.final is not None:
            return None if data == self.final else f"was final, and changed: {describe(data, self.final)}"
        if data == self.exact:
            return None
        # A kill may come after the last byte of a change, and before the call returns here. The changed file is not the newest, so
        # it may be quantized before anybody reads it.
        problems = {bytes_: not_quantized(bytes_, data, limit) for bytes_ in (self.exact, becomes) if bytes_ is not None}
        possible = [bytes_ for bytes_, problem in problems.items() if not problem]
        if not possible:
            return "; ".join(problems.values())
        self.exact = min(possible, key=lambda bytes_: worst_error(bytes_, data))
        self.final = data
        return None


def describe(data, expected):
    at = next((i for i, (a, b) in enumerate(zip(data, expected)) if a != b), min(len(data), len(expected)))
    return f"{len(data)} bytes, expected {len(expected)}, first difference at {at}"


def worst_error(exact, data):
    """The largest error of an element."""
    a, b = (tensors_of(torch.load(io.BytesIO(bytes_))) for bytes_ in (exact, data))
    return max((difference(a[k], b[k]) for k in a if not bits_equal(a[k], b[k])), default=0.0)


def stated(path):
    """The largest error that a file states. If it states none, it may be released right after: then a guess, several times that
    of the largest update of the walk."""
    _, *kinds = os.getxattr(path, "user.stepfs.lossy").decode().replace(",", "").split()
    return max(map(float, kinds[1::2]), default=1e-1)


def not_quantized(exact, data, limit):
    """Why `data` cannot be the quantized form of `exact`; None if it can. The bound of each object is checked after sync."""
    if len(data) != len(exact):
        return describe(data, exact)
    try:
        a, b = (tensors_of(torch.load(io.BytesIO(bytes_))) for bytes_ in (exact, data))
    except Exception as error:  # in any case the file is not a checkpoint any more
        return f"does not load: {error}; {describe(data, exact)}"
    for name, tensor in a.items():
        if not tensor.is_floating_point() or tensor.numel() < 2:
            if not bits_equal(tensor, b[name]):
                return f"{name} must be exact"
        elif difference(tensor, b[name]) > limit:
            return f"{name} is off by {difference(tensor, b[name])}, stated {limit}"
    return None


class Job:
    """A training job and its user, in one thread, until the file system is gone."""

    def __init__(self, mount, files, states, rng):
        self.mount, self.files, self.states, self.rng = mount, files, states, rng
        self.problems, self.done = [], []
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        operations = [self.save] * 6 + [self.recall] * 2 + [self.read] * 3 + [self.overwrite, self.replace, self.unlink, self.sync, self.sync,
                                                                             self.fsync_and_hold]
        try:
            while True:
                self.rng.choice(operations)()
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a file it cannot open or write
            if getattr(error, "errno", None) == errno.ENODATA:
                self.problems.append(f"a file states nothing: {error}")

    def bytes_of_next(self):
        buffer = io.BytesIO()
        torch.save(next(self.states), buffer)
        return buffer.getvalue()

    def write(self, name, data):
        """Write as torch.save does: truncate, then in order; the content is arbitrary until close returns."""
        file = self.files.setdefault(name, File(b""))
        file.pending = lambda read: data.startswith(read)
        with open(self.mount / name, "wb", buffering=0) as f:
            for at in range(0, len(data), 1 << 19):
                f.write(data[at : at + (1 << 19)])
        self.files[name] = File(data)

    def save(self):
        count = sum(name.startswith("step_") for name in self.files)
        if count >= KEEP:
            self.unlink()
        numbers = [int(name[5:10]) for name in self.files if name.startswith("step_")]
        self.write(f"step_{max(numbers, default=0) + 1:05d}.pt", self.bytes_of_next())
        self.done.append("save")

    def overwrite(self):
        self.write("ckpt.pt", self.bytes_of_next())
        self.done.append("overwrite")

    def replace(self):
        """Write beside it, fsync, rename over: the old file or the new one, nothing else."""
        data, name = self.bytes_of_next(), "latest.pt"
        self.files.setdefault("latest.tmp", File(b"")).pending = lambda read: data.startswith(read)
        with open(self.mount / "latest.tmp", "wb", buffering=0) as f:
            f.write(data)
            os.fsync(f.fileno())
        file = self.files.setdefault(name, File(b""))
        file.pending = lambda read: read == data
        self.files["latest.tmp"].gone = True
        if not file.exact:
            file.gone = True
        os.replace(self.mount / "latest.tmp", self.mount / name)
        del self.files["latest.tmp"]
        self.files[name] = File(data)
        self.done.append("replace")

    def fsync_and_hold(self):
        """fsync returned, close did not: the bytes are there."""
        data, name = self.bytes_of_next()[: 700_000 + self.rng.randrange(99_999)], "held.bin"
        file = self.files.setdefault(name, File(b""))
        file.pending = lambda read: data.startswith(read)
        with open(self.mount / name, "wb", buffering=0) as f:
            f.write(data)
            os.fsync(f.fileno())
            self.files[name] = File(data)
            time.sleep(0.03)
        self.done.append("fsync")

    def recall(self):
        """Open an old one for writing and change some of its bytes: the same size, all other bytes as it reads."""
        old = sorted(name for name in self.files if name.startswith("step_"))[:-1]
        if old:
            name = self.rng.choice(old)
            file = self.files[name]
            limit = stated(self.mount / name)
            with open(self.mount / name, "r+b", buffering=0) as f:
                data = f.readall()
                if problem := file.settle(data, limit):
                    self.problems.append(f"{name}, opened for writing: {problem}")
                if len(data) < 3000:
                    return  # a save that was cut off left no more
                # Eight nearby bytes: values like their neighbours, so that the bounds below stay meaningful.
                at = self.rng.randrange(1000, len(data) - 1000) & ~7
                patch = data[at + 64 : at + 72]
                changed = data[:at] + patch + data[at + 8 :]
                # A recall that is cut off leaves an ordinary file with these bytes, which may be quantized anew.
                file.exact, file.final = data, None
                file.pending, file.becomes = lambda read: read == changed, changed
                f.seek(at)
                f.write(patch)
            self.files[name] = File(changed)
            self.done.append("recall")

    def read(self):
        name = self.rng.choice(sorted(self.files) or [None])
        if name and not self.files[name].pending:
            data = (self.mount / name).read_bytes()
            if problem := self.files[name].settle(data, stated(self.mount / name)):
                self.problems.append(f"{name}, while mounted: {problem}")
            self.done.append("read")

    def unlink(self):
        old = sorted(name for name in self.files if name.startswith("step_"))[:-1]
        if old:
            name = self.rng.choice(old)
            self.files[name].gone = True
            os.unlink(self.mount / name)
            del self.files[name]
            self.done.append("unlink")

    def sync(self):
        if run("sync", self.mount.dir, check=False).returncode:
            raise OSError("sync was cut off")
        self.done.append("sync")


def start(mount):
    """In the foreground: our own child, so that its end can be awaited."""
    with open(mount.log, "ab") as log:
        process = subprocess.Popen([BIN, *map(str, mount.arguments()), "--foreground"], stdin=subprocess.DEVNULL, stderr=log)
    mount.pid = process.pid

    def serving():
        assert process.poll() is None, f"mount failed\n{mount.log_tail()}"
        try:
            os.statvfs(mount.dir)  # always asks the daemon; stat may be answered by the kernel from a dead mount
            return is_mounted(mount.dir)
        except OSError:
            return False  # still the dead mount

    wait_until(serving, 30, "mounted again")
    return process


def check_all(mount, files, when):
    """Every file of the ledger reads as it may, and there is no other."""
    for name, file in list(files.items()):
        try:
            data = (mount / name).read_bytes()
        except FileNotFoundError:
            assert file.gone or (file.pending and not file.exact), f"{when}: {name} is lost"
            del files[name]
            continue
        problem = file.settle(data, stated(mount / name))
        assert not problem, f"{when}: {name}: {problem}\n{mount.log_tail()}"
        file.gone = False
    there = {p.name for p in mount.dir.iterdir()}
    assert there == set(files), f"{when}: unexpected {there - set(files)}"


def check_final(mount, files, when):
    """After sync nothing changes any more, and the bounds that `ls` states hold."""
    run("sync", mount.dir)
    check_all(mount, files, when)
    for name, file in files.items():
        if file.final is not None:
            limit = mount.entry(name)["max_abs_error"]
            worst = worst_error(file.exact, file.final)
            assert worst <= limit, f"{when}: {name} is off by {worst}, stated {limit}"
    check_all(mount, files, f"{when}, read again")


@pytest.mark.slow
def test_sigkill_at_random_instants(mount):
    rng = random.Random(SEED)
    states = walk(1_000_000, seed=SEED)
    files, total = {}, {}
    mount.umount()
    process = start(mount)
    # scripts/kill.sh says how it is meant to serve.
    by = {"passthrough": "kernel", "helper": "helper", "served": "daemon"}.get(os.environ.get("STEPFS_MODE"))
    assert by in (None, mount.status()["serving"]["by"])
    for kill in range(1, KILLS + 1):
        job = Job(mount, files, states, random.Random(rng.random()))
        began = time.monotonic()
        job.thread.start()
        time.sleep(rng.uniform(0.05, 1.6))
        process.kill()
        process.wait(timeout=30)
        job.thread.join(timeout=60)
        assert not job.thread.is_alive(), "a call into the dead mount did not return"
        assert not job.problems, job.problems
        when = f"kill {kill} of {KILLS}, seed {SEED}"

        mount.passthrough = kill % 3 != 0
        process = start(mount)
        check_all(mount, files, when)
        check_final(mount, files, when)
        run("umount", mount.dir)
        assert process.wait(timeout=60) == 0
        require_clean(mount.store)
        process = start(mount)
        for what in job.done:
            total[what] = total.get(what, 0) + 1
        print(f"kill {kill:3d}: after {', '.join(job.done[-4:]) or 'nothing'}; {len(files)} files, "
              f"{sum(f.final is not None for f in files.values())} in final form, {time.monotonic() - began:.1f} s", flush=True)
    mount.umount()
    process.wait(timeout=30)
    print("completed before the kills:", total)
