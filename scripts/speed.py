"""Runs of `examples/speed`: each figure is a ratio to the memcpy of the same run."""

import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile

# Profiles and types.
VARIANTS = (("balanced", "f32"), ("compact", "f32"), ("exact", "f32"), ("balanced", "bf16"))


def run(*command, **more):
    """Output of a command that must succeed."""
    done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, capture_output=True, text=True, **more)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def build(root, target, **more):
    """Build the example and return its path."""
    run("cargo", "build", "--release", "--locked", "--quiet", "--example", "speed", cwd=root, env={**os.environ, "CARGO_TARGET_DIR": str(target)}, **more)
    return target / "release/examples/speed"


def report(program, profile, dtype, mib, cores=1, states=4, only=None):
    """The report of one run: `memcpy` in GB/s, and by row the ratio to it. `only`: the core that it may use."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        pinned = () if only is None else ("taskset", "-c", only)
        run(*pinned, program, "--profile", profile, "--dtype", dtype, "--mib", mib, "--cores", cores, "--states", states, "--json", file.name)
        return json.load(file)


def speeds(report):
    """GB/s by wall clock, by row."""
    clock = "all states, wall clock: "
    return {name.removeprefix(clock): ratio * report["memcpy"] for name, ratio in report["ratios"].items() if name.startswith(clock)}


def spread(values):
    return {"median": statistics.median(values), "least": min(values), "largest": max(values)}


def scaling(program, profile, dtype, mib, rounds):
    """Speed by wall clock on two cores, divided by that on one; both run in turns. The control is two programs at once, on a core
    each: the sum of their speeds, divided by that of one alone. A machine gives no more than that. The series is twice as long as for
    the other rows: its first and its last state have no other beside them.
    """
    rows = {}
    of = lambda **more: speeds(report(program, profile, dtype, mib, states=8, **more))
    for _ in range(rounds):
        one, two = of(), of(cores=2)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pair = list(pool.map(lambda core: of(only=core), (0, 1)))
        for name, alone in one.items():
            rows.setdefault(name, []).append(two[name] / alone)
            rows.setdefault(f"control: {name}", []).append(sum(each[name] for each in pair) / alone)
    return {name: spread(values) for name, values in sorted(rows.items())}
