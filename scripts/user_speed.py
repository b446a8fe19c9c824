#!/usr/bin/env python3
"""Measure what an ordinary user gets from a mount, in turns with a plain directory on the same disk.

    scripts/user_speed.py [--program target/release/stepfs] [--modes helper,served] [--runs 9] [--size 512] [--only save,load]

Modes: with the helper stepfs-passthrough, which lies beside the program, and served by the daemon. As root it becomes `nobody`, in
a mount namespace of its own where every user may open /dev/fuse. All files are removed at the end. It takes four to six minutes.

- `small`: writes and appends in pieces of 1 KiB, 8 KiB and 1 MiB to an open file; and files of one byte, opened and closed
- `save`, `load`, `map`: torch.save, torch.load, and safe_open with every tensor summed up. Before each load the mount's own pages are
  dropped, as after a save. The store's file stays in the page cache, as the plain one does.
- `encode`: torch.load of the newest file while the daemon encodes the one before it; and of a plain file meanwhile

The ratio is that of medians, plain to mount; below 1 the mount is slower. For `encode`, plain is measured while the daemon is idle.
`daemon` is the processor time of the threads that answer the kernel, with their write or read of the store's file. The rest of the call
is the kernel's: messages, wake-ups and copies.
"""

import argparse
import gc
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MB = 1 << 20
NOBODY = 65534
# Pieces: bytes, how many of them, whether they are appended.
PIECES = ((1 << 10, 4096, False), (1 << 10, 4096, True), (8 << 10, 2048, False), (8 << 10, 2048, True), (MB, 256, False))
# Files of one byte.
FILES = 256
# Lowest ratios that the project aims at.
GOALS = {
    "helper": {"small 1 KiB": 0.8, "small 8 KiB": 0.8, "save": 0.95, "load": 0.95, "map": 0.95},
    "served": {"small 1 KiB": 0.2, "small 8 KiB": 0.4, "save": 0.7, "load": 0.8, "encode": 0.8},
}


class Mount:
    """A store that this user has mounted, by one of the modes."""

    def __init__(self, program, base, mode):
        self.program, self.mode, self.store, self.dir = program, mode, base / f"{mode}.store", base / f"{mode}.mnt"
        self.dir.mkdir()
        if mode == "served":
            os.environ["STEPFS_PASSTHROUGH"] = str(base / "none")
        self.stepfs("mount", self.store, self.dir)
        print(f"{mode}: {json.loads(self.stepfs('status', '--json', self.dir).stdout)['serving']}", file=sys.stderr)
        self.pid = int(re.search(r"by process (\d+)", self.stepfs("status", self.dir).stdout)[1])

    def stepfs(self, *words):
        return subprocess.run([self.program, *map(str, words)], check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    def rest(self):
        """Nothing is dirty, and the daemon has nothing to do."""
        self.stepfs("sync", self.dir)
        os.sync()

    def spent(self, name):
        """Seconds that the daemon's threads of this name were on a processor."""
        spent = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            try:
                if (task / "comm").read_text().startswith(name):
                    spent += int((task / "schedstat").read_text().split()[0])
            except OSError:
                pass
        return spent / 1e9


class Meter:
    """Times of one mode, by row and side."""

    def __init__(self, mount, runs):
        self.mount, self.runs, self.rows = mount, runs, {}

    def time(self, row, side, action):
        gc.collect()
        before, began = self.mount.spent("fuser"), time.perf_counter()
        action()
        took = time.perf_counter() - began
        for name, value in ((side, took), (f"{side} daemon", self.mount.spent("fuser") - before)):
            self.rows.setdefault(row, {}).setdefault(name, []).append(value)

    def in_turns(self, row, plain, mount, before=lambda: None):
        for n in range(self.runs):
            for side in ("plain", "mount") if n % 2 == 0 else ("mount", "plain"):
                before()
                self.time(row, side, plain if side == "plain" else mount)

    def report(self, calls):
        for row, sides in self.rows.items():
            if not sides["mount"]:
                print(f"{self.mount.mode:7} {row}: the daemon was done before the first read; take a larger --size")
                continue
            plain, mount, daemon = (statistics.median(sides[side]) for side in ("plain", "mount", "mount daemon"))
            goal = next((least for name, least in GOALS[self.mount.mode].items() if row.startswith(name)), None)
            count, unit = calls(row)
            verdict = "" if goal is None else f"{'ok' if plain / mount >= goal else 'BELOW'} {goal:.2f}"
            each = [f"{1e6 * time / count:9.1f}" for time in (plain, mount, daemon, mount - daemon)]
            more = f"  plain meanwhile {statistics.median(sides['meanwhile']) / plain:.2f} of its time" if sides.get("meanwhile") else ""
            print(f"{self.mount.mode:7} {row:20} {plain / mount:6.2f} {verdict:11} {' '.join(each)}  us per {unit}{more}", flush=True)


def remove(plain, meter, name):
    for folder in (plain, meter.mount.dir):
        (folder / name).unlink(missing_ok=True)


def small(meter, plain):
    for size, count, appends in PIECES:
        data, files = os.urandom(size), {}

        def before(appends=appends, files=files):
            for folder in (plain, meter.mount.dir):
                if folder in files:
                    files.pop(folder).close()
                (folder / "pieces.bin").unlink(missing_ok=True)
                files[folder] = open(folder / "pieces.bin", "ab" if appends else "wb", buffering=0)

        def write(folder, data=data, count=count, files=files):
            for _ in range(count):
                files[folder].write(data)

        name = f"small {size >> 10} KiB{' append' if appends else ''}" if size < MB else "small 1 MiB"
        meter.in_turns(name, lambda: write(plain), lambda: write(meter.mount.dir), before)
        [file.close() for file in files.values()]
        remove(plain, meter, "pieces.bin")

    def make(folder):
        for n in range(FILES):
            (folder / f"file{n}.bin").write_bytes(b"x")

    def before():
        [remove(plain, meter, f"file{n}.bin") for n in range(FILES)]
        meter.mount.rest()

    meter.in_turns("files", lambda: make(plain), lambda: make(meter.mount.dir), before)
    before()


def state(torch, megabytes):
    generator = torch.Generator().manual_seed(1)
    return {f"layer.{n}.weight": torch.randn(2048, 2048, generator=generator) * 0.02 for n in range(megabytes // 16)}


def save(meter, plain, torch, size):
    tensors = state(torch, size)

    def before():
        remove(plain, meter, "model.pt")
        meter.mount.rest()

    at = lambda folder: lambda: torch.save(tensors, folder / "model.pt")
    meter.in_turns("save", at(plain), at(meter.mount.dir), before)
    before()


def drop(path):
    """The mount's pages of a file. With the helper the file has none but the store's."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read(row, meter, plain, name, write, load):
    """Reads of one file that does not change."""
    here = meter.mount.dir / name
    for path in (plain / name, here):
        write(path)
    meter.mount.rest()
    load(plain / name), load(here)
    before = (lambda: drop(here)) if meter.mount.mode == "served" else (lambda: None)
    meter.in_turns(row, lambda: load(plain / name), lambda: load(here), before)
    remove(plain, meter, name)
    meter.mount.rest()


def encode(meter, plain, torch, size):
    tensors = state(torch, size)
    change = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(2)) * 1e-4
    torch.save(tensors, copy := plain / "model.pt")
    torch.save(tensors, meter.mount.dir / "step_0.pt")
    for n in range(1, meter.runs + 1):
        for tensor in tensors.values():
            tensor.add_(change)
        newest = meter.mount.dir / f"step_{n}.pt"
        torch.load(copy)
        meter.time("encode", "plain", lambda: torch.load(copy))
        before = meter.mount.spent("archive-")
        torch.save(tensors, newest)
        end = time.monotonic() + 60
        while meter.mount.spent("archive-") < before + 0.05 and time.monotonic() < end:
            time.sleep(0.005)
        # The order changes: the encoder may be done before the second one.
        for side, path in (("mount", newest), ("meanwhile", copy))[:: 1 if n % 2 else -1]:
            before = meter.mount.spent("archive-")
            meter.time("encode", side, lambda: torch.load(path))
            if meter.mount.spent("archive-") == before:
                # The daemon was done: this tells nothing.
                meter.rows["encode"][side].pop(), meter.rows["encode"][f"{side} daemon"].pop()
        meter.mount.rest()
    copy.unlink()


def measure(arguments, base):
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    def map_all(path):
        with safe_open(path, "pt") as file:
            return sum(float(file.get_tensor(name).sum()) for name in file.keys())

    counts = {f"small {size >> 10} KiB": (count, "call") for size, count, _ in PIECES if size < MB} | {"files": (FILES, "file")}
    whole = lambda row: (256 if row == "small 1 MiB" else arguments.size, "MiB")
    calls = lambda row: next((found for name, found in counts.items() if row.startswith(name)), whole(row))
    plain = base / "plain"
    plain.mkdir()
    size, load = arguments.size, [os.getloadavg()[0]]
    parts = {
        "small": lambda meter: small(meter, plain),
        "save": lambda meter: save(meter, plain, torch, size),
        "load": lambda meter: read("load", meter, plain, "model.pt", lambda path: torch.save(state(torch, size), path), torch.load),
        "map": lambda meter: read("map", meter, plain, "model.safetensors", lambda path: save_file(state(torch, size), path), map_all),
        "encode": lambda meter: encode(meter, plain, torch, size),
    }
    print(f"{'mode':7} {'row':20} {'ratio':>6} {'goal':11} {'plain':>9} {'mount':>9} {'daemon':>9} {'kernel':>9}")
    for mode in arguments.modes.split(","):
        meter = Meter(mount := Mount(arguments.program, base, mode), arguments.runs)
        try:
            for part in arguments.only.split(","):
                parts[part](meter)
            meter.report(calls)
        finally:
            mount.stepfs("umount", mount.dir)
        load.append(os.getloadavg()[0])
    print(f"load of the machine, before and after each mode: {', '.join(f'{of:.1f}' for of in load)}; {os.cpu_count()} cores")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "target/release/stepfs"))
    parser.add_argument("--modes", default="helper,served")
    parser.add_argument("--only", default="small,save,load,map,encode", help="parts, separated by commas")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--size", type=int, default=512, help="MiB of a state")
    parser.add_argument("--dir", default=os.environ.get("STEPFS_TEST_DIR", "/tmp"), help="place of the store and the plain directory")
    parser.add_argument("--base", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.base:
        return measure(arguments, Path(arguments.base))
    base = Path(tempfile.mkdtemp(prefix="user_speed.", dir=arguments.dir))
    words, helper = [sys.executable, __file__, *sys.argv[1:], "--base", str(base)], base / "stepfs-passthrough"
    try:
        if os.geteuid() == 0:
            program = base / "stepfs"
            shutil.copy(arguments.program, program)
            os.chown(base, NOBODY, NOBODY)
            if "helper" in arguments.modes:
                shutil.copy(Path(arguments.program).with_name("stepfs-passthrough"), helper)
                subprocess.run(["setcap", "cap_sys_admin=ep", helper], check=True)
            begin = 'mknod -m 666 "$0/fuse" c 10 229; mount --bind "$0/fuse" /dev/fuse; exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"'
            words = ["unshare", "-m", "bash", "-ec", begin, str(base), *words, "--program", str(program)]
            os.environ.update(STEPFS_PASSTHROUGH=str(helper), HOME=str(base))
        return subprocess.run(words).returncode
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    sys.exit(main())
