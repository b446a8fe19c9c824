"""Behaviours that the suite xfstests looks for, on a mount and on a plain directory beside it: generic/422, 633 and 732."""

import errno
import mmap
import os
import subprocess

import pytest
from harness import FAILURE, Mount, run
from series import save_walk

pytestmark = pytest.mark.stepfs
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, and acts as several users")
KIB = 1024


def put(path, byte, at, size, flags=0):
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | flags)
    try:
        with mmap.mmap(-1, size) as buffer:
            buffer.write(bytes([byte]) * size)
            os.pwritev(fd, [buffer], at)
    finally:
        os.close(fd)


def blocks(folder):
    """The blocks of four files before and after their write-back."""
    put(folder / "one", 0xAA, 0, 64 * KIB)
    put(folder / "two", 0xAA, 0, 64 * KIB)
    os.truncate(folder / "two", 128 * KIB)
    put(folder / "three", 0xAA, 0, 4 * KIB)
    os.posix_fallocate(fd := os.open(folder / "three", os.O_WRONLY), 0, 128 * KIB)
    os.close(fd)
    (folder / "four").touch()
    os.sync()
    put(folder / "one", 0xFF, 0, 64 * KIB)
    put(folder / "two", 0xFF, 64 * KIB, 64 * KIB)
    put(folder / "two", 0x20, 64 * KIB, 64 * KIB)
    put(folder / "three", 0xFF, 64 * KIB, 64 * KIB)
    put(folder / "four", 0xAB, 0, 64 * KIB)
    put(folder / "four", 0xEF, 0, 64 * KIB, os.O_DIRECT)
    found = lambda: [(name, os.stat(folder / name).st_blocks) for name in ("one", "two", "three", "four")]
    before = found()
    os.sync()
    return before, found()


def test_blocks_stay_over_write_back(both, plain):
    """generic/422. With its own names, `foo1` to `foo4`, the files count as states of one run: a release shows in the blocks."""
    before, after = blocks(both.dir)
    assert before == after == blocks(plain)[1]
    names = save_walk(both.dir, 3)
    both.sync()
    both.require_released(*names[:-1])
    room = lambda name: os.stat(both / name).st_blocks * 512
    assert room(names[0]) < os.stat(both / names[0]).st_size / 4 and room(names[2]) >= os.stat(both / names[2]).st_size


@needs_root
def test_one_store_at_two_places(mount):
    """generic/732 mounts one device twice. A store has one daemon, and a second place is a bind mount."""
    second = mount.base / "second"
    done = run("mount", mount.store, second, check=False)
    assert done.returncode == FAILURE and f"it is mounted at {mount.dir}: work there" in done.stderr, done.stderr
    second.mkdir()
    subprocess.run(["mount", "--bind", mount.dir, second], check=True)
    try:
        for folder in ("A", "B"):
            (mount / folder).mkdir()
        (mount / "A/f").write_text("x")
        places = [(mount.dir, second), (second, mount.dir)] * 3
        for at, (one, other) in enumerate(places):
            source, target = ("A", "B") if at % 2 == 0 else ("B", "A")
            os.rename(one / source / "f", one / target / "f")
            assert (other / target / "f").read_text() == "x" and not (other / source / "f").exists()
        # Between two mounts, as everywhere.
        for call in (os.rename, os.link):
            with pytest.raises(OSError) as failed:
                call(mount / "A/f", second / "B/f")
            assert failed.value.errno == errno.EXDEV
        names = save_walk(second, 3)
        mount.sync()
        mount.require_released(*names[:-1])
        assert (second / names[0]).read_bytes() == (mount / names[0]).read_bytes()
    finally:
        subprocess.run(["umount", second], check=True)


# As root: what users 1000 and 2000 of group 100 may do to files in a directory, and what becomes of modes and owners.
PERMISSIONS = r"""
cd "$1"; exec 2>&1
as() { u=$1; shift; setpriv --reuid="$u" --regid=100 --clear-groups bash -c "$@" | sed "s,$PWD,.,g"; }
show() { stat -c '%a %u %g %F %n' "$@"; }
for umask in 000 022 077; do
    mkdir -m 777 d$umask; chown 0:50 d$umask; chmod 2777 d$umask
    as 1000 "cd d$umask; umask $umask; touch f; mkdir s; mkfifo p; ln -s f l; chmod 2755 f; mkdir s/t; : > s/t/g"
    show d$umask d$umask/f d$umask/s d$umask/p d$umask/l d$umask/s/t d$umask/s/t/g
done
mkdir -m 1777 sticky; as 1000 'cd sticky; touch own; mkdir dir'; touch sticky/roots; mkdir -m 1777 away
as 2000 'cd sticky; rm -f own; echo $?; rm -f roots; echo $?; rmdir dir; echo $?; mv own other; echo $?; mv own ../away; echo $?'
as 2000 'cd sticky; touch mine; mv mine own; echo $?; mv -T mine dir; echo $?; chmod 777 own; echo $?; ln own link; echo $?'
as 1000 'cd sticky; mv own ../away; echo $?; rm -f mine; echo $?'; show sticky/* away/*
touch cut; chown 1000:1000 cut; chmod 644 cut; echo text > cut
as 2000 'truncate -s 0 cut; echo $?; : > cut; echo $?; touch cut; echo $?; chown 2000 cut; echo $?'
as 1000 'truncate -s 2 cut; echo $?; chgrp 100 cut; echo $?; chmod 6755 cut; chgrp 100 cut; echo $?; chown 2000 cut; echo $?'; show cut
cp /usr/bin/id program; chown 1000:1000 program; chmod 6755 program; show program
as 2000 'setfattr -n user.x -v y cut; echo $?; cat cut; echo $?'; chmod 600 cut; as 2000 'cat cut; echo $?'
"""


@needs_root
@pytest.mark.parametrize("passthrough", [True, False])
def test_permissions_are_those_of_a_plain_directory(plain, passthrough):
    """generic/633, as far as it concerns one mount. It also runs programs with set-id bits, which these mounts ignore (nosuid), and
    mounts with other ids (idmapped), which this kernel offers only to file systems that ask for it."""
    os.chmod(plain, 0o755)
    (plain / "plain").mkdir()
    mount = Mount(plain, passthrough)
    does = lambda folder: subprocess.run(["bash", "-c", PERMISSIONS, "-", folder], capture_output=True, text=True).stdout
    try:
        run(*mount.arguments(), "--allow-other")
        mount.pid = mount.find_daemon()
        wanted, found = does(plain / "plain"), does(mount.dir)
        assert found == wanted and wanted.count("\n") > 50, "\n".join((wanted, "-" * 20, found))
        as_user = ["setpriv", "--reuid=2000", "--regid=2000", "--clear-groups"]
        by = lambda path: subprocess.run([*as_user, path, "-u"], capture_output=True, text=True).stdout.strip()
        assert by(mount / "program") == "2000", "no program of a mount gives privileges"
    finally:
        mount.close()
