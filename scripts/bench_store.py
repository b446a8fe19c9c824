#!/usr/bin/env python3
"""Measure a large store: how soon it serves, and how much removing slows programs that save and read meanwhile.

Makes a store of 2,000 checkpoint directories with 10 files each, real series of small tensors, and two lineages of larger
files. In all directories but the newest, 9 files are released. Everything is removed at the end.

- `mount`: time from `stepfs mount` until the first `ls` of the root, `ls -R` and `ls -lR` are answered, warm and with an empty
  page cache (root only); the daemon's peak resident memory
- `read`: a reader of released files that are not cached, alone and while the daemon collects garbage and merges after a
  removal
- `save`: torch.save of 100 MB in a loop, alone and during and after `rm -r` of half of the checkpoints

`read` and `save` are interleaved (alone, with, with, alone, ...) and compared by medians.
"""

import argparse
import json
import math
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/real/support"))

import harness  # noqa: E402
import numpy as np  # noqa: E402
import safetensors.numpy  # noqa: E402
import torch  # noqa: E402

MB = 1 << 20
PARTS = ("mount", "read", "save")
FILES = 10  # per checkpoint directory: shards of a model, an optimizer's file, a small one with the trainer's state
SHARD = (2, 96, 96)  # two matrices a file, 72 KiB of fp32: just above the least size that is released
MOUNT_SECONDS, MOUNT_MB, SAVE_RATIO, READ_LOSS = 2.0, 200, 1.2, 0.30


def say(line):
    print(line, file=sys.stderr, flush=True)


# --- making the store


class Weights:
    """Tensors that move a little each step, as weights do."""

    def __init__(self, seed, shape):
        self.rng = np.random.default_rng(seed)
        self.state = 0.05 * self.rng.standard_normal(shape, dtype=np.float32)

    def step(self):
        self.state += 1e-3 * self.rng.standard_normal(self.state.shape, dtype=np.float32)
        return self.state


def write_run(folder, seed, checkpoints):
    """One training run: directories `checkpoint-N` like those of transformers' Trainer."""
    shards = FILES - 2
    weights = Weights(seed, (shards, *SHARD))
    moments = Weights(seed + 1, SHARD)
    for n in range(1, checkpoints + 1):
        directory = folder / f"checkpoint-{100 * n}"
        directory.mkdir(parents=True)
        state = weights.step()
        for k in range(shards):
            tensors = {f"layers.{2 * k + i}.weight": state[k, i] for i in range(SHARD[0])}
            safetensors.numpy.save_file(tensors, directory / f"model-{k + 1:05d}-of-{shards:05d}.safetensors")
        exp_avg = torch.from_numpy(moments.step().copy())
        torch.save({"state": {0: {"step": torch.tensor(float(n)), "exp_avg": exp_avg}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
                   directory / "optimizer.pt")
        (directory / "trainer_state.json").write_text(json.dumps({"global_step": 100 * n, "log_history": list(range(n))}))


def write_large(folder, seed, count, megabytes):
    """A lineage of single files, 2 MB a tensor."""
    folder.mkdir(parents=True)
    weights = Weights(seed, (megabytes // 2, 512, 1024))
    for n in range(1, count + 1):
        state = weights.step()
        safetensors.numpy.save_file({f"layers.{k}.weight": tensor for k, tensor in enumerate(state)}, folder / f"step_{n}.safetensors")


def make_store(target, scratch, arguments):
    """Run by run through `stepfs import`, so that the raw files of only one run exist at a time. In memory if there is room: on a
    disk, making 20,000 files durable takes several times as long, and is not measured here.
    """
    began = time.perf_counter()
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 8 << 30:
        scratch = Path(tempfile.mkdtemp(prefix="stepfs-bench-", dir=memory))
    try:
        make_runs(scratch / "store", scratch, arguments, began)
        subprocess.run(["cp", "-a", "--sparse=always", scratch / "store", target.with_name(target.name + ".new")], check=True)
        os.rename(target.with_name(target.name + ".new"), target)
    finally:
        shutil.rmtree(scratch / "store", ignore_errors=True)
        if scratch.parent == memory:
            shutil.rmtree(scratch)
    return time.perf_counter() - began


def make_runs(store, scratch, arguments, began):

    def take(name, write):
        write(scratch / name)
        harness.run("import", store, scratch / name, timeout=3600)
        shutil.rmtree(scratch / name)

    per_run = arguments.checkpoints // arguments.runs
    for run in range(arguments.runs):
        take(f"run_{run:02d}", lambda folder: write_run(folder, 10 * run, per_run))
        say(f"  {(run + 1) * per_run} checkpoints after {time.perf_counter() - began:.0f} s")
    for n, name in enumerate(("kept", "thinned")):
        take(name, lambda folder: write_large(folder, 1000 + n, arguments.large, arguments.large_mb))


# --- time until it serves


def drop_caches():
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return True
    except OSError:
        return False


def peak_mb(pid):
    return int(re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)[1]) / 1024


def timed(command):
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"bench_store.py: {' '.join(map(str, command))}: {done.stderr.decode()}")
    return time.perf_counter() - began, done.stdout.count(b"\n")


def bench_mount(mount, arguments):
    """Medians. Times of `ls` count from the start of `stepfs mount`."""
    results = []
    for cold in (False, True):
        rows = []
        for _ in range(arguments.rounds):
            if cold and not drop_caches():
                return results
            began = time.perf_counter()
            mount.mount()
            mounted = time.perf_counter() - began
            timed(["ls", mount.dir])
            first = time.perf_counter() - began
            walk, lines = timed(["ls", "-R", mount.dir])
            stat, _ = timed(["ls", "-lR", mount.dir])
            serving = peak_mb(mount.pid)
            began = time.perf_counter()
            mount.sync(timeout=3600)
            rows.append({"mounted_s": mounted, "first_ls_s": first, "ls_R_s": walk, "ls_lR_s": stat, "settled_s": time.perf_counter() - began,
                         "peak_mb": max(serving, peak_mb(mount.pid)), "lines": lines})
            mount.umount()
        results.append({"cold": cold, "runs": rows, **{key: statistics.median(row[key] for row in rows) for key in rows[0]}})
    return results


# --- cost of removing


def remove(paths):
    for path in paths:
        subprocess.run(["rm", "-r", path], check=True)


def while_digesting(mount, paths, removing_counts):
    """Remove, and let the archive finish the work; returns an event that is set at the end. With `removing_counts` it covers the
    removal, too.
    """
    over = threading.Event()

    def digest():
        try:
            if removing_counts:
                remove(paths)
            mount.sync(timeout=3600)
        finally:
            over.set()

    if not removing_counts:
        remove(paths)
    threading.Thread(target=digest, daemon=True).start()
    return over


def portions(items, count):
    return [items[n::count] for n in range(count)]


def bench_read(mount, arguments):
    """Bytes per second of a reader. The cache has no room, so each file is decoded each time."""
    settings = mount.store / "stepfs.toml"
    text = settings.read_text()
    settings.write_text(re.sub(r"^cache_mib = .*$", "cache_mib = 0", text, flags=re.M))
    mount.mount()
    mount.sync(timeout=3600)
    files = sorted((mount / "kept").iterdir())[:-1]
    random.Random(1).shuffle(files)
    turn = 0

    def read_until(over, least, most=math.inf):
        nonlocal turn
        size, began = 0, time.perf_counter()
        while (not over.is_set() or time.perf_counter() - began < least) and time.perf_counter() - began < most:
            with open(files[turn % len(files)], "rb", buffering=0) as f:
                while data := f.read(4 * MB):
                    size += len(data)
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # otherwise the kernel answers the next time
            turn += 1
        return size / (time.perf_counter() - began) / MB, time.perf_counter() - began

    # Every second of the large files, for merging, and a tenth of the small ones, for collecting.
    large = sorted((mount / "thinned").iterdir())[1::2]
    small = [path for path in sorted(mount.dir.glob("run_*/checkpoint-*")) if int(path.name[11:]) % 1000 == 300]
    alone, along, lasted = [], [], []
    done = threading.Event()
    done.set()
    for n, paths in enumerate(portions(large + small, arguments.rounds)):
        measure = [lambda: alone.append(read_until(done, arguments.seconds)[0]), lambda: None]

        def measure_with(paths=paths):
            speed, seconds = read_until(while_digesting(mount, paths, False), 0.0, 4 * arguments.seconds)
            along.append(speed), lasted.append(seconds)

        measure[1] = measure_with
        for step in measure if n % 2 == 0 else measure[::-1]:
            step()
            mount.sync(timeout=3600)
    mount.umount()
    settings.write_text(text)
    return {"alone_mb_s": alone, "with_mb_s": along, "digesting_s": lasted, "loss": 1 - statistics.median(along) / statistics.median(alone)}


def bench_save(mount, arguments):
    """Times of torch.save. The file leaves the page cache's dirty pages before the next save is timed."""
    mount.mount()
    mount.sync(timeout=3600)
    state = {f"layers.{n}.weight": torch.randn(1024, 1024) for n in range(arguments.save_mb // 4)}
    target = mount / "last.pt"

    def save():
        target.unlink(missing_ok=True)
        began = time.perf_counter()
        torch.save(state, target)
        seconds = time.perf_counter() - began
        with open(target, "rb") as f:
            os.fsync(f.fileno())
        return seconds

    # Every second checkpoint of every run, so that the parents of the remaining states are gone.
    half = sorted(mount.dir.glob("run_*/checkpoint-*"))[1::2]
    alone, along, lasted = [], [], []
    save()
    for n, paths in enumerate(portions(half, arguments.rounds)):

        def measure_alone():
            alone.extend(save() for _ in range(arguments.saves))

        def measure_with(paths=paths):
            began = time.perf_counter()
            over = while_digesting(mount, paths, True)
            end = len(along) + 4 * arguments.saves  # a part of the long cases is enough
            while not over.is_set() and len(along) < end:
                along.append(save())
            lasted.append(time.perf_counter() - began)

        for step in (measure_alone, measure_with) if n % 2 == 0 else (measure_with, measure_alone):
            step()
            mount.sync(timeout=3600)
    target.unlink()
    mount.umount()
    return {"alone_s": alone, "with_s": along, "digesting_s": lasted, "removed": len(half),
            "ratio": statistics.median(along) / statistics.median(alone)}


# --- output


def table(report):
    line = "{:52}{:>12}{:>12}{:>10}{:>11}  {}".format
    verdict = lambda met: "ok" if met else "MISSED"
    yield line(f"{report['files']} files in {report['checkpoints']} checkpoints", "", "", "", "goal", "")
    for row in report.get("mount", []):
        what = "page cache empty" if row["cold"] else "warm"
        yield line(f"mount until the first ls, {what}", "", f"{row['first_ls_s']:.2f} s", "", f"< {MOUNT_SECONDS:.0f} s", verdict(row["first_ls_s"] < MOUNT_SECONDS))
        yield line("  of it until mount returned; then ls -R, ls -lR", f"{row['mounted_s']:.2f} s", f"{row['ls_R_s']:.2f} s", f"{row['ls_lR_s']:.2f} s", "", f"settled after {row['settled_s']:.1f} s")
        yield line("  the daemon's peak memory", "", f"{row['peak_mb']:.0f} MB", "", f"< {MOUNT_MB} MB", verdict(row["peak_mb"] < MOUNT_MB))
    yield line("", "alone", "with", "ratio", "", "")
    if r := report.get("read"):
        alone, along = statistics.median(r["alone_mb_s"]), statistics.median(r["with_mb_s"])
        yield line("reader of released files, while merging", f"{alone:.0f} MB/s", f"{along:.0f} MB/s", f"{along / alone:.2f}", f"> {1 - READ_LOSS:.2f}",
                   f"{verdict(r['loss'] < READ_LOSS)}; {sum(r['digesting_s']):.1f} s of merging")
    if r := report.get("save"):
        alone, along = statistics.median(r["alone_s"]), statistics.median(r["with_s"])
        yield line(f"torch.save of {report['save_mb']} MB, during rm -r of {r['removed']}", f"{alone:.3f} s", f"{along:.3f} s", f"{r['ratio']:.2f}", f"<= {SAVE_RATIO}",
                   f"{verdict(r['ratio'] <= SAVE_RATIO)}; {len(r['with_s'])} saves in {sum(r['digesting_s']):.1f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="where to work; decides the disk (default: the temporary directory)")
    parser.add_argument("--store", type=Path, help="keep the new store there, and reuse it if it exists")
    parser.add_argument("--checkpoints", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=20, help="training runs that they belong to")
    parser.add_argument("--large", type=int, default=64, help="states of each of the two lineages of larger files")
    parser.add_argument("--large-mb", type=int, default=8)
    parser.add_argument("--save-mb", type=int, default=100)
    parser.add_argument("--saves", type=int, default=8, help="saves alone per round")
    parser.add_argument("--seconds", type=float, default=2.0, help="of reading alone per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything: does it run at all")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here; - for stdout")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.checkpoints, arguments.runs, arguments.large, arguments.rounds = 200, 4, 16, 2
    parts = arguments.only or PARTS
    base = Path(tempfile.mkdtemp(prefix="stepfs-bench-", dir=arguments.dir))
    report = {"cores": os.cpu_count(), "kernel": platform.release(), "checkpoints": arguments.checkpoints, "files": arguments.checkpoints * FILES,
              "save_mb": arguments.save_mb}
    torch.manual_seed(1)
    mount = harness.Mount(base)
    try:
        made = arguments.store or mount.store
        if not made.exists():
            say("making the store ...")
            (base / "scratch").mkdir()
            report["making_s"] = make_store(made, base / "scratch", arguments)
        if arguments.store:
            subprocess.run(["cp", "-a", "--sparse=always", made, mount.store], check=True)
        for name, part in (("mount", bench_mount), ("read", bench_read), ("save", bench_save)):
            if name in parts:
                say(f"measuring {name} ...")
                report[name] = part(mount, arguments)
        harness.require_clean(mount.store)
    finally:
        mount.close()
        if left := harness.mounts_below(base):
            sys.exit(f"bench_store.py: {left} could not be unmounted; files left in {base}")
        shutil.rmtree(base)
    if arguments.json == "-":
        print(json.dumps(report, indent=2))
    else:
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
        print("\n".join(table(report)))


if __name__ == "__main__":
    main()
