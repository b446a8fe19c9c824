#!/usr/bin/env python3
"""Let machines die at random instants while they save, and read what their mirrors have.

    mirror_deaths.py [--deaths 50] [--seed N] [--newest exact|quantized] [--kind file|s3]

Each time one mount gets checkpoints, small files, renames and removals. Now and then it waits for its mirror, which
acknowledges all files there are. At a random instant the daemon is killed, and its store is removed. A fresh store is
pulled. Each name that was acknowledged and not changed since must be there, equal, or within its stated error; a name
that changed since must have one of the contents that it had.

--seed repeats the death of this seed. STEPFS_BIN names the program.
"""

import argparse
import io
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/real/support")]

import torch  # noqa: E402
from harness import Mount, require_clean, run  # noqa: E402
from mirrors import KINDS, Mirrored, make_mirror  # noqa: E402
from series import difference, tensors_of, walk  # noqa: E402


class Job(threading.Thread):
    """Saves until the daemon dies. Notes each content of each name, and the names at the last acknowledgement."""

    def __init__(self, mount, draw):
        super().__init__()
        self.mount, self.draw, self.had, self.now = mount, draw, {}, {}
        self.acknowledged, self.changed = {}, set()

    def note(self, name, data):
        self.changed.add(name)
        self.had.setdefault(name, [None]).append(data)
        self.now[name] = data

    def save(self, name, data):
        os.makedirs((self.mount / name).parent, exist_ok=True)
        # Before: the daemon may have it although the call does not return.
        self.note(name, data)
        with open(self.mount / f"{name}.part", "wb") as f:
            f.write(data)
        os.rename(self.mount / f"{name}.part", self.mount / name)

    def run(self):
        try:
            for step, state in enumerate(walk(200)):
                file = io.BytesIO()
                torch.save(state, file)
                self.save(f"run/step_{step:04d}.pt", file.getvalue())
                self.save("run/log.txt", self.draw.randbytes(self.draw.randrange(2000)))
                self.save(f"data/{step % 5}.bin", self.draw.randbytes(100_000))
                if step % 3 == 2:
                    gone = self.draw.choice([name for name, data in self.now.items() if data and name.startswith("run/step")])
                    self.note(gone, None)
                    os.remove(self.mount / gone)
                if self.draw.random() < 0.3:
                    self.mount.mirrored()
                    self.acknowledged = dict(self.now)
                    self.changed.clear()
        except (OSError, AssertionError):
            pass


def is_within(fresh, name, was, data):
    """Whether a decoded checkpoint differs by no more than its object states."""
    said = {about["path"].replace("/", "."): about["max_abs_error"] for about in fresh.tensors(name)}
    was, now = (tensors_of(torch.load(io.BytesIO(data), weights_only=False)) for data in (was, data))
    stated = {was[path].data_ptr(): error for path, error in said.items() if path in was}
    return was.keys() == now.keys() and all(difference(was[path], now[path]) <= stated.get(was[path].data_ptr(), 0) for path in was)


def die(seed, args):
    draw = random.Random(seed)
    base = Path(tempfile.mkdtemp(prefix="stepfs-mirror-"))
    mirror = make_mirror(args.kind, base)
    mount = Mirrored(base / "store", mirror, f'newest = "{args.newest}"')
    fresh = Mount(base / "fresh")
    try:
        mount.mount()
        job = Job(mount, draw)
        job.start()
        time.sleep(draw.uniform(0.5, args.longest))
        mount.kill()
        job.join(60)
        shutil.rmtree(mount.store)
        run("pull", mirror.url, fresh.store)
        require_clean(fresh.store)
        fresh.mount()
        equal = lossy = 0
        for name, contents in job.had.items():
            path = fresh / name
            read = path.read_bytes() if path.exists() else None
            allowed = contents if name in job.changed else [job.acknowledged.get(name)]
            if read in allowed:
                equal += name in job.acknowledged
                continue
            assert read and any(was and is_within(fresh, name, was, read) for was in allowed), f"seed {seed}: {name} is wrong"
            lossy += 1
        print(f"seed {seed}: {len(job.acknowledged)} acknowledged, {equal} equal, {lossy} within their error", flush=True)
        return len(job.acknowledged), lossy
    finally:
        for each in (mount, fresh):
            each.close()
        mirror.close()
        shutil.rmtree(base, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=50)
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--newest", choices=["exact", "quantized"], default="exact")
    parser.add_argument("--kind", choices=KINDS, default="file")
    parser.add_argument("--longest", type=float, default=15, help="seconds until a death, at most")
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else range(args.deaths)
    acknowledged, lossy = map(sum, zip(*(die(seed, args) for seed in seeds)))
    print(f"{len(seeds)} deaths: all {acknowledged} acknowledged files read, {lossy} of them within their error")


if __name__ == "__main__":
    main()
