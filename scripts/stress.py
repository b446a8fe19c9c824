#!/usr/bin/env python3
"""Run scenario files: many programs at once on one real mount. Everything they see is compared with the bytes written.

    stress.py                                   every scenario in tests/stress, one after the other
    stress.py tests/stress/churn.toml           this one
    stress.py churn --seconds 600 --seed 7      by name, longer, with other choices
    stress.py churn --json churn.json           the counters for programs, too

scripts/stress/scenario.py describes scenario files. Ctrl-C ends a run, unmounts, and prints the counters. Exits with 1 after
any wrong result, and keeps the store and the log then.
"""

import argparse
import json
import os
import sys
from pathlib import Path

# One thread for each process: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = Path(__file__).resolve().parent.parent
SCENARIOS = ROOT / "tests/stress"


def scenario_files(names):
    return [Path(name) if os.path.exists(name) else SCENARIOS / f"{name}.toml" for name in names] or sorted(SCENARIOS.glob("*.toml"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO")
    parser.add_argument("--seconds", type=float, help="instead of the scenario's")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--dir", help="where stores are made; a temporary directory unless given")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--keep", action="store_true", help="keep the store and the log even if all was well")
    args = parser.parse_args()
    from stress import report, scenario
    from stress.driver import Run

    results, well = [], True
    for path in scenario_files(args.scenarios):
        try:
            chosen = scenario.load(path, args.seconds, args.seed)
        except (scenario.Wrong, OSError) as error:
            sys.exit(f"stress.py: {error}")
        print(f"{chosen.name}: {chosen.seconds:.0f} s, {len(chosen.actors)} kinds of actors in {sum(a.get('count', 1) for a in chosen.actors)} "
              f"processes, seed {chosen.seed}", flush=True)
        run = Run(chosen, args.dir, say=lambda line: print(f"  {line}", flush=True))
        fine = run.run()
        print(report.table(run), flush=True)
        for failure in run.failures:
            print(f"  FAILED  {failure}", flush=True)
        run.clean_up(args.keep or bool(run.failures))
        if args.keep or run.failures:
            print(f"  kept: {run.base}")
        results.append(report.summary(run))
        well = well and fine
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=1))
        if run.interrupted:
            print("interrupted")
            sys.exit(130)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
