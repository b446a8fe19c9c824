#!/usr/bin/env python3
"""Measure the checkpoints of many libraries on a mount. scripts/frameworks.sh calls it.

    table.py [NAME...]          these writers only; without names all of them
    table.py --page [NAME...]   then write docs/FRAMEWORKS.md; other rows stay from an earlier run
    table.py --list             all writers
"""

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from catalogue import ENTRIES
from document import line_of, write_page
from measure import HERE, Row, measure

ROOT = HERE.parents[1]
KEPT = ROOT / "target/frameworks"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--needs-second", action="store_true", help="exit with 0 if one of them needs the second environment")
    parser.add_argument("--page", action="store_true", help="write docs/FRAMEWORKS.md")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in ENTRIES]:
        sys.exit(f"frameworks: no writer {', '.join(unknown)}; there are: {' '.join(ENTRIES)}")
    chosen = [ENTRIES[name] for name in args.names or ENTRIES]
    if args.list:
        for entry in ENTRIES.values():
            print(f"{entry.name:18} {entry.says}")
        return
    if args.needs_second:
        sys.exit(0 if any(entry.environment == 2 for entry in chosen) else 1)

    # As Ctrl-C: mounts are taken down, and processes end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for number, entry in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {entry.name} ...", end=" ", flush=True)
        began = time.monotonic()
        python = os.environ["FRAMEWORKS_PYTHON"] if entry.environment == 2 else sys.executable
        row = measure(entry, python, KEPT / entry.name)
        (KEPT / entry.name / "row.json").write_text(json.dumps(asdict(row), indent=1))
        print(f"{time.monotonic() - began:.0f} s\n    {line_of(entry, row)}", flush=True)
    rows = {name: Row(**json.loads(path.read_text())) for name in ENTRIES if (path := KEPT / name / "row.json").exists()}
    if args.page:
        write_page(ROOT / "docs/FRAMEWORKS.md", ENTRIES, rows)
        print("wrote docs/FRAMEWORKS.md")
    bad = [entry.name for entry in chosen if rows[entry.name].is_bad]
    if bad:
        sys.exit(f"frameworks: look at {', '.join(bad)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
