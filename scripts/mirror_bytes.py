#!/usr/bin/env python3
"""Measure how many bytes each checkpoint of a series puts on a mirror, everything counted.

    mirror_bytes.py --series DIR [--newest quantized|exact|none] [--profile balanced|compact] [--every SECONDS]

Copies the checkpoints of DIR (`scripts/gpt.py --out DIR`) one after the other into a mount with a mirror, and waits after
each until the mirror has it. STEPFS_BIN names the program.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/real/support"))

from harness import run  # noqa: E402
from mirrors import Directory, Mirrored  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=Path, required=True)
    parser.add_argument("--newest", default="quantized")
    parser.add_argument("--profile", default="balanced")
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="stepfs-mirror-"))
    mirror = Directory(base)
    node = Mirrored(base / "store", mirror, f'newest = "{args.newest}"')
    try:
        node.mount()
        os.mkdir(node / "run")
        run("profile", node / "run", "--set", args.profile)
        before, shares = 0, []
        for path in sorted(args.series.iterdir()):
            shutil.copy(path, node / "run" / path.name)
            node.mirrored()
            after = sum(mirror.names().values())
            shares.append(100 * (after - before) / path.stat().st_size)
            print(f"{path.name}  {shares[-1]:6.2f}%", flush=True)
            before = after
        rest = sorted(shares[1:])
        print(f"after the first: mean {sum(rest) / len(rest):.2f}%, median {rest[len(rest) // 2]:.2f}%")
        print(f"encoded ahead: {node.log.read_text().count('encoded ahead')}")
    finally:
        node.close()
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
