#!/usr/bin/env python3
"""Take the remote away for a while, while a program saves.

    remote_away.py [--minutes 10] [--pause SECONDS]

Saves a small training state with an fsync every --pause seconds: for a minute with the remote, for --minutes without it,
then until the remote has everything again. Prints the times of saves in each part, the largest backlog, and how long
catching up takes. At the end a fresh store must read every file. STEPFS_BIN names the program.
"""

import argparse
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/real/support"))

import torch  # noqa: E402
from remotes import Directory, Node  # noqa: E402
from series import walk  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--pause", type=float, default=1)
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="stepfs-remote-"))
    remote = Directory(base)
    node, fresh = Node(base / "node", remote, 'newest = "exact"'), Node(base / "fresh", remote)
    states = walk(1_000_000)
    step = 0

    def save_for(seconds):
        nonlocal step
        times, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            buffer = io.BytesIO()
            torch.save(next(states), buffer)
            begun = time.perf_counter()
            with open(node / f"step_{step:05d}.pt", "wb") as f:
                f.write(buffer.getvalue())
                f.flush()
                os.fsync(f.fileno())
            times.append(time.perf_counter() - begun)
            step += 1
            time.sleep(args.pause)
        return times

    def said(what, times):
        print(f"{what}: {len(times)} saves, median {1e3 * statistics.median(times):.0f} ms, slowest {1e3 * max(times):.0f} ms",
              flush=True)

    try:
        node.mount()
        said("with the remote", save_for(min(60, 60 * args.minutes)))
        remote.go_away()
        said("without it", save_for(60 * args.minutes))
        progress = node.progress()
        print(f"backlog: {progress['files']} files, {progress['bytes'] / 1e6:.0f} MB, because: {progress['failing']}", flush=True)
        remote.come_back()
        begun = time.monotonic()
        while node.progress()["failing"]:
            time.sleep(0.2)
        print(f"it answers again after {time.monotonic() - begun:.1f} s", flush=True)
        node.sync()
        node.pushed(timeout=3600)
        print(f"all is there {time.monotonic() - begun:.1f} s after it came back", flush=True)
        wanted = {f"step_{n:05d}.pt": (node / f"step_{n:05d}.pt").read_bytes() for n in range(step)}
        node.umount()
        fresh.mount()
        for name, data in wanted.items():
            fresh.sees(name, 60)
            assert (fresh / name).read_bytes() == data, name
        print(f"a fresh store reads all {step} files", flush=True)
    finally:
        node.close()
        fresh.close()
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
