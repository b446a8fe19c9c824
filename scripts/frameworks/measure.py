"""One writer: the same training on a mount and in a plain directory, then the same resumes from both."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from job import EVERY, NEWEST, OLD

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests/real/support"))
from harness import BIN, Mount, make_base, remove_base, require_clean, run_json  # noqa: E402

# Below this stepfs lets a file stay as it is.
SMALL = 65536
TIMEOUT = 1200  # seconds for a job that takes half a minute on an idle machine


class Failed(Exception):
    pass


@dataclass
class Row:
    name: str
    failed: str = ""
    versions: dict = field(default_factory=dict)
    formats: list = field(default_factory=list)  # of the files of an old checkpoint, the largest share first
    quantized: float = 0.0  # share of their bytes
    mib: float = 0.0
    stored: float = 0.0  # share of all files of all checkpoints but the newest
    differences: float | None = None  # the same of those that have a released checkpoint before them
    whole: dict = field(default_factory=dict)  # reason: files of old checkpoints that stay whole
    old: list = field(default_factory=list)  # loss after resuming: mount, plain, plain on other batches
    newest: list = field(default_factory=list)  # mount, plain
    rotation: str = ""  # the difference from the plain directory
    log: list = field(default_factory=list)  # warnings of the daemon
    damage: str = ""

    @property
    def is_bad(self):
        return bool(self.failed or self.damage or self.rotation or self.newest[0] != self.newest[1])


class Workers:
    """The processes of one writer, two at a time; none outlives a failure or Ctrl-C."""

    def __init__(self, entry, python, base):
        self.entry, self.python, self.base, self.running = entry, python, base, []

    def start(self, name, tasks):
        spec, result, log = (self.base / f"{name}.{end}" for end in ("spec", "json", "log"))
        spec.write_text(json.dumps({"module": self.entry.module, "variant": self.entry.variant, "packages": self.entry.packages,
                                    "tasks": tasks}))
        launcher = [] if self.entry.ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.entry.ranks)]
        command = [self.python, *launcher, HERE / "worker.py", spec, result]
        with open(log, "wb") as out:
            process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                       start_new_session=True, cwd=self.base,
                                       env={**os.environ, "PATH": f"{Path(self.python).parent}:{os.environ['PATH']}"})
        self.running.append((name, process, result, log))

    def finish(self):
        """{name: result}."""
        found = {}
        try:
            for name, process, result, log in self.running:
                try:
                    code = process.wait(TIMEOUT)
                except subprocess.TimeoutExpired:
                    raise Failed(f"{name}: not done within {TIMEOUT} s") from None
                if code != 0:
                    raise Failed(f"{name}: {said(log)}")
                found[name] = json.loads(result.read_text())
            return found
        finally:
            self.stop()

    def stop(self):
        for _, process, _, _ in self.running:
            # torchrun's processes lead sessions of their own: they are known by the file that they were given.
            while found := processes_of(self.base):
                for pid in found:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                process.poll()
                time.sleep(0.05)
            process.wait()
        self.running = []


def processes_of(base):
    """Those whose command line names a file below `base`, but for the daemon's."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"worker.py" in words and os.fsencode(base) + b"/" in words:
            found.append(int(entry.name))
    return found


def said(log):
    """The error that a worker ended with."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank0\]: *)?[\w.]+(Error|Exception|Exit)\b", line)]
    return (errors or lines or ["it says nothing"])[-1][:300]


def step_of(path, entry):
    """The step that the first component with a number names."""
    for part in Path(path).parts:
        if numbers := re.findall(r"\d+", part):
            return entry.step(int(numbers[-1] if entry.last_number else numbers[0]))
    return None


def names_below(folder):
    """Names as `find` lists them. Orbax gives files random names, and not always as many."""
    return sorted({re.sub(r"[0-9a-f]{32}", "*", str(p.relative_to(folder))) for p in folder.rglob("*")})


def measure(entry, python, keep=None):
    base = make_base()
    row, mount = Row(entry.name), Mount(base / "mounted")
    workers = Workers(entry, python, base)
    try:
        mount.mount()
        folders = {"mount": mount / "run", "plain": base / "plain/run"}
        task = lambda where, at, seed=1: {"folder": str(folders[where]), "at": at, "seed": seed,
                                          "after_save": [BIN, "sync", str(mount.dir)] if where == "mount" else []}
        for where in folders:
            workers.start(f"train-{where}", [task(where, 0)])
        row.versions = workers.finish()["train-mount"]["versions"]
        mount.sync()
        judge_rotation(row, folders)
        judge_files(row, entry, mount)
        # From here on reads come from the store, not from a cache.
        mount.remount()
        workers.start("resume-mount", [task("mount", OLD), task("mount", NEWEST)])
        workers.start("resume-plain", [task("plain", OLD), task("plain", NEWEST), task("plain", OLD, seed=2)])
        found = workers.finish()
        (old, newest), (plain, exact, noise) = found["resume-mount"]["losses"], found["resume-plain"]["losses"]
        row.old, row.newest = [old, plain, noise], [newest, exact]
        mount.umount()
        try:
            require_clean(mount.store)
        except AssertionError as error:
            row.damage = str(error)
    except (Failed, AssertionError, subprocess.SubprocessError, OSError) as error:
        row.failed = str(error)
    finally:
        row.log = warnings_in(mount.log)
        workers.stop()
        mount.close()
        if keep:
            keep_logs(base, keep)
        remove_base(base)
    return row


def judge_rotation(row, folders):
    ours, theirs = (names_below(folder) for folder in folders.values())
    if ours != theirs:
        more, less = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
        row.rotation = "; ".join([*(f"only in the mount: {name}" for name in more[:3]), *(f"only in the directory: {name}" for name in less[:3])])


def judge_files(row, entry, mount):
    files = {}
    for line in mount.ls():
        path = line["path"].removeprefix(str(mount.dir)).strip("/")
        step = step_of(Path(path).relative_to("run"), entry)
        if step and step < NEWEST:
            files[path] = line | {"step": step}
    if not files:
        raise Failed(f"no file names a step: {sorted(names_below(mount / 'run'))[:5]}")
    raw = lambda rows: sum(line["logical_bytes"] for line in rows)
    kept = lambda rows: sum(line["stored_bytes"] for line in rows)
    row.stored = kept(files.values()) / raw(files.values())
    first = min(line["step"] for line in files.values())
    later = [line for line in files.values() if line["step"] > first]
    row.differences = kept(later) / raw(later) if later else None
    row.mib = raw(line for line in files.values() if line["step"] == OLD) / 2**20
    formats, quantized = {}, 0
    for path, line in files.items():
        large = line["logical_bytes"] >= SMALL
        if large and line["state"] != "released":
            seen = run_json("inspect", "--json", mount / path)
            reason = why(mount / path) or seen["note"] or line["state"]
            row.whole.setdefault(f"{Path(path).name}: {reason}" if line["step"] == OLD else reason, []).append(path)
        if line["step"] == OLD:
            seen = run_json("inspect", "--json", mount / path)
            if large:
                formats[seen["container"]] = formats.get(seen["container"], 0) + line["logical_bytes"]
            quantized += sum(t["bytes"] for t in seen["tensors"] if t["codec"] not in ("lossless", None) and t["bound"])
    row.formats = sorted(formats, key=formats.get, reverse=True)
    row.quantized = quantized / (row.mib * 2**20)


def why(path):
    try:
        return os.getxattr(path, "user.stepfs.why").decode()
    except OSError:
        return ""


def warnings_in(log):
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if re.search(r"\b(WARN|ERROR|warn(ing)?|error|cannot|failed)\b", line)]


def keep_logs(base, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*base.glob("*.log"), *base.glob("mounted/*.log")]:
        (folder / path.name).write_bytes(path.read_bytes())
