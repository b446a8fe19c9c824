"""Measures checkpoints of an optimizer in a store: their stored share, and how far behind a run is that resumes from one.

Training runs once without interruption and saves into mounts of two profiles. Then it resumes from released checkpoints, read
through the mounts, on the batches of the uninterrupted run. The result is the paired gap of the held-out loss in iterations of
the uninterrupted run: positive is behind.
"""

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .series import Run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/real/support"))
from harness import Mount, run as stepfs  # noqa: E402


@dataclass
class Plan:
    """Iterations: the first save, the interval, the number of saves, the restored ones, and the looks after a restore."""

    first: int = 120
    every: int = 20
    saves: int = 6
    restored: tuple = (1, 2, 3)
    looks: tuple = (20, 40, 60)

    def at(self, save):
        return self.first + self.every * save

    @property
    def last(self):
        return max(self.at(self.saves - 1), self.at(max(self.restored)) + max(self.looks))


@dataclass
class Found:
    """For one profile: stored share of whole files, coding of each slot, iterations behind by look."""

    stored: list = field(default_factory=list)
    slots: dict = field(default_factory=dict)
    behind: dict = field(default_factory=dict)
    mib: float = 0.0


def name(step):
    return f"step_{step:05d}.pt"


def open_mounts(base, profiles):
    """A store for each profile, because a store keeps two files with the same bytes once."""
    mounts = {}
    for profile in profiles:
        mounts[profile] = mount = Mount(Path(base) / profile).mount()
        (mount / "run").mkdir()
        stepfs("profile", "--set", profile, mount / "run")
    return mounts


def train(which, seed, plan, folders):
    """The uninterrupted run; returns its held-out losses by iteration."""
    run, losses = Run(which, seed), {}
    saves = {plan.at(save) for save in range(plan.saves)}
    wanted = saves | {plan.at(save) + look for save in plan.restored for look in plan.looks} | {plan.at(s) for s in plan.restored}
    while run.iteration < plan.last:
        run.step()
        if run.iteration in saves:
            run.save(*(folder / name(run.iteration) for folder in folders))
        if run.iteration in wanted:
            losses[run.iteration] = run.loss()
    return losses


def go_on(which, seed, plan, file):
    """Held-out losses at each look after resuming from a released checkpoint."""
    run = Run(which, seed + 1)
    run.load(torch.load(file, map_location="cpu", weights_only=False))
    losses, done = {}, 0
    for look in plan.looks:
        run.steps(look - done)
        losses[look], done = run.loss(), look
    return losses


def slots_of(mount, file):
    """{slot: [codec, largest share of its raw bytes, bound]} of the large tensors, by the last part of their path."""
    found = {}
    for tensor in mount.tensors(file):
        if tensor["bytes"] < 4096:
            continue
        path = tensor["path"].split("/")
        slot = "weights" if path[0] == "model" else path[-1] if len(path) < 5 or not path[-1].isdigit() else path[-2]
        entry = found.setdefault(slot, {"codecs": {}, "bytes": 0, "stored": 0, "bound": 0.0})
        entry["codecs"][tensor["codec"]] = entry["codecs"].get(tensor["codec"], 0) + tensor["bytes"]
        entry["bytes"] += tensor["bytes"]
        entry["stored"] += tensor["stored_bytes"] or 0
        entry["bound"] = max(entry["bound"], tensor["bound"])
    return found


def measure(which, seed, plan, base, profiles=("balanced", "compact")):
    """{profile: Found} of one seed; unmounts its mounts."""
    mounts = open_mounts(base, profiles)
    try:
        losses = train(which, seed, plan, [mount / "run" for mount in mounts.values()])
        return {profile: judge(which, seed, plan, mount, losses) for profile, mount in mounts.items()}
    finally:
        for mount in mounts.values():
            mount.close()


def judge(which, seed, plan, mount, losses):
    mount.sync()
    names = [f"run/{name(plan.at(save))}" for save in range(plan.saves - 1)]
    mount.require_released(*names)
    entries = {row["path"].removeprefix(str(mount.dir)).strip("/"): row for row in mount.ls()}
    # The first of a chain needs no other, and chains are long, so its share is not typical.
    rows = [entries[name] for name in names[1:]]
    found = Found(stored=[100 * row["stored_bytes"] / row["logical_bytes"] for row in rows])
    found.mib = rows[0]["logical_bytes"] / 2**20
    found.slots = slots_of(mount, names[-1])
    for save in plan.restored:
        start, horizon = plan.at(save), max(plan.looks)
        went = go_on(which, seed, plan, mount / names[save])
        slope = (losses[start] - losses[start + horizon]) / horizon
        for look, loss in went.items():
            found.behind.setdefault(look, []).append((loss - losses[start + look], slope))
    return found


def behind(pairs):
    """(mean, half of a 95% interval) of iterations behind. The mean slope of all starts judges each start: where the loss is
    flat, the slope of one start is noise.
    """
    slope = statistics.mean(slope for _, slope in pairs)
    gaps = [gap / slope for gap, _ in pairs]
    if len(gaps) < 2:
        return gaps[0], float("nan")
    t = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31}.get(len(gaps), 2.1)
    return statistics.mean(gaps), t * statistics.stdev(gaps) / len(gaps) ** 0.5
