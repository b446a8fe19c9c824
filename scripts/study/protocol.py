"""Runs: one that is never interrupted, and others that crash and resume from released checkpoints, read through a mount.

A released checkpoint has a newer state, so this models the worst crash: the newest checkpoint, which the store keeps exact, is
lost too. A run saves checkpoint n, continues to n + 1 and saves it, and n is released. Then it crashes. A new program loads n
from the mount, repeats the iterations from n to n + 1, and saves over the old file. All later checkpoints descend from the
restored state, so the losses of restores add up along the run.

With `ahead-` before the profile, a crash loses the whole store instead, and n is the newest that the mirror has: quantized by
the update before it. The run goes on in a store that is pulled from there.

Until the first crash an interrupted run is the uninterrupted one, so those checkpoints are copied, not computed again.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

import harness
import mirrors
from . import sizes
from .tasks import HISTORY
from .training import digest, nudge

ULP = "ulp"  # not a profile: exact restores, then weights moved by one unit in the last place
AHEAD = "ahead-"  # before a profile: restores of the newest state from a mirror, where it is quantized


def folder(raw, task, seed):
    return Path(raw) / (task.name if seed == 1 else f"{task.name}.seed{seed}")


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def save(run, path):
    torch.save(run.state(), path)


class Log:
    """Measurements by iteration. JSON has only strings as keys."""

    def __init__(self):
        self.train, self.held_out, self.figures, self.averaged = {}, {}, {}, {}

    def measure(self, run):
        self.held_out[str(run.iteration)], self.figures = run.measure()

    def data(self):
        return {"train": self.train, "held_out": self.held_out, "figures": self.figures, "averaged": self.averaged}


class Average:
    """The mean of a model's states over the iterations `first` to `last`. Its loss has less noise than that of any single state:
    a run jumps about its path, and the mean does not.
    """

    def __init__(self, first, last):
        self.first, self.last, self.sums = first, last, None

    def see(self, run, log):
        if not self.first <= run.iteration <= self.last:
            return
        state = run.model.state_dict()
        moving = {name: value for name, value in state.items() if value.is_floating_point()}
        if self.sums is None:
            self.sums = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in moving.items()}
        for name, value in moving.items():
            self.sums[name] += value
        if run.iteration == self.last:
            count = self.last - self.first + 1
            kept = {name: value.clone() for name, value in state.items()}
            run.model.load_state_dict({**state, **{name: total / count for name, total in self.sums.items()}})
            log.averaged[f"{self.first}-{self.last}"] = run.measure()[0]
            run.model.load_state_dict(kept)
            self.sums = None


def advance(task, run, until, log, wanted, out=None, needed=None, averages=()):
    """Train to iteration `until`; measure at those in `wanted`, and the `averages`. Save the task's checkpoints into `out` if
    given: all, or those at the places `needed`.
    """
    while run.iteration < until:
        loss = run.step()
        log.train[str(run.iteration)] = loss
        if run.iteration in wanted or run.iteration == until:
            log.measure(run)
        for average in averages:
            average.see(run, log)
        place = (run.iteration - task.start) // task.every
        if out and task.saves(run.iteration) and (needed is None or place in needed):
            save(run, Path(out) / task.file(place))


def is_known(task, seed, raw):
    """Whether `raw` has this task's uninterrupted run."""
    out = folder(raw, task, seed)
    if not (out / "losses.json").exists() or json.loads((out / "losses.json").read_text())["recipe"] != task.recipe():
        return False
    return all((out / task.file(place)).exists() for place in task.needed())


def uninterrupted(task, seed, raw, again=False, say=print):
    """Losses of the run and its checkpoints in `raw`; reused if they belong to this task."""
    out = folder(raw, task, seed)
    notes = out / "losses.json"
    if not again and is_known(task, seed, raw):
        return json.loads(notes.read_text())
    out.mkdir(parents=True, exist_ok=True)
    for path in [*out.glob("step_*.pt"), *out.glob("losses.json")]:
        path.unlink()
    say(f"{task.name}, seed {seed}: training the uninterrupted run ...")
    began = time.perf_counter()
    run, log = task.make(seed), Log()
    advance(task, run, task.length, log, task.measured(), out, task.needed(), [Average(*window) for window in task.windows()])
    known = {"recipe": task.recipe(), "task": task.name, "seed": seed, "seconds": time.perf_counter() - began, "digest": digest(run.state()), **log.data()}
    write(notes, known)
    return known


def places(task, restores):
    """The checkpoints to restore from, spread evenly over the run; each has a newer one."""
    last = task.count - 2
    if not 0 < restores <= last:
        raise ValueError(f"{task.name} has {last} checkpoints to restore from, {restores} were asked for")
    return [last * (2 * n + 1) // (2 * restores) for n in range(restores)]


class Copies:
    """Stands for a mount in the control: a directory of exact files."""

    def __init__(self, base):
        self.base, self.dir = base, base

    def settle(self, name):
        pass

    def close(self):
        pass


class Store:
    """A mount whose checkpoints are released before anyone reads them."""

    def __init__(self, base, profile, extra):
        self.mount = sizes.open_store(base, profile, extra)
        self.dir = self.mount.dir

    def settle(self, name):
        self.mount.sync(timeout=3600)
        self.mount.require_released(name)

    def close(self):
        self.mount.close()


class Newest:
    """Machines that die, one after the other, each with its store. The next one pulls what came to the mirror of the newest state
    when the machine died, and has a mirror of its own.
    """

    def __init__(self, base, profile, extra):
        self.base, self.dir, self.last, self.count = base, base / "saved", "", 0
        self.dir.mkdir()
        self.profile, self.extra, self.mount = profile, extra, self.open(profile, extra)

    def open(self, profile, extra, pull=None):
        place = self.base / f"machine{self.count}"
        mirror = mirrors.Directory(place / "elsewhere")
        mount = mirrors.Mirrored(place, mirror, 'newest = "quantized"')
        if pull:
            harness.run("pull", pull, mount.store)
        plain = sizes.open_store(place, profile, extra)
        plain.umount()
        harness.run("mount", mount.store, mount.dir, "--mirror", mirror.url)
        harness.run("umount", mount.dir)
        with open(mount.store / "stepfs.toml", "a") as f:
            f.write('newest = "quantized"\n')
        return mount.mount()

    def settle(self, name):
        saved = sorted(path.name for path in self.dir.iterdir() if self.last < path.name <= name)
        for each in saved:
            # Saved now: a mirror does not wait for the state before an old file.
            shutil.copyfile(self.dir / each, self.mount / each)
            self.mount.mirrored(timeout=3600)
        assert f"{name}: encoded ahead" in self.mount.log.read_text(), f"{name} did not travel quantized\n{self.mount.what_it_does()}"
        self.mount.kill()
        dead, self.count, self.last = self.mount, self.count + 1, name
        self.mount = self.open(self.profile, self.extra, dead.url)
        dead.close()
        exact = (self.dir / name).read_bytes()
        shutil.copyfile(self.mount / name, self.dir / name)
        assert (self.dir / name).read_bytes() != exact, f"{name} came back exact"

    def close(self):
        self.mount.close()
        shutil.rmtree(self.mount.base, ignore_errors=True)


class Workplace:
    """A directory that is removed at the end, after whatever is mounted in it; a `with` gives its store. `extra`: more settings
    for stepfs.toml.
    """

    def __init__(self, profile, where, extra=""):
        self.base = Path(tempfile.mkdtemp(prefix="stepfs-study-", dir=where))
        try:
            if profile == ULP:
                self.store = Copies(self.base)
            else:
                kind = Newest if profile.startswith(AHEAD) else Store
                self.store = kind(self.base, profile.removeprefix(AHEAD), extra)
        except BaseException:
            self.clear()
            raise

    def clear(self):
        if left := harness.mounts_below(self.base):
            sys.exit(f"{left} could not be unmounted; files left in {self.base}")
        shutil.rmtree(self.base)

    def __enter__(self):
        return self.store

    def __exit__(self, *failure):
        self.store.close()
        self.clear()


def restore(task, seed, store, name, profile, count):
    """A new program that resumes from this checkpoint; nothing but the file survives the crash."""
    store.settle(name)
    state = load(Path(store.dir) / name)
    if profile == ULP:
        nudge(state, seed * 1000 + count)
    run = task.make(seed)
    run.load(state)
    return run


def interrupted(task, seed, profile, found, end, raw, where=None, extra=""):
    """Crash once for each place of `found`, and train to iteration `end`. One segment per restore, from there to the next crash
    or the end.
    """
    origin, segments, began = folder(raw, task, seed), [], time.perf_counter()
    oldest = max(0, found[0] - HISTORY) if task.starts else 0
    with Workplace(profile, where, extra) as store:
        for place in range(oldest, found[0] + 2):
            shutil.copy2(origin / task.file(place), store.dir)
        for n, place in enumerate(found):
            run, log = restore(task, seed, store, task.file(place), profile, n), Log()
            at = run.iteration
            assert at == task.iteration(place), f"{task.file(place)} is of iteration {at}"
            log.measure(run)
            until = task.iteration(found[n + 1] + 1) if n + 1 < len(found) else end
            grid = range(task.start, end, task.grid) if n + 1 == len(found) and not task.starts else ()
            averages = [Average(*task.window(at))] if task.starts else []
            advance(task, run, until, log, {at + offset for offset in task.offsets} | set(grid), store.dir, averages=averages)
            segments.append({"at": at, "until": until, **log.data()})
        last = digest(run.state())
    return {"segments": segments, "digest": last, "seconds": time.perf_counter() - began}


def singles(task, seed, profile, raw, where=None, extra=""):
    """Restores that do not add up: from each of several checkpoints, as far as the largest offset. Measured at the offsets, and
    after each iteration until the loss returns to its value at the time of the checkpoint.
    """
    origin, reach = folder(raw, task, seed), max(task.offsets)
    goals = json.loads((origin / "losses.json").read_text())["held_out"]
    found = [round(n * (task.count - 2) / max(1, task.singles - 1)) for n in range(task.singles)]
    answer, began = [], time.perf_counter()
    with Workplace(profile, where, extra) as store:
        for place in range(task.count):
            shutil.copy2(origin / task.file(place), store.dir)
        for n, place in enumerate(sorted(set(found))):
            run, log = restore(task, seed, store, task.file(place), profile, n), Log()
            at = run.iteration
            log.measure(run)
            wanted = {at + offset for offset in task.offsets}
            while run.iteration < at + reach:
                back = min(log.held_out.values()) <= goals[str(at)]
                until = min(k for k in wanted if k > run.iteration) if back else run.iteration + 1
                advance(task, run, until, log, wanted)
            answer.append({"at": at, "until": at + reach, **log.data()})
    return {"segments": answer, "seconds": time.perf_counter() - began}


def write(path, data):
    """Written whole or not at all, so that an interrupted run is repeated."""
    fresh = Path(f"{path}.new")
    fresh.write_text(json.dumps(data) + "\n")
    os.replace(fresh, path)
