#!/usr/bin/env python3
"""Measure how much faster two cores archive than one, in turns. The files are copied into a store before the mount, and archived
after it.

- `ranks`: 64 files of 8 MiB per checkpoint, each of a lineage of its own
- `small`: checkpoints of 512 tensors of 64 KiB
- `large`: files of 1 GiB

Each has weights and the two moments of Adam. Prints one line per case; exits with 1 if a case is below --at-least.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

MIB = 1 << 20
CASES = {  # files per checkpoint, tensors of each kind per file, elements of a tensor, checkpoints
    "ranks": (64, 1, 8 * MIB // 12, 3),
    "small": (1, 171, 64 * 1024 // 4, 14),
    "large": (1, 12, 1024 * MIB // 12 // 12, 3),
}


def checkpoints(tree, files, tensors, elements, count):
    """A walk: each state is the previous one after a step of Adam."""
    random = np.random.default_rng(1)
    width = 1 << 8
    shape = (elements // width, width)
    state = {}
    for n in range(tensors):
        state[f"layers.{n}.weight"] = (0.02 * random.standard_normal(shape)).astype(np.float32)
    for file in range(files):
        for step in range(1, count + 1):
            moved = {}
            for name, weight in state.items():
                update = random.standard_normal(shape, dtype=np.float32)
                weight += 3e-4 * update
                moved[name] = weight
                moved[f"optimizer.state.{name}.exp_avg"] = 1e-3 * update
                moved[f"optimizer.state.{name}.exp_avg_sq"] = 1e-6 * update * update + np.float32(1e-8)
            directory = tree / f"checkpoint-{step}"
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"rank_{file}.safetensors"
            save_file(moved, path)
            os.utime(path, (1_700_000_000 + 60 * step,) * 2)


def archive(stepfs, template, where, cores, memory):
    """Seconds from the mount until all files are archived and released."""
    store, mount = where / "store", where / "mnt"
    shutil.rmtree(store, ignore_errors=True)
    subprocess.run(["cp", "-a", "--reflink=auto", template, store], check=True)
    os.sync()
    mount.mkdir(exist_ok=True)
    run = lambda *command: subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    began = time.monotonic()
    run("taskset", "-c", cores, stepfs, "mount", store, mount, "--memory", memory, "--log", where / "log")
    try:
        run(stepfs, "sync", mount)
        spent = time.monotonic() - began
        pid = run(stepfs, "status", "--json", mount).stdout
        peak = peak_of(int(re.search(r'"daemon":\s*(\d+)', pid)[1]))
    finally:
        run(stepfs, "umount", mount)
    return spent, peak


def peak_of(pid):
    """The daemon's peak memory in MiB, without pages of files."""
    found = re.search(r"RssAnon:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    whole = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int((whole or found)[1]) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stepfs", type=Path, nargs="+", help="programs to measure in turns")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--memory", default="1G", help="for decoded states (default: %(default)s)")
    parser.add_argument("--at-least", type=float, default=0.0, help="two cores must be so many times as fast as one")
    parser.add_argument("--dir", type=Path, help="where the stores are made (default: a new directory in /tmp)")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(dir=arguments.dir))
    below = False
    try:
        for case in arguments.cases.split(","):
            template = base / "template"
            run = subprocess.run
            (base / "mnt").mkdir(exist_ok=True)
            run([arguments.stepfs[0], "mount", template, base / "mnt"], check=True)
            run([arguments.stepfs[0], "umount", base / "mnt"], check=True)
            checkpoints(template / "tree", *CASES[case])
            best = {}
            for _ in range(arguments.turns):
                for program in arguments.stepfs:
                    for cores in ("0", "0,1"):
                        spent, peak = archive(program, template, base, cores, arguments.memory)
                        before = best.get((program, cores), (float("inf"), 0))
                        best[program, cores] = (min(before[0], spent), max(before[1], peak))
            for program in arguments.stepfs:
                one, two = best[program, "0"], best[program, "0,1"]
                ratio = one[0] / two[0]
                below |= ratio < arguments.at_least
                print(f"{case:6} {program}: one core {one[0]:.2f} s, two {two[0]:.2f} s, {ratio:.2f} times as fast; "
                      f"at most {max(one[1], two[1]):.0f} MiB", flush=True)
            shutil.rmtree(template)
    finally:
        shutil.rmtree(base)
    sys.exit(below)


if __name__ == "__main__":
    main()
