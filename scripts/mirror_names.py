#!/usr/bin/env python3
"""Measure one save beside many names: its time, its processor time, its bytes on the mirror, and the daemon's memory.

    mirror_names.py [--names 1000000] [--per-directory 1000] [--saves 20] [--mirror DIR]

Makes a store with many small files in directories, and mounts it with a mirror, a directory. Waits until the mirror has all
of them. Then one small file is saved again and again. The last lines say what a month of one save a minute costs at the list
prices of S3 in us-east-1. STEPFS_BIN names the program. DIR gets a file for each name: a tmpfs spares the fsyncs.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/real/support")]

from harness import BIN  # noqa: E402
from mirrors import Directory, Mirrored  # noqa: E402

# Dollars: for a put or list, for a get, and for a GB and month.
PUT, GET, GB_MONTH = 0.005 / 1000, 0.0004 / 1000, 0.023
# A list request tells so many names. The daemon lists all once an hour.
LISTED = 1000
# The daemon keeps all states of an hour, then one an hour for a day, then one a day for a week. A collection reads each.
KEPT = 60 + 23 + 6
SAVES, HOURS = 30 * 24 * 60, 30 * 24


def seconds_of(pid, name):
    """Processor time of a daemon's threads of this name."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == name:
                total += int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total / 1e9


def peak(pid):
    """The most memory that a daemon has had, MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


def wait(mount):
    """Until the mirror has everything. `stepfs sync` gives up where nothing moves for long, as in the first look at many names."""
    for _ in range(100):
        if subprocess.run([BIN, "sync", "--mirror", mount.dir], capture_output=True).returncode == 0:
            return
    sys.exit("the mirror does not get everything: `stepfs status` says why")


def count(directory):
    """Files below a directory, and their bytes."""
    files, size = 0, 0
    for entry in os.scandir(directory):
        if entry.is_dir():
            below = count(entry.path)
            files, size = files + below[0], size + below[1]
        else:
            files, size = files + 1, size + entry.stat().st_size
    return files, size


def fill(tree, names, per_directory):
    for number in range(names):
        directory, file = divmod(number, per_directory)
        if file == 0:
            os.mkdir(tree / f"run-{directory}")
        with open(tree / f"run-{directory}" / f"{file}.json", "w") as f:
            f.write(f"{number}")


def month(puts, names, size, root, kept):
    """What a month costs in dollars, by kind of request."""
    return {
        "puts": SAVES * puts * PUT,
        # The mark, and at each collection the manifest, the top directory and the changed one of each state.
        "gets": (SAVES + HOURS * 3 * kept) * GET,
        "lists": HOURS * (names // LISTED + 1) * PUT,
        "room": (size + kept * root) / 1e9 * GB_MONTH,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", type=int, default=1_000_000)
    parser.add_argument("--per-directory", type=int, default=1_000)
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--mirror", type=Path)
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="stepfs-names-"))
    beside = Path(tempfile.mkdtemp(prefix="stepfs-names-", dir=args.mirror))
    mirror = Directory(beside)
    mount = Mirrored(base / "store", mirror)
    try:
        begun = time.monotonic()
        mount.mount()
        mount.umount()
        fill(mount.store / "tree", args.names, args.per_directory)
        print(f"{args.names:,} names in directories of {args.per_directory:,}: made in {time.monotonic() - begun:.0f} s", flush=True)
        begun = time.monotonic()
        mount.mount()
        print(f"mounted in {time.monotonic() - begun:.1f} s", flush=True)
        wait(mount)
        spent = seconds_of(mount.pid, "mirror")
        print(f"first: {time.monotonic() - begun:.0f} s, {spent:.0f} s of processor time in the mirror's thread", flush=True)
        print(f"memory: {peak(mount.pid):,} MiB at most", flush=True)
        before, times, costs = count(mirror.root), [], []
        for number in range(args.saves):
            (mount / "run-0" / "0.json").write_text(f"again {number}")
            begun, spent = time.monotonic(), seconds_of(mount.pid, "mirror")
            wait(mount)
            times.append(time.monotonic() - begun)
            costs.append(seconds_of(mount.pid, "mirror") - spent)
        # Nothing is deleted within the hour.
        after = count(mirror.root)
        puts, put = ((now - then) / args.saves for now, then in zip(after, before))
        print(
            f"a save: {statistics.median(times):.2f} s until `stepfs sync --mirror` returns, "
            f"{1000 * statistics.median(costs):.1f} ms of processor time, {puts:.1f} puts, {put:,.0f} bytes"
        )
        begun = time.monotonic()
        mount.remount()
        wait(mount)
        print(f"a start: {time.monotonic() - begun:.0f} s, {seconds_of(mount.pid, 'mirror'):.1f} s of processor time")
        print(f"memory: {peak(mount.pid):,} MiB at most", flush=True)
        dollars = month(puts, *after, put, KEPT)
        told = ", ".join(f"{kind} {cost:.2f}" for kind, cost in dollars.items())
        print(f"a month of one save a minute: {sum(dollars.values()):.2f} dollars ({told})")
    finally:
        mount.close()
        for rest in (base, beside):
            shutil.rmtree(rest, ignore_errors=True)


if __name__ == "__main__":
    main()
