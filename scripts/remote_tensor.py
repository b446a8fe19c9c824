#!/usr/bin/env python3
"""Measure how many bytes one tensor costs of a large checkpoint that only a remote has.

    remote_tensor.py [--gb 2] [--states 2] [--kind file|s3]

Saves a series of states of so many GB with tensors of 1 MB through one mount, and loads one tensor of each through a mount
of a fresh store (safetensors' `safe_open`). Prints the bytes that came, the share of the checkpoint, and the time; then the
same for a second tensor, and for the whole. STEPFS_BIN names the program. Needs about twice the room of all states.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/real/support"))

import numpy as np  # noqa: E402
from remotes import KINDS, Node, make_remote  # noqa: E402
from safetensors.numpy import safe_open, save_file  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2)
    parser.add_argument("--states", type=int, default=2)
    parser.add_argument("--kind", choices=["file", "s3"], default="file")
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="stepfs-remote-"))
    remote = make_remote(args.kind, base)
    first, second = Node(base / "first", remote, 'newest = "exact"'), Node(base / "second", remote)
    draw, count = np.random.default_rng(1), int(args.gb * 1e9 / (1 << 20))
    try:
        first.mount()
        os.mkdir(first / "run")
        state = {f"layer.{n}.weight": 0.02 * draw.standard_normal(1 << 18, np.float32) for n in range(count)}
        for step in range(args.states):
            save_file(state, first / f"run/step_{step}.safetensors")
            for tensor in state.values():
                tensor += 1e-3 * draw.standard_normal(1 << 18, np.float32)
        del state
        first.sync()
        first.pushed(timeout=3600)
        first.umount()
        second.mount()
        for step in reversed(range(args.states)):
            name = f"run/step_{step}.safetensors"
            second.sees(name)
            size = os.path.getsize(second / name)
            for what, tensor in (("one tensor", f"layer.{count // 2}.weight"), ("another", "layer.7.weight")):
                before, begun = second.progress()["came"], time.perf_counter()
                with safe_open(second / name, "numpy") as f:
                    assert len(f.get_tensor(tensor)) == 1 << 18
                spent, came = time.perf_counter() - begun, second.progress()["came"] - before
                print(f"{name} of {size / 1e9:.2f} GB, {what}: {came / 1e6:.2f} MB, {100 * came / size:.2f}%, {spent:.2f} s",
                      flush=True)
        before, begun = second.progress()["came"], time.perf_counter()
        shutil.copyfile(second / name, "/dev/null")
        came = second.progress()["came"] - before
        print(f"{name}, all of it: {came / 1e6:.0f} MB, {100 * came / size:.1f}%, {time.perf_counter() - begun:.1f} s")
    finally:
        first.close()
        second.close()
        remote.close()
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
