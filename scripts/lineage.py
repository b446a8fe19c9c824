#!/usr/bin/env python3
"""Measure a lineage of 256 real checkpoints: the cost of its reads, its size, and the space that removing files frees.

Trains scripts/gpt.py's GPT with AdamW, keeps every original checkpoint in a plain directory, copies them in order into a
mount, and waits until everything is released. Then, each on its own copy of that store:

- `first`, `last`: the first / the newest checkpoint is removed
- `half`: a random half (by --seed)
- `sixteenth`: all but every 16th

After each, every other file must read the same bytes (SHA-256), `stepfs verify` must find no damage, and `tmp/` must be empty.

    lineage.py --raw DIR       keeps the series there, and reuses it if it is complete

With STEPFS_SURVIVORS naming examples/survivors (lineage.sh builds it), the result of `sixteenth` is compared with the least
size of these files as differences to one another.
"""

import argparse
import hashlib
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/real/support")]

import gpt  # noqa: E402
import harness  # noqa: E402

INTERVAL = 8  # states from one super-step to the next
KEPT = 16  # `sixteenth` keeps one of so many
MAX_APPLIED = 12
MAX_SUPER_SHARE = 0.60
MAX_AGAINST_REFERENCE = 1.15
CASES = ("first", "last", "half", "sixteenth")


def say(line):
    print(line, file=sys.stderr, flush=True)


def train(raw, arguments):
    """The series, reused if it is complete."""
    raw.mkdir(parents=True, exist_ok=True)
    names = [f"step_{n * arguments.every:05d}.pt" for n in range(1, arguments.count + 1)]
    if sorted(os.listdir(raw)) == names:
        say(f"taking the {len(names)} checkpoints in {raw}")
        return names
    if os.listdir(raw):
        sys.exit(f"lineage.py: {raw} does not hold exactly {len(names)} checkpoints, one every {arguments.every} iterations")
    config = gpt.Config(layers=arguments.layers, width=arguments.width, context=arguments.context, batch=arguments.batch)
    lines = iter(range(1 << 30))
    quiet = lambda line: say(line) if next(lines) % 32 == 0 else None
    assert gpt.train([str(raw)], arguments.count * arguments.every, arguments.every, seed=arguments.seed, config=config, say=quiet) == names
    return names


def hashes(folder, names):
    return {name: hashlib.sha256((Path(folder) / name).read_bytes()).hexdigest() for name in names}


def object_bytes(store):
    return sum(path.stat().st_size for path in harness.objects(store))


def settle(mount):
    """Wait until all work is done, garbage and merging included."""
    mount.sync(timeout=3600)
    if harness.run("gc", "--help", check=False).returncode == harness.OK:
        harness.run("gc", mount.dir, timeout=3600)
        mount.sync(timeout=3600)


def fill(mount, raw, names):
    """Copy the series into the mount in its order, with its times; returns seconds until all is released."""
    began = time.perf_counter()
    for name in names:
        shutil.copy2(raw / name, mount / name)
    mount.sync(timeout=3600)
    mount.require_released(*names[:-1])
    return time.perf_counter() - began


def weigh(rows, names):
    """The lineage by `stepfs ls`: chains, intervals, and the cost of super-steps."""
    place = {name: n for n, name in enumerate(names)}
    rows = {Path(row["path"]).name: row for row in rows}
    kept = [name for name in names if rows[name]["state"] == "released"]
    gap = {name: place[name] - place[Path(rows[name]["parent"]).name] if rows[name]["parent"] else None for name in kept}
    weights = {name: rows[name]["roles"]["weight"] for name in kept}
    stored = lambda name: weights[name]["stored_bytes"]
    intervals = []
    for name in kept:
        if gap[name] == INTERVAL:
            inner = [n for n in names[place[name] - INTERVAL + 1 : place[name]] if gap.get(n) == 1]
            if len(inner) >= INTERVAL // 2:
                # The eighth state exists as the super-step only. The mean of the other steps stands for its single step.
                parts = statistics.mean(map(stored, inner)) * INTERVAL
                intervals.append({"at": name, "super": stored(name), "parts": parts, "share": stored(name) / parts})
    total = lambda role, what: sum(rows[name]["roles"].get(role, {}).get(what, 0) for name in kept)
    return {
        "files": len(names),
        "raw_bytes": sum(row["logical_bytes"] for row in rows.values()),
        "released_raw_bytes": sum(rows[name]["logical_bytes"] for name in kept),
        "released_stored_bytes": sum(rows[name]["stored_bytes"] for name in kept),
        "share": {role: total(role, "stored_bytes") / max(1, total(role, "raw_bytes")) for role in ("weight", "optimizer")},
        "longest_chain": max(rows[name]["chain_len"] for name in kept),
        "mean_chain": statistics.mean(rows[name]["chain_len"] for name in kept),
        "keyframes": [name for name in kept if gap[name] is None],
        "gaps": {str(g): list(gap.values()).count(g) for g in sorted(set(gap.values()), key=str)},
        "intervals": intervals,
        "super_share": statistics.median(i["share"] for i in intervals) if intervals else None,
        "worst_super_share": max((i["share"] for i in intervals), default=None),
        "largest_error": max(rows[name]["max_abs_error"] for name in kept),
    }


def victims(case, names, seed):
    if case == "first":
        return names[:1]
    if case == "last":
        return names[-1:]
    if case == "half":
        return sorted(random.Random(seed).sample(names, len(names) // 2))
    return [name for n, name in enumerate(names, 1) if n % KEPT]


def remove(case, base, origin, names, expected, seed):
    """Remove files from a copy of the store; everything else must stay the same."""
    folder = base / case
    folder.mkdir()
    mount = harness.Mount(folder)
    gone = victims(case, names, seed)
    left = [name for name in names if name not in set(gone)]
    try:
        subprocess.run(["cp", "-a", "--sparse=always", origin, mount.store], check=True)
        before = object_bytes(mount.store)
        mount.mount()
        began = time.perf_counter()
        for name in gone:
            (mount / name).unlink()
        removing = time.perf_counter() - began
        settle(mount)
        seconds = time.perf_counter() - began
        assert sorted(os.listdir(mount.dir)) == left, f"{case}: the mount lists other files than were left"
        found = hashes(mount.dir, left)
        changed = [name for name in left if found[name] != expected[name]]
        assert not changed, f"{case}: removing changed the bytes of {changed}\n{mount.log_tail()}"
        rows = {Path(row["path"]).name: row for row in mount.ls()}
        mount.umount()
        harness.require_clean(mount.store)
        after = object_bytes(mount.store)
        survivors = os.environ.get("STEPFS_SURVIVORS") if case == "sixteenth" else None
        needed = survivors and int(subprocess.run([survivors, mount.store], check=True, capture_output=True).stdout)
    finally:
        mount.close()
        shutil.rmtree(folder)
    released = [name for name in left if rows[name]["state"] == "released"]
    raw = sum(rows[name]["logical_bytes"] for name in released)
    return {"case": case, "removed": len(gone), "left": len(left), "released": len(released), "before_bytes": before, "after_bytes": after,
            "per_file": after / max(1, len(released)), "share_of_raw": after / max(1, raw), "removing_s": removing, "settled_s": seconds, "needed_bytes": needed,
            "longest_chain": max(rows[name]["chain_len"] for name in released)}


def only_survivors(base, raw, names):
    """For comparison: a store that got only the survivors of `sixteenth`. Its steps are its own."""
    folder = base / "only"
    folder.mkdir()
    mount = harness.Mount(folder)
    left = [name for n, name in enumerate(names, 1) if n % KEPT == 0]
    try:
        mount.mount()
        fill(mount, raw, left)
        settle(mount)
        mount.umount()
        size = object_bytes(mount.store)
    finally:
        mount.close()
        shutil.rmtree(folder)
    return size


def table(report):
    line = "{:46}{:>14}{:>10}  {}".format
    mb = lambda size: f"{size / 1e6:.1f} MB"
    verdict = lambda met: "" if met is None else "ok" if met else "MISSED"
    w, goals = report["lineage"], report["goals"]
    yield line("", "", "goal", "")
    yield line(f"{w['files']} checkpoints, as they were written", mb(w["raw_bytes"]), "", "")
    yield line("released ones, in the store", mb(w["released_stored_bytes"]), "", f"{100 * w['released_stored_bytes'] / w['released_raw_bytes']:.1f} % of their bytes")
    yield line("  weights / optimizer", f"{100 * w['share']['weight']:.1f} / {100 * w['share']['optimizer']:.1f} %", "", "")
    yield line("objects that a read applies, at most", str(w["longest_chain"]), f"<= {MAX_APPLIED}", f"{verdict(goals['chain'])}; mean {w['mean_chain']:.1f}, {len(w['keyframes'])} keyframes")
    shown = "none found" if w["super_share"] is None else f"{100 * w['super_share']:.1f} %"
    worst = "" if w["super_share"] is None else f"; the worst of {len(w['intervals'])} is {100 * w['worst_super_share']:.1f} %"
    yield line(f"a super-step's weights against its {INTERVAL} parts", shown, f"<= {100 * MAX_SUPER_SHARE:.0f} %", verdict(goals["super"]) + worst)
    yield line("states back to the parent: how many files", "", "", ", ".join(f"{g}: {n}" for g, n in w["gaps"].items()))
    for case in report["cases"]:
        yield line(f"{case['case']}: removed {case['removed']}, left {case['left']}", mb(case["after_bytes"]), "", f"of {mb(case['before_bytes'])} of objects; "
                   f"{case['per_file'] / 1e3:.0f} KB a released file, {100 * case['share_of_raw']:.1f} % of raw; longest chain {case['longest_chain']}; {case['settled_s']:.1f} s")
    if report["only_survivors_bytes"] is not None:
        yield line("a store that was given those survivors only", mb(report["only_survivors_bytes"]), "", "with steps of its own: for comparison")
    if goals["reference"] is not None:
        share = next(c["after_bytes"] for c in report["cases"] if c["case"] == "sixteenth") / report["reference_bytes"]
        yield line("sixteenth against the reference", f"{share:.3f}", f"<= {MAX_AGAINST_REFERENCE}", verdict(goals["reference"]))
    yield "every file that was left has the bytes it had; verify is clean"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=256, help="checkpoints")
    parser.add_argument("--every", type=int, default=20, help="iterations between two of them")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--raw", type=Path, help="directory of the series (default: made, and removed at the end)")
    parser.add_argument("--dir", help="where to work; decides the disk (default: the temporary directory)")
    parser.add_argument("--case", choices=CASES, action="append", help="only this removal; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here; - for stdout")
    arguments = parser.parse_args()
    if not 2 * KEPT <= arguments.count <= 9999:
        parser.error(f"--count must be {2 * KEPT} to 9999")
    base = Path(tempfile.mkdtemp(prefix="stepfs-lineage-", dir=arguments.dir))
    raw = arguments.raw or base / "raw"
    report = {"cases": [], "only_survivors_bytes": None, "reference_bytes": None}
    try:
        began = time.perf_counter()
        names = train(raw, arguments)
        report["training_s"] = time.perf_counter() - began
        (base / "all").mkdir()
        mount = harness.Mount(base / "all")
        try:
            mount.mount()
            say("copying them into a mount, and waiting until they are released ...")
            report["releasing_s"] = fill(mount, raw, names)
            settle(mount)
            report["lineage"] = weigh(mount.ls(), names)
            say("reading them all ...")
            began = time.perf_counter()
            expected = hashes(mount.dir, names)
            report["reading_s"] = time.perf_counter() - began
            assert expected[names[-1]] == hashes(raw, names[-1:])[names[-1]], "the newest differs from the written file"
            mount.umount()
            harness.require_clean(mount.store)
        finally:
            mount.close()
        harness.empty_cache(mount.store)
        for case in arguments.case or CASES:
            say(f"removing: {case} ...")
            report["cases"].append(remove(case, base, mount.store, names, expected, arguments.seed))
        after = {case["case"]: case["after_bytes"] for case in report["cases"]}
        if "sixteenth" in after:
            report["reference_bytes"] = next(c["needed_bytes"] for c in report["cases"] if c["case"] == "sixteenth")
            report["only_survivors_bytes"] = only_survivors(base, raw, names)
    finally:
        if left := harness.mounts_below(base):
            sys.exit(f"lineage.py: {left} could not be unmounted; files left in {base}")
        shutil.rmtree(base)
    lineage, worst = report["lineage"], report["lineage"]["super_share"]
    reference = report["reference_bytes"]
    report["goals"] = {"chain": lineage["longest_chain"] <= MAX_APPLIED, "super": worst is not None and worst <= MAX_SUPER_SHARE,
                       "reference": after["sixteenth"] <= MAX_AGAINST_REFERENCE * reference if reference else None}
    if arguments.json == "-":
        print(json.dumps(report, indent=2))
    else:
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
        print("\n".join(table(report)))
    sys.exit(0 if all(met is not False for met in report["goals"].values()) else 1)


if __name__ == "__main__":
    main()
