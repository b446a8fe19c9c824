#!/usr/bin/env python3
"""The effect of a single restore, and the cost of each kind of tensor: from released files of a task with Adam.

The series of the task is copied into a fresh mount and released; each file is compared with the exact one.

- `cost`: the held-out loss at once, with the weights of this kind as released. It is the mean of the losses with the error and
  with its opposite, less the exact loss. This cancels the first order, which is noise many times as large as the cost.
  `lean` is half the difference of the two losses; errors that lean against nothing have 0.
- `v e^2`: share of sum v e^2 / 2 over all kinds, v the second moment and e the error: the cost as files alone show it.
- `step`: root of 12 times the mean squared error, in root mean squares of the update between two checkpoints.
- `speed`: sum v / sqrt(v_q) over sum sqrt(v): how many times too large coming updates are, for about 1 / (1 - beta2)
  iterations.
- `kept`: <u_q, u> / <u, u>, u = m / sqrt(v).

    errors.py mixture_w64_i20 --profile balanced --raw DIR --stepfs target/release/stepfs
"""

import argparse
import math
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/real/support")]

import harness  # noqa: E402
import torch  # noqa: E402
from study import gaps, protocol, sizes, tasks  # noqa: E402


def kind(name, value):
    """`blocks.3.attn.weight` as `attn`; all vectors together."""
    return re.sub(r"(^|\.)(blocks|weight|mixture|\d+)(?=\.|$)", "", name).strip(".").split(".")[0] if value.dim() >= 2 else "vectors"


def is_tied(name, model):
    """GPT's head is its embedding under another name."""
    return name == "head.weight" and "wte.weight" in model


def moments(state):
    """Both moments of each parameter by name: the optimizer has matrices first, then vectors."""
    model = state["model"]
    names = [name for name in model if not is_tied(name, model)]
    ordered = [name for name in names if model[name].dim() >= 2] + [name for name in names if model[name].dim() < 2]
    parts = state["optimizer"]["state"]
    return {name: (parts[n]["exp_avg"].double(), parts[n]["exp_avg_sq"].double()) for n, name in enumerate(ordered)}


def released(series, names, profile, where):
    """The released states, as a mount gives them."""
    base = Path(tempfile.mkdtemp(prefix="stepfs-errors-", dir=where))
    try:
        mount = sizes.open_store(base, profile)
        try:
            for name in names:
                shutil.copy2(series / name, mount / name)
            mount.sync(timeout=3600)
            mount.require_released(*names[:-1])
            return [protocol.load(mount / name) for name in names[:-1]]
        finally:
            mount.close()
    finally:
        if left := harness.mounts_below(base):
            sys.exit(f"errors.py: {left} could not be unmounted; files left in {base}")
        shutil.rmtree(base)


def compare(exact, got, after, sums):
    """Adds the figures of the files to `sums`, by kind."""
    true, read = moments(exact), moments(got)
    for name, (m, v) in true.items():
        w, error = exact["model"][name].double(), (got["model"][name] - exact["model"][name]).double()
        (m_q, v_q), update = read[name], after["model"][name].double() - w
        at = (v > 0) & (v_q > 0)
        root, root_q = v[at].sqrt(), v_q[at].sqrt()
        u, u_q = m[at] / root, m_q[at] / root_q
        found = {"elements": w.numel(), "cost": (v * error**2).sum() / 2, "error": (error**2).sum(), "update": (update**2).sum(), "root": root.sum(),
                 "fast": (v[at] / root_q).sum(), "both": (u * u_q).sum(), "square": (u * u).sum()}
        for key in (kind(name, w), "all"):
            for what, value in found.items():
                sums[key][what] += float(value)


def costs(run, exact, got):
    """(cost, lean) of the weights by kind."""
    loss = lambda state: (run.model.load_state_dict(state), run.measure()[0])[1]
    model = exact["model"]
    groups = defaultdict(list, {"all": list(model)})
    for name, value in model.items():
        groups[kind("wte.weight" if is_tied(name, model) else name, value)].append(name)
    known, answer = loss(model), {}
    for key, names in groups.items():
        there, back = (loss({**model, **{name: model[name] + sign * (got["model"][name] - model[name]) for name in names}}) for sign in (1, -1))
        answer[key] = ((there + back) / 2 - known, (there - back) / 2)
    return answer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[name for name, task in tasks.TASKS.items() if task.set])
    parser.add_argument("--profile", default="balanced")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--raw", type=Path, required=True, help="as for resume_study.py: missing series are trained")
    parser.add_argument("--stepfs", metavar="BIN", help="the program to measure (default: $STEPFS_BIN, target/release/stepfs)")
    parser.add_argument("--windows", type=int, default=512, help="of the held-out text (default: %(default)s)")
    parser.add_argument("--dir", help="where to work; decides the disk (default: the temporary directory)")
    arguments = parser.parse_args()
    if arguments.stepfs:
        harness.BIN = str(Path(arguments.stepfs).resolve())
    task = tasks.TASKS[arguments.task]
    protocol.uninterrupted(task, arguments.seed, arguments.raw, say=lambda line: print(line, file=sys.stderr))
    series, names = protocol.folder(arguments.raw, task, arguments.seed), [task.file(place) for place in task.weighed()]
    read = released(series, names, arguments.profile, arguments.dir)
    run = task.make(arguments.seed)
    run.windows = arguments.windows
    sums, found = defaultdict(lambda: defaultdict(float)), defaultdict(list)
    for name, after, got in zip(names, names[1:], read):
        exact = protocol.load(series / name)
        compare(exact, got, protocol.load(series / after), sums)
        for key, pair in costs(run, exact, got).items():
            found[key].append(pair)
    print(f"{task.name}, {arguments.profile}, {len(read)} states: the immediate cost of a single restore")
    print("| kind | share | step | cost at once | lean | v e^2 | speed | kept |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    show = lambda values: "{:+.5f} ± {:.5f}".format(*gaps.mean_and_interval(values))
    for key, part in sorted(sums.items(), key=lambda item: -item[1]["cost"]):
        cells = [key, f"{part['elements'] / sums['all']['elements']:.3f}", f"{math.sqrt(12 * part['error'] / part['update']):.2f}", *(show(values) for values in zip(*found[key]))]
        cells += [f"{part['cost'] / sums['all']['cost']:.3f}", f"{part['fast'] / part['root']:.3f}", f"{part['both'] / part['square']:.3f}"]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
