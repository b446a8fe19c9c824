#!/usr/bin/env python3
"""Measure stepfs side by side with a plain directory on the same disk.

Runs are interleaved (plain, mount, mount, plain, ...) and compared by the best of each, so that a noisy machine disturbs both
alike; whole cold reads by the medians. All files are removed at the end.

- `save`: torch.save of a state dict into the mount, and into a plain directory
- `again`: torch.save right after another of the same size, which the device may still be writing
- `load`: torch.load of the newest (resident) file, and of the same file in a plain directory
- `writes`: a file written in pieces of 1 KiB to 64 MiB, with passthrough and served by the daemon
- `chain`: whole released files of an AdamW series, from a keyframe to the longest chain, with nothing cached; from this disk, and as
  root from a disk of 1.3 GB/s
- `cold`: one 1 MB tensor (safe_open) out of a released checkpoint with nothing cached, and the whole file
- `memory`: the daemon's peak resident memory while it archives, reads and recalls that checkpoint
- `codec`: a whole AdamW checkpoint encoded and decoded on one core (`examples/speed`), as ratios to memcpy, for several profiles and
  types; and the speed on two cores, divided by that on one
"""

import argparse
import contextlib
import gc
import json
import os
import platform
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
import slow_disk  # noqa: E402
import speed  # noqa: E402
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

MB = 1 << 20
PARTS = ("save", "again", "load", "writes", "chain", "cold", "memory", "codec")

# Bytes per second of the slower disk: of a usual NVMe drive in a virtual machine.
SLOW_DISK = 1_300_000_000
# States of a series whose last released one has the longest chain: a keyframe, three super-steps, and all that follow.
LONGEST = 33

# Memory for decoded states, far less than one checkpoint here.
MEMORY = "64M"


class Daemon(harness.Mount):
    """A mounted store, and the peak memory of its daemon."""

    def __init__(self, base):
        super().__init__(base)
        self.peak, self.peak_anonymous = {}, {}

    def arguments(self):
        # --memory limits decoded states; this measures all other memory.
        return [*super().arguments(), "--memory", MEMORY]

    def mount(self):
        super().mount()
        threading.Thread(target=self.watch, args=(self.pid,), daemon=True).start()
        return self

    def memory(self, pid, field):
        found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
        return int(found[1]) / 1024 if found else 0.0

    def watch(self, pid):
        """Sample anonymous memory, which has no high-water mark in /proc."""
        try:
            while self.pid == pid:
                self.peak_anonymous["sampled"] = max(self.peak_anonymous.get("sampled", 0), self.memory(pid, "RssAnon"))
                time.sleep(0.02)
        except OSError:
            pass

    def note_peak(self, during):
        self.peak[during] = max(self.peak.get(during, 0), self.memory(self.pid, "VmHWM"))

    def sync(self, timeout=3600):
        super().sync(timeout=timeout)

    def cold(self):
        """A fresh daemon, no decoded files, nothing of the store in the page cache."""
        self.umount()
        for path in (self.store / "cache").glob("*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        drop_caches(self.store)
        self.mount()


def drop_caches(folder):
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
        return
    except OSError:
        pass  # not root: file by file
    for path in Path(folder).rglob("*"):
        if path.is_file() and not path.is_symlink():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def timed(action):
    gc.collect()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def side_by_side(first, second, runs, between=lambda: None):
    """Best time of each, interleaved, in alternating order."""
    times = {0: [], 1: []}
    for n in range(runs):
        for which in (0, 1) if n % 2 == 0 else (1, 0):
            between()
            times[which].append(timed((first, second)[which]))
    return times[0], times[1]


def state_dict(megabytes, seed, probe=False):
    """fp32 tensors of 16 MB each, and on request one of 1 MB in their middle."""
    generator = torch.Generator().manual_seed(seed)
    count = max(1, megabytes // 16)
    state = {}
    for n in range(count):
        if probe and n == count // 2:
            state["probe.weight"] = torch.randn(512, 512, generator=generator) * 0.02
        state[f"layer.{n}.weight"] = torch.randn(2048, 2048, generator=generator) * 0.02
    return state


def step(state, seed):
    """Change the tensors in place as one training step does."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.values():
        tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=1e-4)


def bench_save(daemon, plain, arguments):
    state = state_dict(arguments.size, 1)

    def save(folder):
        torch.save(state, folder / "model.pt")

    def between():
        # Neither side pays for the other's dirty pages, and the daemon is idle.
        for folder in (plain, daemon.dir):
            (folder / "model.pt").unlink(missing_ok=True)
        daemon.sync()
        os.sync()

    plain_times, mount_times = side_by_side(lambda: save(plain), lambda: save(daemon.dir), arguments.runs, between)
    between()
    return ratio("save", plain_times, mount_times, arguments.size, 0.8)


def bench_again(daemon, plain, arguments):
    """Two lineages, so that nothing is archived meanwhile."""
    state, times = state_dict(arguments.size, 1), ([], [])
    for n in range(arguments.runs):
        for which in (0, 1) if n % 2 == 0 else (1, 0):
            folder = (plain, daemon.dir)[which]
            for name in ("first", "second"):
                for other in (plain, daemon.dir):
                    (other / f"{name}.pt").unlink(missing_ok=True)
            daemon.sync()
            os.sync()
            # A virtual machine may have given free pages back to its host, and fetching them takes longer than all else.
            torch.ones(3 * arguments.size * MB // 4)
            torch.save(state, folder / "first.pt")
            times[which].append(timed(lambda: torch.save(state, folder / "second.pt")))
    for folder in (plain, daemon.dir):
        for name in ("first", "second"):
            (folder / f"{name}.pt").unlink(missing_ok=True)
    daemon.sync()
    return ratio("again", *times, arguments.size, 0.8)


def bench_load(daemon, plain, arguments):
    state = state_dict(arguments.size, 2)
    for folder in (plain, daemon.dir):
        torch.save(state, folder / "model.pt")
    del state
    daemon.sync()
    os.sync()
    load = lambda folder: torch.load(folder / "model.pt")
    load(plain), load(daemon.dir)  # both warm
    plain_times, mount_times = side_by_side(lambda: load(plain), lambda: load(daemon.dir), arguments.runs)
    for folder in (plain, daemon.dir):
        (folder / "model.pt").unlink()
    daemon.sync()
    return ratio("load", plain_times, mount_times, arguments.size, 0.9)


def bench_writes(daemon, plain, arguments):
    """Pieces of each size, a new file each time: 4,096 of them, and at most half of the size of the other parts."""
    results = []
    for served in (False, True):
        daemon.umount()
        daemon.passthrough = not served
        daemon.mount()
        for piece in (1 << 10, 8 << 10, MB, 64 * MB):
            data, count = os.urandom(piece), max(1, min(4096, arguments.size * MB // 2 // piece))

            def write(folder, data=data, count=count):
                with open(folder / "pieces.bin", "wb", buffering=0) as f:
                    for _ in range(count):
                        f.write(data)

            def between():
                for folder in (plain, daemon.dir):
                    (folder / "pieces.bin").unlink(missing_ok=True)

            times = side_by_side(lambda: write(plain), lambda: write(daemon.dir), arguments.runs, between)
            between()
            how = "served by the daemon" if served else "passthrough"
            results.append({**ratio("writes", *times, piece * count / MB, None), "piece": piece, "how": how})
    daemon.umount()
    daemon.passthrough = True
    daemon.mount()
    return results


def adamw_series(folder, megabytes, count):
    """`count` checkpoints of a model under AdamW, of this size each, four iterations apart."""
    width = int((megabytes * MB / 12 / 8) ** 0.5)
    generator = torch.Generator().manual_seed(5)
    noise = lambda scale: torch.randn(width, width, generator=generator) * scale
    layers = torch.nn.ParameterList([torch.nn.Parameter(noise(0.02)) for _ in range(8)])
    goals = [noise(0.02) for _ in range(8)]
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-4)
    for at in range(count):
        for _ in range(4):
            for parameter, goal in zip(layers, goals):
                parameter.grad = (parameter.detach() - goal) * 1e-2 + noise(1e-3)
            optimizer.step()
        path = folder / f"step_{at:02d}.pt"
        torch.save({"model": layers.state_dict(), "optimizer": optimizer.state_dict()}, path)
        yield path


def bench_chain(daemon, plain, arguments):
    """Released files with the shortest, the median and the longest chain, from this disk and from a slower one."""
    for path in adamw_series(daemon.dir, arguments.size // 2, LONGEST):
        shutil.copy(path, plain / "whole.pt")
        daemon.sync()
    released = sorted((row for row in daemon.ls() if row["state"] == "released"), key=lambda row: row["chain_len"])
    chosen = [released[at] for at in (0, len(released) // 2, -1)]

    def between():
        daemon.cold()
        drop_caches(plain)

    def measured(row):
        whole = daemon.dir / row["path"].strip("/")
        times = side_by_side(lambda: read_whole(plain / "whole.pt"), lambda: read_whole(whole), arguments.runs, between)
        # Medians: a disk with a limit lets a read pass at once now and then.
        return {**ratio("chain", *times, row["logical_bytes"] / MB, 0.8, statistics.median), "objects": row["chain_len"]}

    results = [measured(row) for row in chosen]
    with contextlib.ExitStack() as limits:
        try:
            limits.enter_context(slow_disk.reads_limited(daemon.store, SLOW_DISK))
        except OSError as why:
            print(f"bench.py: no reads from a slower disk: {why}", file=sys.stderr)
        else:
            results += [{**measured(row), "disk": SLOW_DISK} for row in chosen]
    for path in (*plain.iterdir(), *daemon.dir.iterdir()):
        path.unlink()
    daemon.sync()
    return results


def read_whole(path):
    buffer = bytearray(8 * MB)
    with open(path, "rb", buffering=0) as f:
        while f.readinto(buffer):
            pass


def ratio(name, plain_times, mount_times, megabytes, goal, of=min):
    plain, mount = of(plain_times), of(mount_times)
    return {"name": name, "plain_s": plain_times, "mount_s": mount_times, "megabytes": megabytes, "plain": plain, "mount": mount,
            "ratio": plain / mount, "goal": goal, "met": goal is None or plain / mount >= goal}


def bench_cold(daemon, plain, arguments):
    """Release two checkpoints, the second a difference to the first. Read one 1 MB tensor of the second, or all of it."""
    state = state_dict(arguments.big, 3, probe=True)
    saving = []
    for n in range(1, 4):
        if n > 1:
            step(state, 100 + n)
        saving.append(timed(lambda: save_file(state, daemon.dir / f"step_{n}.safetensors")))
    del state
    gc.collect()
    archiving = timed(daemon.sync)
    daemon.note_peak("archiving")
    rows = {row["path"].strip("/"): row for row in daemon.ls()}
    target = daemon.dir / "step_2.safetensors"
    if rows[target.name]["state"] != "released":
        sys.exit(f"bench.py: {target.name} is {rows[target.name]['state']}, not released")

    def one_tensor():
        with safe_open(target, "pt") as file:
            return file.get_tensor("probe.weight").clone()

    def whole():
        read_whole(target)

    def between():
        daemon.note_peak("reading")
        daemon.cold()

    daemon.cold()  # the peak of archiving is noted already
    tensor_times, whole_times = side_by_side(one_tensor, whole, arguments.runs, between)
    between()
    with open(target, "r+b") as f:  # recall
        f.seek(1000)
        f.write(b"x")
    daemon.note_peak("recalling")
    share = min(tensor_times) / min(whole_times)
    size = rows[target.name]["logical_bytes"]
    cold = {"name": "cold", "tensor_s": tensor_times, "whole_s": whole_times, "megabytes": size / MB, "share": share, "goal": 1 / 50,
            "met": share <= 1 / 50, "archive_s": archiving, "save_s": saving,
            "stored": {name: row["stored_bytes"] / row["logical_bytes"] for name, row in rows.items()}}
    peak = max(daemon.peak.values())
    memory = {"name": "memory", "peak_mb": daemon.peak, "peak_anonymous_mb": daemon.peak_anonymous.get("sampled"), "megabytes": size / MB,
              "goal": 600, "met": peak < 600}
    for name in rows:
        (daemon.dir / name).unlink()
    daemon.sync()
    return [cold, memory]


def bench_codec(arguments):
    """Ratios to memcpy by profile, type and row."""
    program = speed.build(ROOT, ROOT / "target")
    mib = 32 if arguments.quick else 128
    found = {}
    for _ in range(min(arguments.runs, 3)):
        for profile, dtype in speed.VARIANTS:
            run = speed.report(program, profile, dtype, mib)
            found.setdefault("memcpy, GB/s", []).append(run["memcpy"])
            for name, ratio in run["ratios"].items():
                found.setdefault(f"{profile}, {dtype}: {name}", []).append(ratio)
    results = [{"name": "codec", "rows": {name: speed.spread(values) for name, values in found.items()}}]
    if os.cpu_count() > 1:
        results += [{"name": "scaling", "variant": f"{profile}, {dtype}", "rows": speed.scaling(program, profile, dtype, mib, min(arguments.runs, 3))}
                    for profile, dtype in speed.VARIANTS]
    return results


def revision():
    """The commit that is measured, for a later comparison with it."""
    return speed.run("git", "rev-parse", "HEAD", cwd=ROOT).strip()


def processor():
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1] if found else platform.machine()


def table(results):
    line = "{:38}{:>14}{:>14}{:>10}{:>10}  {}".format
    yield line("", "plain", "stepfs", "ratio", "goal", "")
    verdict = lambda r: "ok" if r["met"] else "MISSED"
    for r in results:
        if r["name"] in ("save", "again", "load"):
            what = {"again": "torch.save right after another", "load": "torch.load, resident"}.get(r["name"], "torch.save")
            what += f", {r['megabytes']} MB"
            yield line(what, f"{r['plain']:.3f} s", f"{r['mount']:.3f} s", f"{r['ratio']:.2f}", f">= {r['goal']}", verdict(r))
        elif r["name"] == "writes":
            size = f"{r['piece'] // MB} MiB" if r["piece"] >= MB else f"{r['piece'] // 1024} KiB"
            yield line(f"writes of {size}, {r['how']}", f"{r['plain']:.4f} s", f"{r['mount']:.4f} s", f"{r['ratio']:.2f}", "", "")
        elif r["name"] == "chain":
            what = f"cold {r['megabytes']:.0f} MB, chain of {r['objects']}" + (f", {r['disk'] / 1e9} GB/s" if "disk" in r else "")
            yield line(what, f"{r['plain']:.3f} s", f"{r['mount']:.3f} s", f"{r['ratio']:.2f}", f">= {r['goal']}", verdict(r))
        elif r["name"] == "cold":
            what = f"1 MB of a cold {r['megabytes'] / 1024:.1f} GB file / all of it"
            yield line(what, f"{min(r['tensor_s']):.4f} s", f"{min(r['whole_s']):.3f} s", f"1/{1 / r['share']:.0f}", "<= 1/50", verdict(r))
            stored = ", ".join(f"{name} {100 * share:.1f} %" for name, share in sorted(r["stored"].items()))
            yield f"  stored: {stored}; sync took {r['archive_s']:.1f} s"
        elif r["name"] == "memory":
            for during, peak in r["peak_mb"].items():
                yield line(f"daemon's peak memory, {during}", "", f"{peak:.0f} MB", "", "< 600 MB", "ok" if peak < 600 else "MISSED")
        elif r["name"] in ("codec", "scaling"):
            yield ""
            yield "ratio to memcpy: median (spread)" if r["name"] == "codec" else f"two cores against one, {r['variant']}: median (spread)"
            for name, row in r["rows"].items():
                yield f"{name:84}{row['median']:>7.3f} ({row['least']:.3f}-{row['largest']:.3f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stepfs", default=str(ROOT / "target/release/stepfs"), help="the binary to measure")
    parser.add_argument("--dir", default=None, help="where to work; decides the disk (default: the temporary directory)")
    parser.add_argument("--size", type=int, default=512, metavar="MB", help="state dict for save and load")
    parser.add_argument("--big", type=int, default=2048, metavar="MB", help="checkpoint for cold and memory")
    parser.add_argument("--runs", type=int, default=5, help="best of how many")
    parser.add_argument("--quick", action="store_true", help="small sizes, best of two: does it run at all")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here; - for stdout")
    parser.add_argument("--picture", metavar="FILE", help="draw the ratios here, as PNG")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size, arguments.big, arguments.runs = min(arguments.size, 64), min(arguments.big, 256), min(arguments.runs, 2)
    parts = set(arguments.only or PARTS)

    base = Path(tempfile.mkdtemp(prefix="stepfs-bench-", dir=arguments.dir))
    needed = 2 * arguments.size + 7 * arguments.big if parts & {"cold", "memory"} else 7 * arguments.size
    free = shutil.disk_usage(base).free // MB
    if free < needed:
        base.rmdir()
        sys.exit(f"bench.py: needs about {needed} MB in {base.parent}, {free} MB are free. Try --dir, --size, --big or --quick")
    plain = base / "plain"
    plain.mkdir()
    harness.BIN = arguments.stepfs
    daemon, results = Daemon(base), []
    try:
        if parts - {"codec"}:
            daemon.mount()
            for name, part in (("save", bench_save), ("again", bench_again), ("load", bench_load), ("writes", bench_writes),
                               ("chain", bench_chain), ("cold", bench_cold)):
                if name in parts or (name == "cold" and "memory" in parts):
                    print(f"measuring {name} ...", file=sys.stderr, flush=True)
                    found = part(daemon, plain, arguments)
                    results += found if isinstance(found, list) else [found]
        if "codec" in parts:
            print("measuring codec ...", file=sys.stderr, flush=True)
            results += bench_codec(arguments)
    finally:
        daemon.close()
        if left := harness.mounts_below(base):
            sys.exit(f"bench.py: {left} could not be unmounted; files left in {base}")
        shutil.rmtree(base)
    report = {"revision": revision(), "processor": processor(), "cores": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__, "runs": arguments.runs, "results": results}
    if arguments.json == "-":
        print(json.dumps(report, indent=2))
    else:
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
        print("\n".join(table(results)))
    if arguments.picture:
        import bench_picture  # scripts/bench.sh installs matplotlib for it

        bench_picture.draw(report, arguments.picture)


if __name__ == "__main__":
    main()
