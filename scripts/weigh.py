#!/usr/bin/env python3
"""Prints the stored size of each checkpoint in a mount: `stepfs ls --json MOUNT | weigh.py MOUNT`.

Sizes come from stat(2) on the mounted files, shares from stepfs.
"""

import json
import os
import sys


def share(row, role):
    part = row.get("roles", {}).get(role)
    return f"{100 * part['stored_bytes'] / part['raw_bytes']:.1f} %" if part and part["raw_bytes"] else "-"


def main():
    mount, rows = sys.argv[1], sorted(json.load(sys.stdin), key=lambda row: row["path"])
    head = ("checkpoint", "state", "ls -l", "du", "of file", "weights", "optimizer", "error")
    line = "{:16}{:10}{:>10}{:>10}{:>9}{:>10}{:>11}{:>11}".format
    print(line(*head))
    logical = disk = 0
    for row in rows:
        stat = os.stat(os.path.join(mount, row["path"].lstrip("/")))
        size, used = stat.st_size, 512 * stat.st_blocks
        logical, disk = logical + size, disk + used
        encoded = row["state"] in ("archived", "released")
        updates = row.get("error_updates")
        error = "-" if updates is None else f"{updates:.1f} upd."
        tail = (share(row, "weight"), share(row, "optimizer"), error) if encoded else ("exact",) * 2 + ("-",)
        print(line(os.path.basename(row["path"]), row["state"], f"{size / 1e6:.2f} MB", f"{used / 1e6:.2f} MB",
                   f"{100 * used / max(size, 1):.1f} %", *tail))
    print(line(f"{len(rows)} files", "", f"{logical / 1e6:.2f} MB", f"{disk / 1e6:.2f} MB",
               f"{100 * disk / max(logical, 1):.1f} %", "", "", "").rstrip())


if __name__ == "__main__":
    main()
