"""Drive the stepfs binary: a store, a mount on it, and the answers of its commands."""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tools"))
# The program that `cargo build` and `cargo test` make; also for processes that a test starts.
BIN = os.environ.setdefault("STEPFS_BIN", str(ROOT / "target/debug/stepfs"))
# The checked helper for passthrough.
HELPER = Path(os.environ.get("STEPFS_PASSTHROUGH", Path(BIN).parent / "stepfs-passthrough"))
# With STEPFS_TEST_PLAIN=1 the "mount" is a plain directory: checks the tests' own programs, not stepfs.
PLAIN = bool(os.environ.get("STEPFS_TEST_PLAIN"))

# tools/read_store.py reads so many bytes that a test leaves on its mount: it takes seconds for a megabyte. frameworks/conftest.py
# sets it.
SECOND_READER = 0

OK, FAILURE, USAGE, DAMAGE = 0, 1, 2, 3


def run(*args, check=True, timeout=180, text=True):
    """`stepfs ARGS...`; with `check`, any exit code but 0 fails the test with the command's output."""
    done = subprocess.run([BIN, *map(str, args)], stdin=subprocess.DEVNULL, capture_output=True, text=text, timeout=timeout)
    if check and done.returncode != OK:
        raise AssertionError(f"stepfs {' '.join(map(str, args))}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def run_json(*args, **options):
    return json.loads(run(*args, **options).stdout)


def shell(command, cwd=None, check=True):
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=300)
    if check and done.returncode != 0:
        raise AssertionError(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def mounts_below(path):
    """Mount points at or below a path, the deepest first. Also dead ones, whose daemon is gone."""
    path = os.path.realpath(path)
    points = (line.split()[4].encode().decode("unicode_escape") for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return sorted((p for p in points if p == path or p.startswith(path + "/")), reverse=True)


def is_mounted(path):
    return os.path.realpath(path) in mounts_below(path)


def is_alive(pid):
    """A killed process counts, too, while some of its threads are in a call to the device: it holds its locks until they return."""
    try:
        states = [(task / "stat").read_text().rsplit(")", 1)[1].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        # It is gone, or a thread of it has just ended.
        return os.path.exists(f"/proc/{pid}/task") and is_alive(pid)
    return any(state not in "ZX" for state in states)


def open_files(pid):
    """What a process has open. Descriptors come and go meanwhile."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(descriptor))
    return found


# A busy machine takes so many times as long; a test that fails then has found nothing.
PATIENCE = 3


def wait_until(condition, timeout, what):
    """Waits for a condition that takes `timeout` seconds at most on an idle machine."""
    end = time.monotonic() + PATIENCE * timeout
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {PATIENCE} times {timeout} s: {what}")
        time.sleep(0.02)


# A new mount namespace has copies of all mounts, also of tests that run beside this one, and would hold them.
LET_GO = "umount --all --lazy --types fuse.stepfs || true"


def copy_helper(folder):
    """A copy of the helper with its capability, where an ordinary user reaches it."""
    copy = shutil.copy(HELPER, folder)
    subprocess.run(["setcap", "cap_sys_admin=ep", copy], check=True)
    return Path(copy)


def as_ordinary_user(base, command, helper=None):
    """Runs a shell command in `base` as a user without privileges, who has a /dev/fuse, and `helper` for passthrough. Its mounts are
    seen by it alone."""
    os.chmod(base, 0o777)
    if os.geteuid() != 0:
        return shell(command, cwd=base)
    device = Path(base) / "fuse"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(10, 229))
    os.chmod(device, 0o666)
    script = f"{LET_GO}; mount --bind '{device}' /dev/fuse; cd '{base}'; exec setpriv --reuid 65534 --regid 65534 --clear-groups bash -euc \"$1\""
    done = subprocess.run(["unshare", "--mount", "bash", "-euc", script, "-", command], env={**os.environ, "STEPFS_PASSTHROUGH": str(helper or "/nonexistent")},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def wait_dead(pid, timeout=30):
    wait_until(lambda: not is_alive(pid), timeout, f"daemon {pid} exits")


class Mount:
    """A mounted store. `dir` is the directory for programs, `store` holds the bytes."""

    def __init__(self, base, passthrough=True, store=None):
        self.base = Path(base)
        self.store = Path(store) if store else self.base / "store"
        self.dir = self.base / "mnt"
        self.log = self.base / "stepfs.log"
        self.passthrough = passthrough
        self.pid = None
        self.dir.mkdir(parents=True, exist_ok=True)

    def __truediv__(self, name):
        return self.dir / name

    # --- life of the daemon

    def arguments(self):
        return ["mount", self.store, self.dir, "--log", self.log, *([] if self.passthrough else ["--no-passthrough"])]

    def mount(self):
        run(*self.arguments())
        assert is_mounted(self.dir), "mount returned, but nothing is mounted"
        self.pid = self.find_daemon()
        return self

    def find_daemon(self):
        """The process whose command line names this mount; a background daemon has no other name."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if b"mount" in words and os.fsencode(os.path.realpath(self.dir)) in words and is_alive(int(entry.name)):
                    return int(entry.name)
        raise AssertionError(f"no daemon serves {self.dir}")

    def umount(self):
        run("umount", self.dir)
        assert not is_mounted(self.dir), "umount returned, but the mount is still there"
        wait_dead(self.pid)
        self.pid = None

    def remount(self):
        self.umount()
        return self.mount()

    def kill(self, how=signal.SIGKILL):
        os.kill(self.pid, how)
        wait_dead(self.pid)

    def close(self):
        """For teardown: no mount and no daemon stays, whatever the test did."""
        if is_mounted(self.dir):
            try:
                subprocess.run([BIN, "umount", str(self.dir)], capture_output=True, timeout=60)
            except (OSError, subprocess.TimeoutExpired):
                pass
        for _ in range(5):
            if not is_mounted(self.dir):
                break
            subprocess.run(["umount", "-l", str(self.dir)] if os.geteuid() == 0 else ["fusermount3", "-u", "-z", str(self.dir)],
                           capture_output=True, timeout=60)
        if self.pid and is_alive(self.pid):
            try:
                wait_dead(self.pid, 10)
            except AssertionError:
                os.kill(self.pid, signal.SIGKILL)
        self.pid = None

    # --- answers of stepfs

    def sync(self, timeout=300, mirror=False):
        try:
            run("sync", *(["--mirror"] if mirror else []), self.dir, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"stepfs sync does not end\n{self.what_it_does()}") from None

    def what_it_does(self):
        """For a failure: the daemon's queue, the end of its log, and where each of its threads waits."""
        said = []
        for name in ("queue", "mirror"):
            try:
                said.append(os.getxattr(self.dir, f"user.stepfs.{name}").decode())
            except OSError as error:
                said.append(f"{name}: {error}")
        for task in sorted(Path(f"/proc/{self.pid}/task").iterdir()):
            state = (task / "stat").read_text().rsplit(") ", 1)[-1].split()[0]
            said.append(f"{(task / 'comm').read_text().strip()}: {state}, {(task / 'wchan').read_text()}")
        said += self.log.read_text(errors="replace").splitlines()[-40:]
        return "\n".join(said)

    def ls(self, path=None):
        return run_json("ls", "--json", path or self.dir)

    def entry(self, name):
        """The line of `ls` for one file, by its path below the mount."""
        rows = self.ls()
        found = [row for row in rows if row["path"].removeprefix(str(self.dir)).strip("/") == str(name)]
        assert len(found) == 1, f"{name}: {len(found)} entries in {[row['path'] for row in rows]}"
        return found[0]

    def state(self, name):
        return self.entry(name)["state"]

    def states(self):
        return {row["path"].removeprefix(str(self.dir)).strip("/"): row["state"] for row in self.ls()}

    def released(self):
        return sorted(name for name, state in self.states().items() if state == "released")

    def require_released(self, *names):
        states = self.states()
        late = {name: states.get(str(name)) for name in names if states.get(str(name)) != "released"}
        why = run("why", self.dir / next(iter(late)), check=False).stdout if late else ""
        assert not late, f"not released after sync: {late}\n{why}\n{self.log_tail()}"

    def status(self):
        return run_json("status", "--json", self.dir)

    def tensors(self, name):
        """`inspect --json` of a file in the mount: one dict per tensor."""
        answer = run_json("inspect", "--json", self.dir / name)
        return answer["tensors"] if isinstance(answer, dict) else answer

    def log_tail(self, lines=40):
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(no log)"


class PlainMount(Mount):
    """A plain directory that answers like a mount in which everything was released at no cost."""

    def mount(self):
        self.pid = 0
        return self

    def umount(self):
        pass

    def close(self):
        pass

    def sync(self, timeout=0):
        pass

    def ls(self, path=None):
        files = sorted(p for p in self.dir.rglob("*") if p.is_file() and not p.is_symlink())
        nothing = {"raw_bytes": 1, "stored_bytes": 0}
        roles = dict.fromkeys(("weight", "optimizer", "other", "skeleton"), nothing)
        return [{"path": str(p.relative_to(self.dir)), "state": "released", "logical_bytes": p.stat().st_size, "stored_bytes": 0,
                 "profile": "balanced", "parent": None, "chain_len": 0, "max_abs_error": 0.0, "roles": roles} for p in files]

    def tensors(self, name):
        return []

    def status(self):
        return {"files": len(self.ls()), "logical_bytes": 0, "stored_bytes": 0, "resident_bytes": 0, "queued": 0}


def make_base():
    """Not pytest's tmp_path: it keeps the files of three runs, and these are large."""
    return Path(tempfile.mkdtemp(prefix="stepfs-test-", dir=os.environ.get("STEPFS_TEST_DIR")))


def remove_base(base):
    """Remove a test's files, and first any mount that a failed test left there: never remove through a mount."""
    for _ in range(3):
        for path in mounts_below(base):
            subprocess.run(["umount", "-l", path] if os.geteuid() == 0 else ["fusermount3", "-u", "-z", path], capture_output=True)
    if left := mounts_below(base):
        # Nothing below a mount may be removed, and the next test would meet the same mount.
        import pytest

        pytest.exit(f"{left} could not be unmounted; left as they are", 1)
    shutil.rmtree(base)


def compare_readers(mount, most=1 << 40):
    """The bytes of tools/read_store.py are those of the mount, for each released file, the smallest first, until these are `most` bytes.
    Neither reads the damaged ones as a whole."""
    import read_store

    store = read_store.Store(str(mount.store))
    size = lambda name: (mount.dir / name).stat().st_size
    for name in sorted(mount.released(), key=size):
        most -= size(name)
        if most < 0:
            break
        out = mount.base / "second-reader"
        try:
            missing = read_store.get(store, name, str(out))
        except read_store.Damage:
            missing = -1
        if missing:
            # A test has damaged it.
            damaged = subprocess.run(["cat", str(mount.dir / name)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            assert damaged.returncode != 0, f"the second reader misses parts of {name}"
            out.unlink(missing_ok=True)
            continue
        same = subprocess.run(["cmp", str(out), str(mount.dir / name)], capture_output=True, text=True)
        assert same.returncode == 0, f"the second reader gives other bytes: {same.stdout}{same.stderr}"
        out.unlink()


def open_mount(passthrough):
    mount = (PlainMount if PLAIN else Mount)(make_base(), passthrough)
    try:
        mount.mount()
        yield mount
        if SECOND_READER and is_mounted(mount.dir):
            compare_readers(mount, SECOND_READER)
    finally:
        mount.close()
        remove_base(mount.base)


def verify(store):
    """`stepfs verify`: (exit code, all of its output)."""
    done = run("verify", store, check=False, timeout=300)
    return done.returncode, done.stdout + done.stderr


def require_clean(store):
    code, text = verify(store)
    assert code == OK, f"verify: exit code {code}\n{text}"
    left = lambda: [p.name for p in (Path(store) / "tmp").iterdir()]
    # A mounted store may just be writing its record of reads.
    wait_until(lambda: not left(), 5, f"tmp/ is empty; it has {left()}")


def objects(store):
    return sorted(p for p in (Path(store) / "objects").rglob("*") if p.is_file())


def empty_cache(store):
    for path in (Path(store) / "cache").glob("*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def du(path):
    """Bytes on disk of a file or tree, as du counts."""
    return int(shell(f"du -s --block-size=1 '{path}'").stdout.split()[0])
