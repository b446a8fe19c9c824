#!/usr/bin/env python3
"""Measure how long a fresh store takes to show many files of a remote.

    remote_names.py [--files 10000] [--small]

Prints the time from the start of `stepfs mount` until `ls -lR` lists all files, and the time of `ls -lR` alone after that.
The files have objects; with --small the journal has their bytes. STEPFS_BIN names the program.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/real/support"))

from remotes import Directory, Node  # noqa: E402


def listed(node):
    begun = time.perf_counter()
    done = subprocess.run(["ls", "-lR", str(node.dir)], capture_output=True, text=True)
    return sum(line.startswith("-") for line in done.stdout.splitlines()), time.perf_counter() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="stepfs-remote-"))
    remote = Directory(base)
    first, second = Node(base / "first", remote), Node(base / "second", remote)
    try:
        first.mount()
        # Equal bytes share one object per lineage at most; zeros pack to nothing.
        data = bytes(100 if args.small else 70_000)
        for number in range(args.files):
            folder = first / f"run/step_{number // 100:04d}"
            os.makedirs(folder, exist_ok=True)
            (folder / f"rank_{number % 100:02d}.bin").write_bytes(data)
        first.pushed(timeout=3600)
        first.umount()
        begun = time.perf_counter()
        second.mount()
        mounted, count = time.perf_counter() - begun, 0
        while count < args.files:
            time.sleep(0.05)
            count, alone = listed(second)
        print(f"{args.files} files: all are listed {time.perf_counter() - begun:.2f} s after the start of the mount, "
              f"{time.perf_counter() - begun - mounted:.2f} s after it serves; the last `ls -lR` took {alone:.2f} s")
        print("once more:", " ".join(f"{listed(second)[1]:.2f}" for _ in range(5)), "s")
    finally:
        first.close()
        second.close()
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
