#!/usr/bin/env python3
"""Does the daemon stay the same under a steady load? Runs tests/stress/long/soak.toml, samples the daemon every few seconds, and
says at the end whether its memory and its descriptors are flat.

    soak.py 600 --out target/soak

The load is steady after the first third of a run; a line is fitted to the rest. The question is whether growth above 1% an
hour is
*shown*. The fit has a standard error, from the means of a dozen blocks, since neighbouring samples are alike. Ten minutes
cannot show a percent an hour if memory varies by a few percent. So the verdict is "grows" when slope - 2 standard errors > 1%
of the mean an hour. With it stands the smallest growth that this run would show: a long run sees a small leak, a short one
only a large leak.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = Path(__file__).resolve().parent.parent
SCENARIO = ROOT / "tests/stress/long/soak.toml"
# This share of a run is left out, until all caches and limits are full.
WARM_UP = 1 / 3
BLOCKS = 12
GROWTH_PER_HOUR = 0.01
# Growth of counts (descriptors, threads) that means nothing: less than one an hour.
LEAST = {"descriptors": 1.0, "threads": 1.0}
MEASURED = {"rss": "resident memory", "anonymous": "of it the heap", "descriptors": "open descriptors", "threads": "threads"}


def proc(pid):
    """Bytes and counts of the daemon."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    kib = lambda key: int(lines[key].split()[0]) << 10
    return {"rss": kib("VmRSS"), "peak": kib("VmHWM"), "anonymous": kib("RssAnon"), "threads": int(lines["Threads"]),
            "descriptors": len(os.listdir(f"/proc/{pid}/fd"))}  # fmt: skip


class Sampler:
    def __init__(self, every, say):
        self.every, self.say, self.samples, self.next, self.said = every, say, [], 0.0, 0.0
        self.began = None

    def __call__(self, run):
        now = time.monotonic()
        self.began = self.began or now  # when the load began
        if now < self.next:
            return
        self.next = now + self.every
        try:
            status = run.mount.status()
        except subprocess.TimeoutExpired:
            return
        keys = ("files", "released", "logical_bytes", "stored_bytes", "resident_bytes", "object_bytes", "cache_bytes", "queued", "busy")
        sample = {"at": now - self.began, **proc(run.mount.pid), **{key: status[key] for key in keys}, "states_bytes": status["memory"]["bytes"]}
        self.samples.append(sample)
        run.check_policy(at_the_end=False)
        if now > self.said + 60:
            self.said = now
            mb = lambda key: f"{sample[key] / 1e6:.0f} MB"
            self.say(f"{sample['at']:5.0f} s  rss {mb('rss')}, heap {mb('anonymous')}, peak {mb('peak')}, {sample['descriptors']} descriptors, {sample['threads']} "
                     f"threads; {sample['files']} files, {mb('logical_bytes')} in {mb('stored_bytes')}, cache {mb('cache_bytes')}, {sample['queued']} queued")


def slope(points):
    """(slope of the least squares line, its standard error) of (x, y) points."""
    xs, ys = zip(*points)
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    left = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in points)
    return rise, (left / (len(points) - 2) / spread) ** 0.5


def trend(samples, key, seconds):
    """Growth per hour, from the means of blocks after the warm-up."""
    late = [sample for sample in samples if sample["at"] >= seconds * WARM_UP]
    size = len(late) / BLOCKS
    blocks = [late[int(n * size) : int((n + 1) * size)] for n in range(BLOCKS)] if size >= 2 else []
    if not blocks:
        return None
    points = [(statistics.fmean(s["at"] for s in block) / 3600, statistics.fmean(s[key] for s in block)) for block in blocks]
    rise, error = slope(points)
    mean = statistics.fmean(y for _, y in points)
    allowed = max(GROWTH_PER_HOUR * mean, LEAST.get(key, 0))
    return {"mean": mean, "lowest": min(s[key] for s in late), "highest": max(s[key] for s in late), "per_hour": rise, "error": error,
            "grows": rise - 2 * error > allowed, "would_be_shown": allowed + 2 * error}  # fmt: skip


def words(key, t):
    scale, unit = (1e6, " MB") if key in ("rss", "anonymous") else (1, "")
    number = lambda value: f"{value / scale:.1f}{unit}"
    return (f"  {MEASURED[key]:<18} {number(t['mean'])} (from {number(t['lowest'])} to {number(t['highest'])}), {number(t['per_hour'])} ± "
            f"{number(t['error'])} an hour: {'GROWS' if t['grows'] else 'flat'}; growth above {number(t['would_be_shown'])} an hour would show")


def plot(samples, seconds, path):
    sys.path.insert(0, str(ROOT / "scripts"))
    from study import plots

    figure, axes = plots.plt.subplots(2, 2, figsize=(13, 8), sharex=True, layout="constrained")
    minutes = [s["at"] / 60 for s in samples]
    panels = (("MB", 1e6, {"rss": "resident", "anonymous": "heap", "peak": "peak", "states_bytes": "decoded states"}),
              ("", 1, {"descriptors": "descriptors", "threads": "threads"}),
              ("MB", 1e6, {"stored_bytes": "stored", "object_bytes": "objects", "resident_bytes": "resident files", "cache_bytes": "cache"}),
              ("", 1, {"files": "files", "released": "released", "queued": "queued"}))  # fmt: skip
    for axis, (unit, scale, lines) in zip(axes.flat, panels):
        for key, label in lines.items():
            axis.plot(minutes, [s[key] / scale for s in samples], label=label, linewidth=1.4)
        axis.axvspan(0, seconds * WARM_UP / 60, color="black", alpha=0.05)
        axis.set(ylabel=unit, ylim=(0, None))
        axis.legend()
    for axis in axes[1]:
        axis.set(xlabel="minutes (grey: not looked at)")
    plots.save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", type=float, default=3600)
    parser.add_argument("--out", type=Path, default=ROOT / "target/soak")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--every", type=float, default=3, help="seconds between two samples")
    parser.add_argument("--dir", help="where the store is made; a temporary directory unless given")
    args = parser.parse_args()
    from stress import report, scenario
    from stress.driver import Run

    say = lambda line: print(line, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    sampler = Sampler(args.every, say)
    run = Run(scenario.load(SCENARIO, args.seconds, args.seed), args.dir, say, sampler)
    say(f"{args.seconds:.0f} s of load, a sample every {args.every:g} s")
    run.run()
    trends = {key: trend(sampler.samples, key, args.seconds) for key in MEASURED}
    say(report.table(run))
    for key, found in trends.items():
        say(words(key, found) if found else f"  {MEASURED[key]:<18} too few samples for a verdict")
        if found and found["grows"]:
            run.failures.append(f"{MEASURED[key]}: {words(key, found).strip()}")
    if not all(trends.values()):
        run.failures.append("too few samples for a verdict")
    summary = report.summary(run) | {"trends": trends, "samples": sampler.samples}
    (args.out / "soak.json").write_text(json.dumps(summary, indent=1))
    if sampler.samples:
        plot(sampler.samples, args.seconds, args.out / "soak.png")
    for failure in run.failures:
        say(f"  FAILED  {failure}")
    run.clean_up(bool(run.failures))
    say(f"{args.out}/soak.json, soak.png{f'; the store is kept in {run.base}' if run.failures else ''}")
    sys.exit(130 if run.interrupted else bool(run.failures))


if __name__ == "__main__":
    main()
