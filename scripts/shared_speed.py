#!/usr/bin/env python3
"""Measure a mount of a shared store in turns with a plain directory beside the store, on the same file system.

    shared_speed.py [--mib 512] [--rounds 5]
    scripts/guests.sh nfs .venv/bin/python scripts/shared_speed.py      the same on NFS, or `ceph`, in a guest
    ... scripts/shared_speed.py --mbit 1000     guests' network as slow as one of 1 Gbit/s. Without it the network is this
                                                machine's memory, and only processor time counts

- save: a file is written in pieces of 1 MiB, and fsynced
- load: the file is read in pieces of 1 MiB, after its pages were dropped on this machine
- open: a file of 128 KiB is opened for reading and closed, many times

STEPFS_BIN names the program. The ratio is that of medians, plain to mount: below 1 the mount is slower.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/real/support"), str(ROOT / "scripts")]

import harness  # noqa: E402
from guests import guests, in_guests  # noqa: E402
from nodes import Nodes  # noqa: E402

MB = 1 << 20
OPENS = 200


def save(folder, mib):
    piece, began = os.urandom(MB), time.perf_counter()
    with open(Path(folder) / "state", "wb", buffering=0) as file:
        for _ in range(mib):
            file.write(piece)
        os.fsync(file.fileno())
    return time.perf_counter() - began


def load(folder, mib):
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    piece, read, began = bytearray(MB), 0, time.perf_counter()
    with open(Path(folder) / "state", "rb", buffering=0) as file:
        while count := file.readinto(piece):
            read += count
    assert read == mib * MB
    return time.perf_counter() - began


def open_often(folder, mib):
    path = Path(folder) / "small"
    path.write_bytes(bytes(128 << 10))
    began = time.perf_counter()
    for _ in range(OPENS):
        os.close(os.open(path, os.O_RDONLY))
    return (time.perf_counter() - began) / OPENS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbit", type=int)
    args = parser.parse_args()
    for guest in guests() if args.mbit and in_guests() else []:
        limit = ["root", "tbf", "rate", f"{args.mbit}mbit", "burst", "256k", "latency", "50ms"]
        # What arrives at the guest, and what leaves it: Ceph's daemons run on this machine.
        subprocess.run(["tc", "qdisc", "add", "dev", guest.link, *limit], check=True)
        guest.run("sh", "-c", "insmod /usr/lib/uml/modules/$(uname -r)/kernel/net/sched/sch_tbf.ko")
        guest.run("tc", "qdisc", "add", "dev", "vec1", *limit)
    nodes = Nodes(harness.make_base(), 2)
    try:
        nodes.mount()
        # The keeper also archives; the other daemon only serves.
        keeper = nodes.keeper()
        node = next(node for node in nodes if node is not keeper)
        plain = nodes.store.parent / "plain"
        plain.mkdir()
        for name, function in (("save", "save"), ("load", "load"), ("open", "open_often")):
            times = {"plain": [], "mount": []}
            for turn in range(args.rounds):
                for side in ("plain", "mount") if turn % 2 == 0 else ("mount", "plain"):
                    folder = str(plain if side == "plain" else node.dir)
                    times[side].append(node.call(f"shared_speed.{function}", folder, args.mib))
            before, now = (statistics.median(times[side]) for side in ("plain", "mount"))
            unit = f"{1e6 * before:.0f} and {1e6 * now:.0f} us" if name == "open" else f"{args.mib / before:.0f} and {args.mib / now:.0f} MiB/s"
            print(f"{name}: {before / now:.2f}   plain and mount: {unit}   ({', '.join(f'{time:.4g}' for side in times.values() for time in side)})", flush=True)
    finally:
        nodes.close()
        nodes.remove()


if __name__ == "__main__":
    main()
