"""An ordinary user's mount: the kernel reads and writes by itself where a helper registers files, and the daemon where none does."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import BIN, LET_GO, copy_helper, is_alive, open_files, wait_dead, wait_until

NOBODY = 65534
pytestmark = [
    pytest.mark.stepfs,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes a mount namespace, and becomes another user"),
    pytest.mark.skipif(shutil.which("setcap") is None, reason="setcap gives the helper its capability"),
]

# Opens a file, stops the daemon, and reads past the page cache. Prints "kernel" if that works without the daemon.
WHO_SERVES = """
import mmap, os, signal, sys, threading, time
path, daemon = sys.argv[1], int(sys.argv[2])
fd = os.open(path, os.O_RDWR | os.O_DIRECT)
aligned = mmap.mmap(-1, 4096)
got = []
reader = threading.Thread(target=lambda: got.append(os.preadv(fd, [aligned], 1 << 20)), daemon=True)
tasks = f"/proc/{daemon}/task"
is_stopped = lambda task: open(f"{tasks}/{task}/stat").read().rpartition(")")[2].split()[0] == "T"
os.kill(daemon, signal.SIGSTOP)
try:
    # A thread that runs on another core may answer until then.
    while not all(map(is_stopped, os.listdir(tasks))):
        time.sleep(0.01)
    reader.start()
    reader.join(3)
    print("kernel" if got else "daemon", flush=True)
finally:
    os.kill(daemon, signal.SIGCONT)
reader.join()
assert got == [4096]
os.close(fd)
"""


class Ordinary:
    """A mount namespace in which all users may open /dev/fuse, and a user's store, mount and programs in it."""

    def __init__(self, base):
        self.base = base
        base.chmod(0o755)
        node = base / "fuse"
        begin = f"mknod -m 666 '{node}' c 10 229 && mount --bind '{node}' /dev/fuse && echo ready && exec sleep infinity"
        self.holder = subprocess.Popen(["unshare", "-m", "sh", "-c", f"{LET_GO}; {begin}"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert self.holder.stdout.readline() == b"ready\n"
        self.own = base / "nobody"
        self.own.mkdir()
        os.chown(self.own, NOBODY, NOBODY)
        self.store, self.dir = self.own / "store", self.own / "mnt"
        self.helper = copy_helper(base)

    def run(self, *command, user=NOBODY, helper=True, check=True):
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        environment = {**os.environ, "STEPFS_PASSTHROUGH": str(self.helper if helper else self.base / "none")}
        done = subprocess.run(["nsenter", "-m", "-t", str(self.holder.pid), "--", *become, *map(str, command)], env=environment,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done

    def processes(self, name):
        """Processes of this name that work for this store, or have this helper."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    exe = os.readlink(entry / "exe")
                except OSError:
                    continue
                if Path(exe).name == name and (exe == str(self.helper) or str(self.store).encode() in words):
                    yield int(entry.name)

    def daemon(self):
        [pid] = [pid for pid in self.processes("stepfs") if b"--child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return pid

    def who_serves(self, path):
        return self.run(sys.executable, "-c", WHO_SERVES, path, self.daemon()).stdout.strip()

    def served(self):
        """The words of `stepfs status` on who serves, in its text and its JSON."""
        [line] = [line for line in self.run(BIN, "status", self.dir).stdout.splitlines() if line.startswith("served ")]
        return line.removeprefix("served     "), json.loads(self.run(BIN, "status", "--json", self.dir).stdout)["serving"]

    def write(self, name, count=2 << 20):
        content = os.urandom(count)
        (self.base / "content").write_bytes(content)
        self.run("cp", self.base / "content", self.dir / name)
        return content

    def log(self):
        return (self.store / "daemon.log").read_text()

    def close(self):
        if list(self.processes("stepfs")):
            daemon = self.daemon()
            self.run(BIN, "umount", self.dir)
            wait_dead(daemon)
        self.holder.kill()
        self.holder.wait()


@pytest.fixture
def ordinary(plain):
    made = Ordinary(plain)
    yield made
    made.close()


def test_with_a_helper_the_kernel_reads_and_writes_a_users_files(ordinary):
    ordinary.run(BIN, "mount", ordinary.store, ordinary.dir)
    content = ordinary.write("file")
    assert ordinary.who_serves(ordinary.dir / "file") == "kernel", ordinary.log()
    assert ordinary.run("cmp", ordinary.base / "content", ordinary.dir / "file").returncode == 0
    assert "without kernel passthrough" not in ordinary.log()
    # A file that is open for reading only is served by the daemon; others go on.
    ordinary.run("sh", "-c", f"cp '{ordinary.base}/content' '{ordinary.dir}/closed' && chmod 444 '{ordinary.dir}/closed'")
    assert ordinary.run("cmp", ordinary.base / "content", ordinary.dir / "closed").returncode == 0
    assert ordinary.who_serves(ordinary.dir / "file") == "kernel"
    assert len(content) == 2 << 20
    assert "registered by stepfs-passthrough" in ordinary.run(BIN, "doctor", ordinary.store, check=False).stdout
    assert ordinary.served() == ("by the kernel, with the helper stepfs-passthrough, at the speed of the disk", {"by": "helper"})


def test_without_a_helper_the_daemon_does(ordinary):
    ordinary.run(BIN, "mount", ordinary.store, ordinary.dir, helper=False)
    # Already before a program opens a file.
    text, serving = ordinary.served()
    assert serving == {"by": "daemon", "because": "it needs CAP_SYS_ADMIN, or the package stepfs-passthrough"}
    assert text == f"by the daemon: writes take 2 to 20 times as long as on the disk. {serving['because']}"
    ordinary.write("file")
    assert ordinary.who_serves(ordinary.dir / "file") == "daemon"
    assert ordinary.log().count("without kernel passthrough") == 1
    assert "install the package stepfs-passthrough" in ordinary.run(BIN, "doctor", helper=False, check=False).stdout


def test_a_killed_helper_costs_speed_and_nothing_else(ordinary):
    ordinary.run(BIN, "mount", ordinary.store, ordinary.dir)
    ordinary.write("file")
    read = "import sys; f = open(sys.argv[1], 'r+b'); print('open', flush=True); sys.stdin.read(); sys.stdout.buffer.write(f.read())"
    inside = ["nsenter", "-m", "-t", str(ordinary.holder.pid), "--", "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    program = subprocess.Popen([*inside, sys.executable, "-c", read, ordinary.dir / "file"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout.readline() == b"open\n"
    [helper] = ordinary.processes("stepfs-passthrough")
    os.kill(helper, signal.SIGKILL)
    after = ordinary.write("after")
    assert ordinary.run("cmp", ordinary.base / "content", ordinary.dir / "after").returncode == 0 and after
    out, _ = program.communicate(b"")
    assert len(out) == 2 << 20
    assert ordinary.log().count("without kernel passthrough") == 1
    wait_until(lambda: ordinary.who_serves(ordinary.dir / "after") == "daemon", 10, "the daemon serves")
    assert ordinary.served()[1]["because"].startswith("the passthrough helper does not answer")


def test_a_killed_daemon_loses_nothing_and_its_helper_ends(ordinary):
    ordinary.run(BIN, "mount", ordinary.store, ordinary.dir)
    content = ordinary.write("file")
    write = "import os, sys; f = open(sys.argv[1], 'wb', 0); f.write(b'safe' * 100000); os.fsync(f); print(f.fileno(), flush=True); sys.stdin.read()"
    inside = ["nsenter", "-m", "-t", str(ordinary.holder.pid), "--", "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    program = subprocess.Popen([*inside, sys.executable, "-c", write, ordinary.dir / "open"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout.readline()
    assert ordinary.served()[1] == {"by": "helper"}
    daemon, helpers = ordinary.daemon(), list(ordinary.processes("stepfs-passthrough"))
    os.kill(daemon, signal.SIGKILL)
    wait_dead(daemon)
    wait_until(lambda: not any(map(is_alive, helpers)), 10, "the helper ends with its daemon")
    ordinary.run(BIN, "mount", ordinary.store, ordinary.dir)
    program.communicate(b"")
    assert ordinary.served()[1] == {"by": "helper"}
    for name, bytes_ in (("file", content), ("open", b"safe" * 100000)):
        (ordinary.base / "content").write_bytes(bytes_)
        assert ordinary.run("cmp", ordinary.base / "content", ordinary.dir / name).returncode == 0
    ordinary.run(BIN, "verify", ordinary.store)


def test_root_mounts_for_a_user_at_the_disks_speed(ordinary):
    ordinary.dir.mkdir()
    os.chown(ordinary.dir, NOBODY, NOBODY)
    ordinary.run(BIN, "mount", ordinary.store, ordinary.dir, "-o", "user=nobody", user=0, helper=False)
    daemon = ordinary.daemon()
    status = Path(f"/proc/{daemon}/status").read_text()
    assert f"Uid:\t{NOBODY}\t{NOBODY}\t{NOBODY}\t{NOBODY}" in status and "CapPrm:\t0000000000000000" in status
    assert ordinary.store.stat().st_uid == NOBODY
    ordinary.write("file")
    assert ordinary.who_serves(ordinary.dir / "file") == "kernel", ordinary.log()
    helpers = [pid for pid in ordinary.processes("stepfs") if pid != daemon]
    ordinary.run(BIN, "umount", ordinary.dir)
    wait_dead(daemon)
    wait_until(lambda: not any(map(is_alive, helpers)), 10, "the helper ends with its daemon")


def test_nothing_of_root_reaches_the_daemon_of_a_user(ordinary):
    """Root's shell may have secrets in its environment, and open files."""
    ordinary.dir.mkdir()
    os.chown(ordinary.dir, NOBODY, NOBODY)
    secret = ordinary.base / "secret"
    secret.write_text("root's")
    secret.chmod(0o600)
    with open(secret) as opened:
        inside = ["nsenter", "-m", "-t", str(ordinary.holder.pid), "--", BIN, "mount", ordinary.store, ordinary.dir, "-o", "user=nobody"]
        subprocess.run(list(map(str, inside)), env={**os.environ, "SECRET": "root's"}, pass_fds=[opened.fileno()], stdin=subprocess.DEVNULL, check=True)
    daemon = ordinary.daemon()
    processes = list(ordinary.processes("stepfs"))
    assert len(processes) == 2, "the daemon, and its helper"
    for pid in processes:
        assert str(secret) not in open_files(pid)
    names = {line.split(b"=")[0].decode() for line in Path(f"/proc/{daemon}/environ").read_bytes().split(b"\0") if line}
    assert names <= {"PATH", "LANG", "LC_ALL", "TZ", "RUST_LOG", "NOTIFY_SOCKET"}
    # Its number, name, state, parent, group, session, and terminal.
    words = Path(f"/proc/{daemon}/stat").read_text().split()
    assert words[5:7] == [str(daemon), "0"]


def test_only_root_mounts_for_another_user_and_only_for_one_that_there_is(ordinary):
    done = ordinary.run(BIN, "mount", ordinary.store, ordinary.dir, "-o", "user=root", check=False)
    assert done.returncode == 1 and "only root can mount for another user" in done.stderr
    done = ordinary.run(BIN, "mount", ordinary.store, ordinary.dir, "-o", "user=nosuch", user=0, check=False)
    assert done.returncode == 1 and "user=nosuch: there is no such user" in done.stderr
    assert not ordinary.store.exists()
