"""The sources of measurements: runs of the study, sizes of real mounts, and figures of codecs. Each finished one is kept."""

import hashlib
import json
import subprocess
import time
from pathlib import Path

import resume_study
from study import chains, gaps, protocol, sizes, tasks

# No fall-back to more bits after restores: for figures of one bit width.
FIXED_WIDTH = "expected_restores = 1000000"


class Lab:
    """No run begins after `minutes`. The result of a missing run is None, and the document says that it was not run."""

    def __init__(self, raw, where=None, quick=False, minutes=None, figures=None, again=False):
        self.kept = chains.Kept(raw / ("runs-quick" if quick else "runs"), again)
        self.raw, self.where, self.quick = raw / "quick" if quick else raw, where, quick
        self.figures_program = figures
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        self.missing = []

    def task(self, name):
        task = tasks.TASKS[name]
        return task.smoke() if self.quick else task

    def released(self, task):
        """The number of checkpoints of a series to weigh."""
        return min(32, task.count - 1)

    def base(self, task, seed=1):
        """The run that is never interrupted; trained if its checkpoints are missing."""
        return protocol.uninterrupted(task, seed, self.raw, say=resume_study.say)

    def series(self, task, count=None):
        """The first checkpoints of the uninterrupted run, in order."""
        if not self._may_run(f"{task.name}-base", self._has_series(task)):
            return None
        self.base(task)
        return [protocol.folder(self.raw, task, 1) / task.file(place) for place in range(task.count)][:count]

    def _has_series(self, task):
        folder = protocol.folder(self.raw, task, 1)
        notes = folder / "losses.json"
        known = notes.exists() and json.loads(notes.read_text())["recipe"] == task.recipe()
        return known and all((folder / task.file(place)).exists() for place in range(task.count))

    def _may_run(self, name, there):
        """Whether the result exists, or there is time left to make it."""
        if there or self.end is None or time.monotonic() < self.end:
            return True
        self.missing.append(name)
        return False

    def get(self, name, task, make, build=None):
        """A finished run, made now if there is time."""
        path = self.kept.folder / f"{name}.json"
        of = {"recipe": task.recipe(), "build": build or self.kept.build}
        there = not self.kept.again and path.exists() and json.loads(path.read_text())["of"] == of
        if not self._may_run(name, there):
            return None
        if there:
            return json.loads(path.read_text())
        resume_study.say(f"{name} ...")
        answer = {"of": of, **make()}
        protocol.write(path, answer)
        return answer

    def sizes(self, task, profile, settings=""):
        """The stored sizes of the series in a mount: study/sizes.py's report."""
        files = self.series(task, self.released(task) + 1)
        name = f"{task.name}-{profile}-sizes-{self.released(task)}{'-fixed' if settings else ''}"
        weigh = lambda: {"report": sizes.measure(files[0].parent, [file.name for file in files], profile, settings, self.where)}
        found = self.get(name, task, weigh) if files else None
        return found and found["report"]

    def singles(self, task, profile, seed=1):
        """Single restores from many checkpoints: study/gaps.py's figures of them."""
        if not self.series(task):
            return None
        run = self.get(f"{task.name}-{profile}-singles-seed{seed}", task, lambda: protocol.singles(task, seed, profile, self.raw, self.where))
        return run and gaps.of_singles(task, [run], [self.base(task, seed)])

    def chain(self, task, profile, restores, settings="", seed=1):
        """Restores that add up: study/gaps.py's figures of the run, and the run itself."""
        if not self.series(task):
            return None
        name = f"{task.name}-{profile}-R{restores}-seed{seed}{'-fixed' if settings else ''}"
        run = self.get(name, task, lambda: protocol.interrupted(task, seed, profile, protocol.places(task, restores), task.length, self.raw, self.where, settings))
        return run and {**gaps.of_runs(task, [run], [self.base(task, seed)]), "run": run}

    def figures(self, task, *words, places=None):
        """The answer of examples/published_figures.rs for these checkpoints of the series, by number; for all weighed ones if
        none are given.
        """
        files = self.series(task)
        if not files:
            return None
        places = range(self.released(task) + 1) if places is None else places
        name = "-".join([task.name, "figures", *words, f"{len(places)}from{places[0]}"])
        found = self.measured(name, task, lambda: {"figures": self.call(*words, *(files[place] for place in places))})
        return found and found["figures"]

    def measured(self, name, task, make):
        """A result of that program, kept until the program is rebuilt."""
        build = hashlib.sha256(Path(self.figures_program).read_bytes()).hexdigest()[:16]
        return self.get(name, task, make, build)

    def call(self, *words):
        """Runs the program that measures the codecs alone."""
        done = subprocess.run(list(map(str, [self.figures_program, *words])), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, words[:2]))}: {done.stderr.strip()}")
        return json.loads(done.stdout)


def weight_share(report, first=False):
    """Stored bytes of the weights as a share of their raw bytes. Without `first`, the first keyframe is left out, which most
    systems keep whole.
    """
    rows = [one for one in report["files"] if one["state"] == "released" and one["raw"].get("weight")]
    keyframe = next((one for one in rows if one["kind"] == "keyframe"), None)
    if not first and len(rows) > 1:
        rows = [one for one in rows if one is not keyframe]
    raw = sum(one["raw"]["weight"] for one in rows)
    return sum(one["stored"].get("weight", 0) for one in rows) / raw if raw else None
