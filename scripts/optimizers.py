#!/usr/bin/env python3
"""Print how stepfs stores each optimizer's checkpoints: docs/OPTIMIZERS.md's table.

Trains a small GPT with each optimizer of its own library. scripts/optim/measure.py describes the measurement.
"""

import argparse
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import warnings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from optim.measure import Plan, behind, measure
from optim.series import ENTRIES

PROFILES = ("balanced", "compact")


def coding(slots):
    """Each slot's codec and its share of the file."""
    total = sum(slot["bytes"] for slot in slots.values())
    words = []
    for name, slot in sorted(slots.items(), key=lambda item: -item[1]["bytes"]):
        codec = max(slot["codecs"], key=slot["codecs"].get)
        words.append(f"{name} {codec} {100 * slot['stored'] / slot['bytes']:.1f}" if slot["bytes"] > total / 50 else "")
    return ", ".join(filter(None, words))


def bounds(slots):
    return ", ".join(f"{name} {slot['bound']:.2g}" for name, slot in slots.items() if name != "weights" and slot["bound"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these optimizers")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    print("| optimizer | written by | profile | stored, % of files / of tensors | iterations behind after 20, 40, 60 | each slot: codec, stored % | bounds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.only or ENTRIES:
        entry = ENTRIES[name]
        missing = [module for module in entry.needs.split() if not importlib.util.find_spec(module)]
        if missing:
            sys.exit(f"optimizers.py: {name} needs {', '.join(missing)}; scripts/optimizers.sh installs it")
        found = {profile: [] for profile in PROFILES}
        for seed in range(1, args.seeds + 1):
            base = tempfile.mkdtemp(prefix="stepfs-optim-")
            try:
                for profile, one in measure(name, seed, Plan(), base, PROFILES).items():
                    found[profile].append(one)
            finally:
                shutil.rmtree(base)
        for profile, ones in found.items():
            stored = statistics.mean(share for one in ones for share in one.stored)
            slots = ones[0].slots.values()
            tensors = 100 * sum(slot["stored"] for slot in slots) / sum(slot["bytes"] for slot in slots)
            looks = []
            for look in ones[0].behind:
                mean, half = behind([pair for one in ones for pair in one.behind[look]])
                looks.append(f"{mean:+.2f} ± {half:.2f}")
            row = [name, entry.writer, profile, f"{stored:.1f} / {tensors:.1f}", "; ".join(looks), coding(ones[0].slots), bounds(ones[0].slots)]
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
