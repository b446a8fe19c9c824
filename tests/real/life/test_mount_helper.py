"""Mounting as mount(8), /etc/fstab and systemd do."""

import contextlib
import fcntl
import os
import re
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest
from harness import BIN, Mount, is_mounted, run, wait_dead, wait_until
from series import save_walk

pytestmark = pytest.mark.stepfs
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mount(8) looks for its helpers in /sbin only")

# Exit codes of mount(8).
DONE, WRONG_USAGE, FAILED = 0, 1, 32


@pytest.fixture
def mounted(plain):
    """A mounted store, to be mounted again in other ways."""
    mount = Mount(plain)
    try:
        yield mount.mount()
    finally:
        mount.close()


@pytest.fixture
def kind():
    """A file system type whose helper is this program. Its name is new, because other tests on the machine have their own."""
    kind = f"t{os.getpid()}.mount.stepfs"
    link = Path(f"/sbin/mount.{kind}")
    link.symlink_to(BIN)
    try:
        yield kind
    finally:
        link.unlink()


def source_and_options(point):
    for line in Path("/proc/mounts").read_text().splitlines():
        source, there, kind, options = line.split()[:4]
        if there == os.path.realpath(point):
            assert kind == "fuse.stepfs"
            return source.encode().decode("unicode_escape"), options.split(",")
    raise AssertionError(f"nothing is mounted at {point}")


def helper(*arguments):
    """The command line that mount(8) uses."""
    words = [BIN, "mount.stepfs", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)


def mount8(*arguments):
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)


def serve_again(mount):
    """Cleans up a mount that the harness did not make."""
    mount.pid = mount.find_daemon()
    assert is_mounted(mount.dir)


@contextlib.contextmanager
def locked(store):
    """This process holds the store's lock, and mounts nothing."""
    with open(store / "lock", "r+") as lock:
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


@needs_root
def test_mount_by_type(mounted, kind):
    mounted.umount()
    done = mount8("-t", kind, mounted.store, mounted.dir, "-o", "noatime,noexec,memory=64M,profile=compact,user,nofail,x-any=1")
    assert done.returncode == DONE, done.stderr
    serve_again(mounted)
    source, options = source_and_options(mounted.dir)
    assert source == str(mounted.store)
    assert {"rw", "noatime", "noexec", "nosuid", "nodev"} <= set(options) and "allow_other" not in options
    (mounted / "file").write_text("written")
    assert 'default_profile = "compact"' in (mounted.store / "stepfs.toml").read_text()
    subprocess.run(["umount", mounted.dir], check=True)
    wait_dead(mounted.pid)
    assert (mounted.store / "tree/file").read_text() == "written"


@needs_root
def test_a_line_of_fstab(mounted, kind):
    mounted.umount()
    fstab = mounted.base / "fstab"
    fstab.write_text(f"{mounted.store} {mounted.dir} {kind} defaults,nofail,allow_other,no_passthrough,x-systemd.automount 0 0\n")
    done = mount8("-T", fstab, mounted.dir)
    assert done.returncode == DONE, done.stderr
    serve_again(mounted)
    assert "allow_other" in source_and_options(mounted.dir)[1]
    # By its source mount(8) knows that it is mounted.
    again = mount8("-T", fstab, "-a", "-v")
    assert again.returncode == DONE and "already mounted" in again.stdout + again.stderr, again


@needs_root
def test_read_only(mounted, kind):
    save_walk(mounted.dir, 2, seed=7)
    before = (mounted / "step_0002.pt").read_bytes()
    mounted.umount()
    assert mount8("-r", "-t", kind, mounted.store, mounted.dir).returncode == DONE
    serve_again(mounted)
    assert "ro" in source_and_options(mounted.dir)[1]
    with pytest.raises(OSError, match="Read-only"):
        (mounted / "file").write_text("refused")
    assert (mounted / "step_0002.pt").read_bytes() == before


@needs_root
def test_a_wrong_option_is_named_by_mount(mounted, kind):
    mounted.umount()
    done = mount8("-t", kind, mounted.store, mounted.dir, "-o", "noatime,profil=compact")
    assert done.returncode == WRONG_USAGE and "unknown option profil;" in done.stderr, done
    assert not is_mounted(mounted.dir)
    done = mount8("-s", "-t", kind, mounted.store, mounted.dir, "-o", "noatime,profil=compact")
    assert done.returncode == DONE, done.stderr
    serve_again(mounted)


@pytest.mark.parametrize("options,name", [("alow_other", "alow_other"), ("remount,ro", "remount"), ("memory=lots", "memory"),
                                          ("profile=perfect", "perfect"), ("allow_other=yes", "allow_other"), ("log", "log=")])
def test_what_is_wrong_with_an_option_is_said(plain, options, name):
    done = helper(plain / "store", plain, "-o", options)
    assert done.returncode == WRONG_USAGE and name in done.stderr and "panicked" not in done.stderr, done
    assert os.listdir(plain) == []


def test_wrong_usage_has_mounts_exit_code(plain):
    for arguments in [(), (plain,), (plain, plain, "-x"), (plain, plain, "-t", "ext4")]:
        done = helper(*arguments)
        assert done.returncode == WRONG_USAGE and done.stderr, done
    assert helper("--help").returncode == DONE


def test_nothing_is_made_where_a_disk_may_be_missing(plain):
    """At boot a missing directory usually means that its file system is not mounted."""
    (plain / "mnt").mkdir()
    done = helper(plain / "store", plain / "mnt")
    assert done.returncode == FAILED and "no stepfs store" in done.stderr, done
    done = helper(plain / "store", plain / "none", "-o", "create")
    assert done.returncode == FAILED and "mkdir" in done.stderr, done
    assert os.listdir(plain) == ["mnt"] and os.listdir(plain / "mnt") == []
    mount = Mount(plain)
    try:
        done = helper(mount.store, mount.dir, "-o", "create")
        assert done.returncode == DONE, done.stderr
        serve_again(mount)
    finally:
        mount.close()


def test_fake_mounts_nothing(mounted):
    mounted.umount()
    done = helper(mounted.store, mounted.dir, "-fv")
    assert done.returncode == DONE and "would mount" in done.stdout and not is_mounted(mounted.dir)


@pytest.mark.parametrize("name", ["a store", "a,store\\040"])
def test_the_source_is_the_store_whatever_its_name(plain, name):
    mount = Mount(plain, store=plain / name)
    try:
        run("mount", mount.store, mount.dir, "-o", "noexec")
        serve_again(mount)
        source, options = source_and_options(mount.dir)
        assert source == str(mount.store) and "noexec" in options
    finally:
        mount.close()


def test_mount_right_after_umount(mounted):
    """umount(8) returns before the daemon has ended; the next mount waits for it."""
    for seed in range(4):
        names = save_walk(mounted.dir, 4, seed=20 + seed)
        newest = (mounted / names[-1]).read_bytes()
        before = mounted.pid
        if os.geteuid() == 0:
            subprocess.run(["umount", mounted.dir], check=True)
        else:
            subprocess.run(["fusermount3", "-u", mounted.dir], check=True)
        run("mount", mounted.store, mounted.dir)
        wait_dead(before)
        serve_again(mounted)
        assert (mounted / names[-1]).read_bytes() == newest


def test_a_daemon_that_still_works_is_waited_for(mounted):
    mounted.umount()
    process = None
    with locked(mounted.store):
        process = subprocess.Popen([BIN, "mount", str(mounted.store), str(mounted.dir)], stderr=subprocess.PIPE, text=True)
        line = process.stderr.readline()
        assert re.search(rf"waiting for process {os.getpid()}\b.*{mounted.store}.*at most \d+ s", line), line
        time.sleep(1.5)
        assert process.poll() is None and not is_mounted(mounted.dir)
    assert process.wait(60) == DONE, process.stderr.read()
    serve_again(mounted)


@pytest.mark.waits
def test_the_wait_ends(mounted):
    mounted.umount()
    with locked(mounted.store):
        began = time.monotonic()
        done = helper(mounted.store, mounted.dir)
        assert done.returncode == FAILED and "waited 30 s" in done.stderr and "in use by process" in done.stderr, done
        assert time.monotonic() - began > 30


def test_a_store_that_is_mounted_is_refused_at_once(mounted, plain):
    (plain / "other").mkdir()
    began = time.monotonic()
    done = helper(mounted.store, plain / "other")
    assert done.returncode == FAILED and f"in use by process {mounted.pid}" in done.stderr, done
    assert "waiting" not in done.stderr and time.monotonic() - began < 20


@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
def test_systemd_is_told_when_the_mount_stands(mounted, abstract):
    mounted.umount()
    name = f"stepfs-test-{os.getpid()}" if abstract else str(mounted.base / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}" if abstract else name)
        manager.settimeout(60)
        environment = {**os.environ, "NOTIFY_SOCKET": f"@{name}" if abstract else name}
        process = subprocess.Popen([BIN, *map(str, mounted.arguments()), "--foreground"], env=environment, stderr=subprocess.DEVNULL)
        mounted.pid = process.pid
        try:
            assert manager.recv(100) == b"READY=1" and is_mounted(mounted.dir)
        finally:
            process.terminate()
            assert process.wait(60) == DONE
    assert not is_mounted(mounted.dir)


def test_the_unit_is_one(plain):
    unit = Path(__file__).resolve().parents[3] / "packaging/stepfs@.service"
    text = unit.read_text()
    assert "Type=notify" in text and "${STORE} ${DIR}" in text
    command = re.search(r"(?m)^ExecStart=/usr/bin/stepfs (.*)$", text)[1]
    mount = Mount(plain)
    words = command.replace("$OPTIONS", "--memory 64M").replace("${STORE}", str(mount.store)).replace("${DIR}", str(mount.dir)).split()
    process = subprocess.Popen([BIN, *words], stderr=subprocess.DEVNULL)
    mount.pid = process.pid
    try:
        wait_until(lambda: is_mounted(mount.dir), 30, "mounted")
        threading.Timer(0.1, process.terminate).start()
        assert process.wait(60) == DONE
    finally:
        mount.close()
