#!/usr/bin/env python3
"""Measure how long a fresh store takes to show many files of a remote.

    remote_names.py [--files 10000] [--small]

Prints the time of `stepfs mount`, which waits for the names, and of `ls -lR` right after it and later.
The files are links to one file, so they share its object; with --small the journal has their bytes. STEPFS_BIN names the
program.
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


def processor(node):
    """Seconds of processor time that the daemon has used: what counts on a busy machine."""
    fields = Path(f"/proc/{node.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
        (first / "first.bin").write_bytes(bytes(70_000))
        first.pushed()
        for number in range(args.files):
            folder = first / f"run/step_{number // 100:04d}"
            os.makedirs(folder, exist_ok=True)
            path = folder / f"rank_{number % 100:02d}.bin"
            path.write_bytes(bytes(100)) if args.small else os.link(first / "first.bin", path)
        first.pushed(timeout=3600)
        first.umount()
        begun = time.perf_counter()
        second.mount()
        mounted = time.perf_counter() - begun
        count, alone = listed(second)
        print(f"{args.files} files: `stepfs mount` took {mounted:.2f} s; `ls -lR` then took {alone:.2f} s and listed {count}; "
              f"{processor(second):.2f} s of the daemon's processor")
        assert count == args.files + 1, f"{count} are listed right after the mount"
        for _ in range(5):
            before = processor(second)
            count, alone = listed(second)
            print(f"once more: {alone:.2f} s, {processor(second) - before:.2f} s of the daemon's processor")
    finally:
        first.close()
        second.close()
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
