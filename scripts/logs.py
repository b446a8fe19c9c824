#!/usr/bin/env python3
"""Measure small files and logs beside checkpoints: in a mount of stepfs, in libfuse's own passthrough example, and in a plain
directory of the same disk. All three take turns in each round, in another order each time.

- `append`: 1,500 times open, append 40 bytes, close, all to one file
- `create`: 300 new files of 1 KiB
- `steady`: 6,000 appends in a row to 20 files of 100 KiB, which takes long enough that stepfs makes them durable meanwhile

Each runs on an idle machine, and with as many busy programs as there are cores. Prints medians of the rounds as ratios to the
example, and the 99th percentile of each call. Exits with 1 if a ratio of `append` or `create` is above the limits.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LINE = b"step 123456 loss 1.2345 lr 0.00010 1234\n"
CALLS = ("open", "write", "close")
WHERE = ("mount", "example", "plain")
# Before each turn, so that bytes of the turn before are not written during this one.
PAUSE = 0.6


def timed(path, flags, data, spent):
    """Opens a file, writes, closes, and adds the time of each call."""
    t0 = time.perf_counter()
    fd = os.open(path, flags, 0o644)
    t1 = time.perf_counter()
    os.write(fd, data)
    t2 = time.perf_counter()
    os.close(fd)
    t3 = time.perf_counter()
    for call, seconds in zip(CALLS, (t1 - t0, t2 - t1, t3 - t2)):
        spent[call].append(seconds)


def append(directory, spent):
    path = directory / "events.log"
    for _ in range(1500):
        timed(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, LINE, spent)


def create(directory, spent):
    for n in range(300):
        timed(directory / f"small-{n}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, b"{}" * 512, spent)


def steady(directory, spent):
    paths = [directory / f"metrics-{n}.log" for n in range(20)]
    for path in paths:
        path.write_bytes(LINE * 2560)
    for n in range(6000):
        timed(paths[n % 20], os.O_WRONLY | os.O_CREAT | os.O_APPEND, LINE, spent)


CASES = {"append": append, "create": create, "steady": steady}


def measure(case, places, rounds):
    """Seconds of each round and of each call, by place."""
    whole = {name: [] for name in places}
    calls = {name: {call: [] for call in CALLS} for name in places}
    for number in range(rounds):
        for name in random.sample(sorted(places), len(places)):
            directory = places[name] / f"{case}-{random.getrandbits(48):x}"
            directory.mkdir()
            os.sync()
            time.sleep(PAUSE)
            began = time.perf_counter()
            CASES[case](directory, calls[name])
            spent = time.perf_counter() - began
            # The first round warms up.
            if number:
                whole[name].append(spent)
            else:
                calls[name] = {call: [] for call in CALLS}
            shutil.rmtree(directory)
    return whole, calls


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report(load, case, whole, calls):
    """Prints a case; answers what it measured."""
    median = {name: statistics.median(seconds) for name, seconds in whole.items()}
    p99 = {name: {call: percentile(seconds, .99) for call, seconds in of.items()} for name, of in calls.items()}
    together = {name: percentile([sum(three) for three in zip(*(of[call] for call in CALLS))], .99) for name, of in calls.items()}
    ratio, tail = median["mount"] / median["example"], together["mount"] / together["example"]
    print(f"{load:5} {case:7} " + "  ".join(f"{name} {seconds:6.3f} s" for name, seconds in median.items())
          + f"  mount/example {ratio:5.2f}, p99 {tail:5.2f}")
    for name in whole:
        spread = f"{min(whole[name]):.3f} to {max(whole[name]):.3f} s"
        print(f"      {name:8} {spread:18} p99 in ms: together {1e3 * together[name]:7.3f}, "
              + ", ".join(f"{call} {1e3 * p99[name][call]:7.3f}" for call in CALLS), flush=True)
    return {"load": load, "case": case, "median": median, "p99": together, "ratio": ratio, "ratio_p99": tail}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stepfs", default="target/release/stepfs")
    parser.add_argument("--example", required=True, help="libfuse's passthrough_ll, built")
    parser.add_argument("--dir", help="directory for everything, on the disk that is measured (default: the temporary one)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--load", action="append", choices=("idle", "busy"))
    parser.add_argument("--mount-option", action="append", default=[], help="for stepfs mount, such as --no-passthrough")
    parser.add_argument("--at-most", type=float, default=1.3, help="limit of the ratio of medians")
    parser.add_argument("--at-most-p99", type=float, default=2.0)
    parser.add_argument("--json", help="file for the numbers")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="stepfs-logs-", dir=options.dir))
    places = {name: base / name for name in WHERE}
    (base / "below").mkdir()
    [place.mkdir() for place in places.values()]
    example, busy, results = None, [], []
    run = lambda *command: subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    try:
        run(options.stepfs, "mount", base / "store", places["mount"], "--log", base / "stepfs.log", *options.mount_option)
        command = [options.example, "-f", "-o", f"source={base / 'below'}", str(places["example"])]
        # As its daemon and that of stepfs: Linux gives each session its own share of a busy machine.
        example = subprocess.Popen(command, start_new_session=True)
        while not os.path.ismount(places["example"]):
            time.sleep(.01)
            if example.poll() is not None:
                sys.exit(f"{options.example} did not mount")
        for load in options.load or ("idle", "busy"):
            if load == "busy":
                busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
            for case in options.case or CASES:
                results.append(report(load, case, *measure(case, places, options.rounds + 1)))
    finally:
        for process in busy:
            process.kill()
        subprocess.run(["fusermount3", "-u", places["example"]], check=False)
        subprocess.run([options.stepfs, "umount", places["mount"]], check=False, stdout=subprocess.DEVNULL)
        if example:
            example.wait()
        shutil.rmtree(base)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    judged = [result for result in results if result["case"] != "steady"]
    return any(result["ratio"] > options.at_most or result["ratio_p99"] > options.at_most_p99 for result in judged)


if __name__ == "__main__":
    sys.exit(main())
