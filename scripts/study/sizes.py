#!/usr/bin/env python3
"""The size of a series of checkpoints in a store: every byte of it, by its purpose in training.

The files of a directory are copied in the order of their names into a fresh mount and released; the newest one stays exact,
and is reported apart. Sizes of objects and stubs are those of stat(2). `stepfs ls --json` gives the bytes of each kind of
tensor. The rest of an object (headers, tables of tiles) is `framing`. Each byte is counted once.

    sizes.py /raw/i25 --profile balanced
    sizes.py /raw/i25 --profile compact --stepfs target/release/stepfs --toml my.toml --count 10 --json -

The keys that FILE of --toml has before its first [table] replace those of stepfs.toml; its tables are appended.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/real/support")]

import harness  # noqa: E402

STUB = 4096  # bytes of a stub on disk, and of a block of the usual file systems
KEY = re.compile(r"^([A-Za-z_]\w*)\s*=")
TABLE = re.compile(r"^\s*\[")


def with_settings(text, extra):
    """stepfs.toml with the keys of `extra` in place of its own, and the tables of `extra` at its end."""
    lines = extra.splitlines()
    cut = next((n for n, line in enumerate(lines) if TABLE.match(line)), len(lines))
    keys = {KEY.match(line)[1]: line for line in lines[:cut] if KEY.match(line)}
    old = text.splitlines()
    end = next((n for n, line in enumerate(old) if TABLE.match(line)), len(old))
    kept = [line for line in old[:end] if not (KEY.match(line) and KEY.match(line)[1] in keys)]
    return "\n".join([*kept, *keys.values(), *old[end:], *lines[cut:]]) + "\n"


def open_store(base, profile, extra=""):
    """A new store below `base`, with these settings, mounted. The caller must close it."""
    mount = harness.Mount(base)
    try:
        mount.mount()
        mount.umount()
        settings = mount.store / "stepfs.toml"
        text = with_settings(settings.read_text(), f'default_profile = "{profile}"')
        settings.write_text(with_settings(text, extra))
        mount.mount()
    except BaseException:
        mount.close()
        raise
    return mount


def object_of(store, name):
    return Path(store) / "objects" / name[:2] / name


def weigh(mount, names):
    """One dict per file of `names`, in order: bytes of its object, of its stub, and of each kind of tensor."""
    rows = {Path(row["path"]).name: row for row in mount.ls()}
    answer, seen = [], set()
    for name in names:
        row = rows[name]
        found = {"name": name, "state": row["state"], "raw_bytes": row["logical_bytes"], "kind": row["kind"], "chain_len": row["chain_len"],
                 "max_abs_error": row["max_abs_error"], "object_bytes": 0, "object_disk": 0, "stub_disk": 0, "stored": {}, "raw": {}}
        if row["state"] == "released":
            stub = mount.store / "tree" / name
            found["stub_disk"] = 512 * stub.stat().st_blocks
            parts = {**row["kinds"], "skeleton": row["roles"]["skeleton"]}
            found["raw"] = {kind: part["raw_bytes"] for kind, part in parts.items()}
            if row["object"] not in seen:
                seen.add(row["object"])
                stat = object_of(mount.store, row["object"]).stat()
                found["object_bytes"], found["object_disk"] = stat.st_size, 512 * stat.st_blocks
                found["stored"] = {kind: part["stored_bytes"] for kind, part in parts.items()}
                found["stored"]["framing"] = stat.st_size - sum(found["stored"].values())
        answer.append(found)
    return answer


def total(rows):
    """The released files of `rows` together; `share` is objects and stubs against the raw bytes of the same files."""
    kept = [row for row in rows if row["state"] == "released"]
    add = lambda what: sum(row[what] for row in kept)
    kinds = sorted({kind for row in kept for kind in row["stored"] | row["raw"]})
    raw, stored = add("raw_bytes"), add("object_bytes") + STUB * len(kept)
    part = lambda of, kind: sum(row[of].get(kind, 0) for row in kept)
    by_kind = {kind: {"raw_bytes": part("raw", kind), "stored_bytes": part("stored", kind)} for kind in kinds}
    return {"files": len(kept), "raw_bytes": raw, "object_bytes": add("object_bytes"), "stub_bytes": STUB * len(kept), "stored_bytes": stored,
            "disk_bytes": add("object_disk") + add("stub_disk"), "share": stored / max(1, raw), "kinds": by_kind,
            "keyframes": sum(row["kind"] == "keyframe" for row in kept), "super_steps": sum(row["kind"] == "super-step" for row in kept)}


def measure(raw, names, profile, extra="", where=None):
    """Copy the series into a fresh mount, release it and weigh it."""
    base = Path(tempfile.mkdtemp(prefix="stepfs-sizes-", dir=where))
    try:
        mount = open_store(base, profile, extra)
        try:
            for name in names:
                shutil.copy2(Path(raw) / name, mount / name)
            mount.sync(timeout=3600)
            mount.require_released(*names[:-1])
            rows = weigh(mount, names)
            named = sum(row["object_bytes"] for row in rows)
            objects = sum(path.stat().st_size for path in harness.objects(mount.store))
        finally:
            mount.close()
    finally:
        if left := harness.mounts_below(base):
            sys.exit(f"sizes.py: {left} could not be unmounted; files left in {base}")
        shutil.rmtree(base)
    report = {"series": str(raw), "profile": profile, "files": rows, "total": total(rows), "after_first": total(rows[1:])}
    report["unnamed_bytes"] = objects - named
    report["newest"] = {"name": names[-1], "state": rows[-1]["state"], "raw_bytes": rows[-1]["raw_bytes"]}
    return report


def table(report):
    """Lines: per checkpoint the share of each kind in that kind's raw bytes, then the sums."""
    everything = report["total"]
    kinds = [kind for kind in everything["kinds"] if kind != "framing"]
    line = lambda name, *cells: f"{name:22}" + "".join(f"{cell:>15}" for cell in cells)
    percent = lambda stored, raw: f"{100 * stored / raw:.3f} %" if raw else "-"
    yield f"{report['series']}, profile {report['profile']}: each kind in % of its raw bytes, `whole` (object and stub) and `framing` in % of the file"
    yield line("checkpoint", "what", "whole", *kinds, "framing")
    for row in report["files"]:
        if row["state"] == "released":
            whole = percent(row["object_bytes"] + STUB, row["raw_bytes"])
            cells = (percent(row["stored"].get(kind, 0), row["raw"].get(kind, 0)) for kind in kinds)
            yield line(row["name"], row["kind"], whole, *cells, percent(row["stored"].get("framing", 0), row["raw_bytes"]))
        else:
            yield line(row["name"], row["state"], "exact")
    for name, sums in (("all released", everything), ("without the first", report["after_first"])):
        if sums["files"]:
            own = (percent(sums["kinds"][kind]["stored_bytes"], sums["kinds"][kind]["raw_bytes"]) for kind in kinds)
            framing = percent(sums["kinds"]["framing"]["stored_bytes"], sums["raw_bytes"])
            yield line(name, f"{sums['files']} files", percent(sums["stored_bytes"], sums["raw_bytes"]), *own, framing)
            of_all = (percent(sums["kinds"][kind]["stored_bytes"], sums["raw_bytes"]) for kind in kinds)
            yield line("  points of the whole", "", f"{sums['raw_bytes'] / max(1, sums['stored_bytes']):.2f}x", *of_all, "")
    yield (f"objects {everything['object_bytes']} bytes + {everything['files']} stubs of {STUB} = {everything['stored_bytes']} of {everything['raw_bytes']} raw; "
           f"{everything['disk_bytes']} on disk (du); objects no file names: {report['unnamed_bytes']}")
    yield f"the newest, {report['newest']['name']}, is {report['newest']['state']}: exact, {report['newest']['raw_bytes']} bytes, not in the sums"


def series(folder):
    """The checkpoints of a directory in their order."""
    return sorted(path.name for path in Path(folder).iterdir() if path.suffix in (".pt", ".pth", ".safetensors"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, nargs="+", help="directories of original checkpoints")
    parser.add_argument("--profile", action="append", help="profile of the store (default: balanced); may be repeated")
    parser.add_argument("--stepfs", metavar="BIN", help="the program to measure (default: $STEPFS_BIN, target/release/stepfs)")
    parser.add_argument("--toml", metavar="FILE", type=Path, help="more settings for stepfs.toml")
    parser.add_argument("--count", type=int, default=33, help="checkpoints to take: the last one stays exact (default: 33)")
    parser.add_argument("--dir", help="where to work; decides the disk (default: the temporary directory)")
    parser.add_argument("--brief", action="store_true", help="only the sums")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here; - for stdout")
    arguments = parser.parse_args()
    if arguments.stepfs:
        harness.BIN = str(Path(arguments.stepfs).resolve())
    extra = arguments.toml.read_text() if arguments.toml else ""
    reports = []
    for raw in arguments.raw:
        names = series(raw)[: arguments.count]
        if len(names) < 2:
            parser.error(f"{raw}: a series has two checkpoints or more")
        for profile in arguments.profile or ["balanced"]:
            reports.append(measure(raw, names, profile, extra, arguments.dir))
            if arguments.json != "-":
                lines = list(table(reports[-1]))
                print("\n".join([*lines[:2], *lines[2 + len(names) :]] if arguments.brief else lines), flush=True)
    if arguments.json == "-":
        print(json.dumps(reports, indent=2))
    elif arguments.json:
        Path(arguments.json).write_text(json.dumps(reports, indent=2) + "\n")


if __name__ == "__main__":
    main()
