"""Stores in bad conditions: read-only, badly copied, wanted by two daemons, under a jumping clock, with hardly any memory. Every
caller gets a true error, nothing is lost, and readable files are served.
"""

import contextlib
import ctypes
import errno
import json
import os
import re
import select
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path

import harness
import pytest
import torch
from harness import BIN, DAMAGE, Mount, require_clean, run, shell, verify, wait_until
from series import bits_equal, difference, save_walk, tensors_of

pytestmark = [pytest.mark.stepfs]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own")


def series(mount, count=4, seed=91):
    """A released series, and the bytes that each of its files reads as."""
    names = save_walk(mount.dir, count, seed=seed)
    mount.sync()
    mount.require_released(*names[:-1])
    return {name: (mount / name).read_bytes() for name in names}


def check(mount, content):
    for name, data in content.items():
        assert (mount / name).read_bytes() == data, name


@needs_root
def test_a_store_on_a_read_only_file_system(plain):
    disk = plain / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True)
    mount = Mount(plain / "base", store=disk / "store")
    try:
        mount.mount()
        content = series(mount)
        mount.umount()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        refused = run(*mount.arguments(), check=False)
        assert refused.returncode == 1 and "Read-only file system" in refused.stderr, refused
        assert not harness.is_mounted(mount.dir)
        # Commands that only read work.
        for name, data in content.items():
            assert run("cat", mount.store, name, text=False).stdout == data
        require_clean(mount.store)
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        mount.mount()
        check(mount, content)
    finally:
        mount.close()
        subprocess.run(["umount", disk], check=True)


@needs_root
def test_what_was_read_leaves_room_for_the_next_save(plain):
    """The cache of decoded files shrinks while a save fills the disk, which no write of the save tells stepfs."""
    disk = plain / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True)
    mount = Mount(plain / "base", store=disk / "store")
    try:
        mount.mount()
        names = save_walk(mount.dir, 8, scale=2)
        mount.sync()
        for _ in range(2):
            for name in names:
                (mount / name).read_bytes()
        free = os.statvfs(disk).f_bavail * 4096
        assert mount.status()["cache_bytes"] > 1 << 20
        # As much as is free, in pieces, as a save writes it.
        with open(mount / "large.bin", "wb") as file:
            for _ in range(0, free - (2 << 20), 1 << 20):
                file.write(b"x" * (1 << 20))
                file.flush()
                time.sleep(0.02)
            os.fsync(file.fileno())
        wait_until(lambda: mount.status()["cache_bytes"] <= os.statvfs(disk).f_bavail * 4096, 10, "the cache shrinks")
    finally:
        mount.close()
        subprocess.run(["umount", disk], check=True)


def disk_that_can_fail(plain):
    """An ext4 of its own that becomes read-only at its first error: its mount point, and a function that causes the error."""
    image, disk = plain / "image", plain / "disk"
    disk.mkdir()
    with open(image, "wb") as file:
        file.truncate(256 << 20)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, disk], check=False).returncode:
        pytest.skip("no loop devices")
    device = next(line.split()[0] for line in open("/proc/mounts") if line.split()[1] == str(disk))
    trigger = Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error")
    return image, disk, lambda: trigger.write_text("1")


@needs_root
def test_a_file_system_that_becomes_read_only_below_a_daemon(plain):
    image, disk, fail = disk_that_can_fail(plain)
    mount = Mount(plain / "base", store=disk / "store")
    try:
        mount.mount()
        content = series(mount)
        newest = list(content)[-1]
        open_file = open(mount / newest, "r+b")
        fail()
        # A writer gets an error, and so does fsync of earlier writes.
        for attempt in (lambda: (mount / "new.pt").write_bytes(b"x" * 100_000), lambda: os.unlink(mount / newest),
                        lambda: os.rename(mount / newest, mount / "renamed.pt"), lambda: os.mkdir(mount / "dir"),
                        lambda: os.fsync(open_file.fileno()), lambda: open(mount / next(iter(content)), "r+b")):  # fmt: skip
            with pytest.raises(OSError) as told:
                attempt()
            assert told.value.errno in (errno.EROFS, errno.EIO), told.value
        open_file.close()
        # Everything can be read, resident and decoded, and the daemon reports its state.
        check(mount, content)
        assert run("status", mount.dir).returncode == 0
        assert sorted(os.listdir(mount.dir)) == sorted(content)
        mount.umount()
        subprocess.run(["umount", disk], check=True)
        assert subprocess.run(["e2fsck", "-fy", image], check=False, capture_output=True).returncode in (0, 1)
        subprocess.run(["mount", "-o", "loop", image, disk], check=True)
        mount.mount()
        check(mount, content)
        save_walk(mount.dir, 2, name="later_{:04d}.pt", seed=92)
        mount.sync()
        require_clean(mount.store)
        check(mount, content)
    finally:
        mount.close()
        subprocess.run(["umount", disk], check=False)


FAN_CLASS_CONTENT, FAN_MARK_ADD, FAN_OPEN_PERM, FAN_DENY = 0x04, 0x01, 0x00010000, 0x02


@contextlib.contextmanager
def unreadable(path):
    """Opening the file is refused, for root too."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.fanotify_init(FAN_CLASS_CONTENT, os.O_RDONLY)
    here = -100  # AT_FDCWD
    if watch < 0 or libc.fanotify_mark(watch, FAN_MARK_ADD, ctypes.c_uint64(FAN_OPEN_PERM), here, os.fsencode(path)):
        pytest.skip("this kernel asks nobody whether a file may be opened")
    asked, over = [0], threading.Event()

    def answer():
        event = struct.Struct("=IBBHQii")
        while not over.is_set():
            if select.select([watch], [], [], 0.05)[0]:
                for *_, opened, _ in event.iter_unpack(os.read(watch, 64 * event.size)):
                    os.write(watch, struct.pack("=iI", opened, FAN_DENY))
                    os.close(opened)
                    asked[0] += 1

    who = threading.Thread(target=answer)
    who.start()
    try:
        yield
        assert asked[0] > 0, "nobody opened it"
    finally:
        over.set()
        who.join()
        # Later opens are allowed.
        os.close(watch)


@needs_root
@pytest.mark.parametrize("then", ["read", "truncate", "truncate to nothing", "write", "rename"])
def test_a_stub_that_cannot_be_read_when_it_is_looked_up(mount, then):
    content = series(mount)
    name = next(iter(content))
    whole = content[name]
    mount.umount()
    path = mount / name
    with unreadable(mount.store / "tree" / name):
        mount.mount()
        # It is listed and shown, and opening it is an error.
        assert name in os.listdir(mount.dir)
        assert [entry.stat().st_size for entry in os.scandir(mount.dir) if entry.name == name] == [len(whole)]
        assert os.stat(path).st_size == len(whole)
        for attempt in (lambda: open(path, "rb"), lambda: open(path, "r+b"), lambda: os.truncate(path, 5000)):
            with pytest.raises(OSError):
                attempt()
    # Once readable, it has its old bytes: stepfs never took the stub for them.
    if then == "truncate":
        os.truncate(path, 5000)
        whole = whole[:5000]
    elif then == "truncate to nothing":
        os.truncate(path, 0)
        whole = b""
    elif then == "write":
        with open(path, "r+b") as file:
            file.write(b"new")
        whole = b"new" + whole[3:]
    elif then == "rename":
        os.rename(path, mount / "renamed.pt")
        name = "renamed.pt"
    check(mount, content | {next(iter(content)): whole} if then != "rename" else {name: whole})
    mount.sync()
    mount.umount()
    mount.mount()
    assert (mount / name).read_bytes() == whole
    require_clean(mount.store)


@needs_root
def test_a_name_whose_inode_is_damaged_is_not_left_out_in_silence(plain):
    image, disk, _ = disk_that_can_fail(plain)
    mount = Mount(plain / "base", store=disk / "store")
    try:
        mount.mount()
        content = series(mount)
        names = list(content)
        mount.umount()
        inode = os.stat(mount.store / "tree" / names[1]).st_ino
        subprocess.run(["umount", disk], check=True)
        where = subprocess.run(["debugfs", "-R", f"imap <{inode}>", image], check=True, capture_output=True, text=True).stdout
        block, offset = (int(word.rstrip(","), 0) for word in re.search(r"block (\d+), offset (0x[0-9a-f]+)", where).groups())
        size = subprocess.run(["dumpe2fs", "-h", image], check=True, capture_output=True, text=True).stdout
        size = int(re.search(r"Block size:\s+(\d+)", size).group(1))
        with open(image, "r+b") as file:
            # Its time of change: the inode's checksum is wrong then.
            file.seek(block * size + offset + 12)
            file.write(b"\xff" * 4)
        subprocess.run(["mount", "-o", "loop,errors=continue", image, disk], check=True)
        with pytest.raises(OSError):
            os.stat(mount.store / "tree" / names[1])
        mount.mount()
        # A shorter list without an error would make a copying program believe that it has everything.
        try:
            assert sorted(os.listdir(mount.dir)) == sorted(names)
        except OSError:
            pass
        with pytest.raises(OSError):
            (mount / names[1]).read_bytes()
        for name in names[0], names[2], names[3]:
            assert (mount / name).read_bytes() == content[name]
    finally:
        mount.close()
        subprocess.run(["umount", disk], check=False)


@needs_root
@pytest.mark.slow
def test_two_daemons_and_one_store(mount, plain):
    content = series(mount)
    other = plain / "other"
    other.mkdir()
    # Here; in another mount namespace; and there under another path, where the store looks like another one.
    here = subprocess.run([BIN, "mount", mount.store, other], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    there = shell(f"unshare -m '{BIN}' mount '{mount.store}' '{other}'", check=False)
    elsewhere = plain / "elsewhere"
    elsewhere.mkdir()
    bound = shell(f"unshare -m bash -c \"mount --bind '{mount.store}' '{elsewhere}' && '{BIN}' mount '{elsewhere}' '{other}'\"",
                  check=False)
    for refused in (here, there, bound):
        assert refused.returncode == 1 and f"in use by process {mount.pid}" in refused.stderr, refused.stderr
    refused = run("import", mount.store, mount.log, check=False)
    assert refused.returncode == 1 and "in use" in refused.stderr, refused.stderr
    check(mount, content)
    mount.umount()
    require_clean(mount.store)


def test_a_store_that_was_copied_without_its_holes(mount, plain):
    content = series(mount)
    mount.umount()
    copied = plain / "copied"
    shell(f"cp -a --sparse=never '{mount.store}' '{copied}'")
    other = Mount(plain / "base", store=copied).mount()
    try:
        check(other, content)
        other.sync()
        check(other, content)
    finally:
        other.close()
    require_clean(copied)


def test_a_store_that_was_copied_without_its_objects(mount, plain):
    content = series(mount)
    mount.umount()
    copied = plain / "copied"
    shell(f"cp -a '{mount.store}' '{copied}'")
    shutil.rmtree(copied / "objects")
    other = Mount(plain / "base", store=copied).mount()
    try:
        *old, newest = content
        assert (other / newest).read_bytes() == content[newest]
        for name in old:
            with pytest.raises(OSError) as error:
                (other / name).read_bytes()
            assert error.value.errno == errno.EIO
        # It continues from there.
        for at in (100, 101):
            shutil.copyfile(other / newest, other / f"again_{at}.pt")
        other.sync()
        assert (other / "again_100.pt").read_bytes() == content[newest]
        # The objects return, and so do the files.
        other.umount()
        assert verify(copied)[0] == DAMAGE
        shell(f"cp -a '{mount.store}/objects/.' '{copied}/objects/'")
        other.mount()
        check(other, content)
    finally:
        other.close()
    require_clean(copied)


def test_a_clock_that_jumps(mount, plain):
    """Files get times of the future and of long ago, in any order: each reads as it was written, within its bound."""
    (plain / "exact").mkdir()
    names = save_walk(plain / "exact", 8, seed=93)
    now = 1_700_000_000
    for at, (name, jump) in enumerate(zip(names, (0, 10**9, 60, -(10**9), 120, 0, -1, 2 * 10**9))):
        shutil.copyfile(plain / "exact" / name, mount / name)
        os.utime(mount / name, (now + at + jump, now + at + jump))
        if at % 3 == 2:
            mount.sync()
    mount.sync()
    before = {name: (mount / name).read_bytes() for name in names}
    mount.remount()
    mount.sync()
    check(mount, before)
    newest = max(names, key=lambda name: os.stat(mount / name).st_mtime)
    assert before[newest] == (plain / "exact" / newest).read_bytes()
    for name in names:
        limit = mount.entry(name)["max_abs_error"] or 0.0
        exact, read = (tensors_of(torch.load(path)) for path in (plain / "exact" / name, mount / name))
        assert all(bits_equal(exact[k], read[k]) or difference(exact[k], read[k]) <= limit for k in exact), name
    mount.umount()
    require_clean(mount.store)


@pytest.mark.parametrize("passthrough", [True, False])
def test_a_limit_of_the_length_of_files(mount, passthrough):
    """A file beyond the daemon's limit is EFBIG at worst. The mount goes on, and says what it cannot do."""
    mount.umount()
    option = "" if passthrough else "--no-passthrough"
    shell(f"ulimit -f 256; '{BIN}' mount {option} '{mount.store}' '{mount.dir}'")
    mount.pid = mount.find_daemon()
    try:
        # A program with no limit. The kernel writes for it, or the daemon.
        for step in (1, 2, 3):
            (mount / f"step-{step}.bin").write_bytes(os.urandom(1 << 20).hex().encode())
        assert passthrough
    except OSError as error:
        assert (error.errno, passthrough) == (errno.EFBIG, False)
    (mount / "small").write_bytes(b"words")
    subprocess.run([BIN, "sync", str(mount.dir)], timeout=60, capture_output=True)
    assert (mount / "small").read_bytes() == b"words"
    if passthrough:
        status = mount.status()
        assert "File too large" in json.dumps([status["stalled"], status["failed"]]), status
    mount.umount()
    # The soft limit alone does not bind it.
    shell(f"ulimit -S -f 256; '{BIN}' mount {option} '{mount.store}' '{mount.dir}'")
    mount.pid = mount.find_daemon()
    for step in (4, 5, 6):
        (mount / f"step-{step}.bin").write_bytes(os.urandom(1 << 20).hex().encode())
    mount.sync()
    assert mount.status()["stalled"] is None


def test_hardly_any_memory(mount):
    """`--memory 0`: every needed state comes from the device, and nothing else changes."""
    mount.umount()
    usual = mount.arguments()
    mount.arguments = lambda: [*usual, "--memory", "0"]
    mount.mount()
    content = series(mount, count=12)
    mount.remount()
    check(mount, content)
    mount.umount()
    require_clean(mount.store)
