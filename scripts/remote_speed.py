#!/usr/bin/env python3
"""Measure saves and loads in a mount with a remote beside it, against one without. Both take turns.

    remote_speed.py --series DIR [--newest quantized|exact|none] [--pause SECONDS] [--rounds N]

Copies the checkpoints of DIR (`scripts/gpt.py --out DIR`) with an fsync each, reads the newest back after each, and prints
medians of the ratios: time without a remote to time with one. STEPFS_BIN names the program.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/real/support"))

from harness import Mount  # noqa: E402
from remotes import Directory, Node  # noqa: E402


def timed(act):
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def save(data, path):
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=Path, required=True)
    parser.add_argument("--newest", default="quantized")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds of training between two checkpoints")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="stepfs-remote-"))
    mounts = [Mount(base / "alone"), Node(base / "beside", Directory(base), f'newest = "{args.newest}"')]
    spent = {"save": ([], []), "load": ([], [])}
    try:
        for mount in mounts:
            mount.mount()
            os.mkdir(mount / "run")
        series = [path.read_bytes() for path in sorted(args.series.iterdir())]
        for number in range(args.rounds * len(series)):
            data = series[number % len(series)]
            for place in (0, 1) if number % 2 else (1, 0):
                path = mounts[place] / f"run/step_{number:05d}.pt"
                spent["save"][place].append(timed(lambda: save(data, path)))
                spent["load"][place].append(timed(path.read_bytes))
                time.sleep(args.pause)
        for what, (alone, beside) in spent.items():
            ratios = [a / b for a, b in zip(alone, beside)]
            print(f"{what}: {statistics.median(alone) * 1e3:.1f} ms alone, {statistics.median(beside) * 1e3:.1f} ms beside a "
                  f"remote; ratio of medians {statistics.median(alone) / statistics.median(beside):.2f}, median of ratios "
                  f"{statistics.median(ratios):.2f}, sums {sum(alone) / sum(beside):.2f}")
    finally:
        for mount in mounts:
            mount.close()
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
