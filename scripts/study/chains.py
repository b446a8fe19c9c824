"""Chains of restores that judge the promises of the profiles: several seeds, and several starts in each run.

Several processes may work on one folder of results at a time: each claims its work with a lock.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
from pathlib import Path

import harness

from . import gaps, protocol, sizes

PROMISES = {"balanced": 0.5, "compact": 2.0}  # iterations a restore, upper end of the 95 % interval


@contextlib.contextmanager
def claim(path, wait):
    """Whether the file's lock is ours; with `wait` it always is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def share(jobs):
    """Does all jobs, (path to lock, function), together with other processes. It waits at the end for jobs of others, and finds
    them done. Returns the answers in order.
    """
    answers = {}
    for wait in (False, True):
        for n, (path, work) in enumerate(jobs):
            if n not in answers:
                with claim(Path(path), wait) as ours:
                    if ours:
                        answers[n] = work()
    return [answers[n] for n in range(len(jobs))]


def build():
    """Hash of the measured program."""
    return hashlib.sha256(Path(harness.BIN).read_bytes()).hexdigest()[:16]


class Kept:
    """Finished runs, one JSON file each. A run through a mount belongs to one build of stepfs; the control and the base do not."""

    def __init__(self, folder, again):
        self.folder, self.again = folder, again
        self.build = build()
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name):
        return self.folder / f"{name}.json"

    def of(self, task, profile):
        return {"recipe": task.recipe(), "build": None if profile == protocol.ULP else self.build}

    def known(self, name, task, profile):
        """The earlier result, if any."""
        path = self.path(name)
        answer = json.loads(path.read_text()) if path.exists() else None
        return answer if answer and answer["of"] == self.of(task, profile) else None

    def get(self, name, task, profile, make, say):
        if not self.again and (known := self.known(name, task, profile)):
            return known
        say(f"{name} ...")
        answer = {"of": self.of(task, profile), **make()}
        protocol.write(self.path(name), answer)
        return answer


def bases(tasks, seeds, raw, again, say, done_only=False):
    """The uninterrupted runs, by task and seed; with `done_only`, none is trained."""
    if done_only and (missing := [task.name for task in tasks for seed in seeds[: 1 if task.weighed_only else None] if not protocol.is_known(task, seed, raw)]):
        raise SystemExit(f"--done-only: not all of these runs are there that nothing interrupts: {', '.join(dict.fromkeys(missing))}")
    pairs = [(task, seed) for seed in seeds for task in tasks if seed == seeds[0] or not task.weighed_only]
    job = lambda task, seed: (protocol.folder(raw, task, seed) / "base", lambda: protocol.uninterrupted(task, seed, raw, again, say))
    done = share([job(*pair) for pair in pairs])
    return {task.name: [run for (of, _), run in zip(pairs, done) if of is task] for task in tasks}


def chains(tasks, seeds, kept, raw, where, say, extra, starts_of, done_only=False):
    """Sizes and chains of each task and profile by name; with `done_only`, only finished ones. `seeds`: those of each profile."""
    jobs = []
    for task in tasks:
        files = [task.file(place) for place in task.weighed()]
        for profile in seeds:
            if profile != protocol.ULP and not profile.startswith(protocol.AHEAD):
                weigh = lambda task=task, profile=profile, files=files: {"report": sizes.measure(protocol.folder(raw, task, 1), files, profile, extra, where)}
                jobs.append((f"{task.name}-{profile}-sizes", task, profile, weigh))
    # Seed by seed, so that at any time the finished work covers all tasks, and about the same share of each profile's seeds.
    rounds = sorted((n / len(those), profile, seed) for profile, those in seeds.items() for n, seed in enumerate(those, 1))
    for (_, profile, seed), task in itertools.product(rounds, [task for task in tasks if not task.weighed_only]):
        for start in starts_of(task):
            run = lambda task=task, seed=seed, profile=profile, start=start: protocol.interrupted(task, seed, profile, *task.chain_from(start), raw, where, extra)
            jobs.append((f"{task.name}-{profile}-start{start}-seed{seed}", task, profile, run))
    if done_only:
        found = {name: kept.known(name, task, profile) for name, task, profile, _ in jobs}
        return {name: answer for name, answer in found.items() if answer}
    work = lambda name, task, profile, make: (kept.path(name), lambda: kept.get(name, task, profile, make, say))
    return {job[0]: answer for job, answer in zip(jobs, share([work(*job) for job in jobs]))}


def judged(task, seeds, runs, of, starts_of):
    """The result for one task: verdicts by profile. `of`: the uninterrupted runs, by seed from 1 on."""
    found = {}
    for profile, those in seeds.items():
        name = lambda seed, start: f"{task.name}-{profile}-start{start}-seed{seed}"
        pairs = [(seed, start) for seed in those for start in starts_of(task) if name(seed, start) in runs]
        each = [{"seed": seed, **gaps.of_chain(task, runs[name(seed, start)]["segments"], of[seed - 1], of)} for seed, start in pairs]
        outcome = gaps.judge(task, each)
        size = runs.get(f"{task.name}-{profile}-sizes")
        outcome["total"] = size["report"]["total"] if size else None
        outcome["verdict"] = gaps.verdict(outcome, PROMISES.get(profile.removeprefix(protocol.AHEAD)))
        found[profile] = outcome
    return found
