"""Runs of `examples/speed`: each figure is a ratio to the memcpy of the same run."""

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


def report(program, profile, dtype, mib, cores=1):
    """The report of one run: `memcpy` in GB/s, and by row the ratio to it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run(program, "--profile", profile, "--dtype", dtype, "--mib", mib, "--cores", cores, "--json", file.name)
        return json.load(file)


def spread(values):
    return {"median": statistics.median(values), "least": min(values), "largest": max(values)}


def scaling(program, profile, dtype, mib, rounds):
    """Speed by wall clock on two cores, divided by that on one; both run in turns."""
    rows = {}
    for _ in range(rounds):
        one, two = (report(program, profile, dtype, mib, cores) for cores in (1, 2))
        for name, ratio in two["ratios"].items():
            speeds = ratio * two["memcpy"], one["ratios"][name] * one["memcpy"]
            rows.setdefault(name.removeprefix("all states, wall clock: "), []).append(speeds[0] / speeds[1])
    return {name: spread(values) for name, values in rows.items()}
