#!/usr/bin/env python3
"""Compare this tree with another revision: both run in turns, so that a noisy machine disturbs both alike.

- `codec`: `examples/speed` of each revision, for several profiles and types. Each figure is a ratio to the memcpy of the same run,
  on one core.
- `save`, `again`, `load`: `scripts/bench.py` with the program of each revision. Each figure is a ratio to a plain directory.

Each row has the median of all rounds, the least and the largest. `change` is this tree's median over that of the other revision.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import speed
from speed import run, spread

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ROOT / "docs/bench.json"
PARTS = ("codec", "save", "again", "load")
# `--fail-below` passes over stages that wait for the device, and over those of a few milliseconds: faster than memcpy.
DEVICE = ("make durable",)
FASTEST = 1

class Tree:
    """A built revision: its program and its `examples/speed`."""

    def __init__(self, name, folder, target):
        self.name, self.folder, self.target = name, folder, target
        self.rows = {}

    def build(self, parts):
        print(f"building {self.name} ...", file=sys.stderr, flush=True)
        if "codec" in parts:
            speed.build(self.folder, self.target)
        if parts - {"codec"}:
            run("cargo", "build", "--release", "--locked", "--quiet", cwd=self.folder, env={**os.environ, "CARGO_TARGET_DIR": str(self.target)})

    def add(self, name, value):
        self.rows.setdefault(name, []).append(value)

    def codec(self, mib):
        for profile, dtype in speed.VARIANTS:
            for name, ratio in speed.report(self.target / "release/examples/speed", profile, dtype, mib)["ratios"].items():
                self.add(f"{profile}, {dtype}: {name}", ratio)

    def mounted(self, part, arguments):
        """The program of this revision under the benchmark of this tree."""
        text = run(sys.executable, ROOT / "scripts/bench.py", "--stepfs", self.target / "release/stepfs", "--only", part, "--json", "-",
                   "--size", arguments.size, "--runs", 2, *(["--dir", arguments.dir] if arguments.dir else []))
        for row in json.loads(text)["results"]:
            self.add(f"{row['name']}, to plain", row["ratio"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REV", help="a revision of git (default: that of docs/bench.json, the last release)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; each runs both revisions")
    parser.add_argument("--mib", type=int, default=128, help="checkpoint for the codec, in fp32")
    parser.add_argument("--size", type=int, default=512, metavar="MB", help="state dict for save and load")
    parser.add_argument("--dir", default=None, help="where to save; decides the disk (default: the temporary directory)")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here; - for stdout")
    parser.add_argument("--fail-below", type=float, metavar="SHARE", help="exit code 1 if a row is below this share of the other's in every round; rows that wait for the device do not count")
    arguments = parser.parse_args()
    parts = set(arguments.only or PARTS)

    against = arguments.against or json.loads(RELEASE.read_text())["revision"]
    revision = run("git", "rev-parse", "--verify", f"{against}^{{commit}}", cwd=ROOT).strip()
    with tempfile.TemporaryDirectory(prefix="stepfs-against-") as folder:
        other = Path(folder) / "tree"
        run("git", "worktree", "add", "--detach", other, revision, cwd=ROOT)
        try:
            # One way to measure both.
            shutil.copytree(ROOT / "examples/speed", other / "examples/speed", dirs_exist_ok=True)
            (other / "examples/speed.rs").unlink(missing_ok=True)
            if not (other / "src/allocator.rs").exists():
                shutil.copy(ROOT / "src/allocator.rs", other / "src/allocator.rs")
            # Its target stays, so that the next comparison with it builds nothing.
            trees = [Tree(revision[:10], other, ROOT / "target/against" / revision), Tree("this tree", ROOT, ROOT / "target")]
            for tree in trees:
                tree.build(parts)
            for number in range(arguments.rounds):
                print(f"round {number + 1} of {arguments.rounds} ...", file=sys.stderr, flush=True)
                for tree in trees if number % 2 == 0 else trees[::-1]:
                    if "codec" in parts:
                        tree.codec(arguments.mib)
                    for part in sorted(parts - {"codec"}):
                        tree.mounted(part, arguments)
        finally:
            run("git", "worktree", "remove", "--force", other, cwd=ROOT)

    before, now = (tree.rows for tree in trees)
    rows = [{"name": name, "against": spread(before[name]), "this": spread(now[name]),
             "change": statistics.median(now[name]) / statistics.median(before[name]),
             "best_change": max(mine / other for mine, other in zip(now[name], before[name]))} for name in now if name in before]
    report = {"against": revision, "rounds": arguments.rounds, "cores": os.cpu_count(), "machine": platform.machine(), "rows": rows}
    if arguments.json == "-":
        print(json.dumps(report, indent=2))
    else:
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
        line = "{:58}{:>24}{:>24}{:>8}".format
        cell = lambda row: f"{row['median']:.3f} ({row['least']:.3f}-{row['largest']:.3f})"
        print(line("ratio to memcpy or to a plain directory: median (spread)", revision[:10], "this tree", "change"))
        for row in rows:
            print(line(row["name"][:57], cell(row["against"]), cell(row["this"]), f"{row['change']:.2f}"))
    judged = [row for row in rows if not row["name"].endswith(DEVICE) and row["against"]["median"] < FASTEST]
    if slower := [row for row in judged if row["best_change"] < (arguments.fail_below or 0)]:
        for row in slower:
            print(f"slower in every round: {row['name']}, at best {row['best_change']:.2f} of {revision[:10]}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
