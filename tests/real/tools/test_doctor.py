"""`stepfs doctor`: its findings on this machine, and on file systems that lack something."""

import json
import os
import re
import shutil
import signal
import subprocess

import pytest
from harness import BIN, FAILURE, OK, run

pytestmark = pytest.mark.stepfs
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems and drops capabilities")


def doctor(*arguments, code=OK):
    done = run("doctor", "--json", *arguments, check=False)
    assert done.returncode == code, done
    return {finding["check"]: finding for finding in json.loads(done.stdout)}


def levels(found, *checks):
    return [found[check]["level"] for check in checks]


def test_a_machine_that_runs_these_tests_is_well():
    found = doctor()
    assert not [finding for finding in found.values() if finding["level"] == "problem"]
    assert levels(found, "kernel", "/dev/fuse", "fusermount3") == ["ok"] * 3
    release = os.uname().release
    assert release in found["kernel"]["says"]
    lines = run("doctor").stdout.splitlines()
    assert len(lines) == len(found) and all(re.match(r"(ok|warning|problem) +\S", line) for line in lines)
    # Each problem has its fix.
    assert all(("; fix: " in line) != line.startswith("ok") for line in lines)


def test_a_mount_and_its_store_are_known(mount):
    for path in (mount.dir, mount.store):
        found = doctor(path)
        assert found["store"]["level"] == "ok" and str(mount.store) in found["store"]["says"]
        assert levels(found, "durability", "locks") == ["ok"] * 2
    assert f"mounted at {mount.dir}" in doctor(mount.dir)["store"]["says"]
    assert "in use" in doctor(mount.store)["store"]["says"]
    assert os.listdir(mount.store / "tmp") == []
    mount.umount()
    assert "not in use" in doctor(mount.store)["store"]["says"]


def test_the_words_on_passthrough_are_true(mount):
    """The daemon's log says when it works without passthrough."""
    (mount / "file").write_text("opened")
    without = "without kernel passthrough" in mount.log_tail() or "no FUSE passthrough" in mount.log_tail()
    assert (doctor(mount.dir)["passthrough"]["level"] == "warning") == without


def test_a_place_for_a_store(plain):
    (plain / "full").mkdir()
    (plain / "full/file").write_text("mine")
    assert "creates it" in doctor(plain / "none/deeper")["store"]["says"]
    (plain / "empty").mkdir()
    assert doctor(plain / "empty")["store"]["level"] == "ok" and os.listdir(plain / "empty") == []
    assert doctor(plain / "full")["store"]["level"] == "warning" and os.listdir(plain / "full") == ["file"]


def test_a_dead_mount_is_a_problem(mount):
    mount.kill(signal.SIGKILL)
    found = doctor(mount.dir, code=FAILURE)
    assert found["store"]["level"] == "problem" and "stepfs umount" in found["store"]["mend"]


def test_a_store_that_cannot_be_read_is_a_problem(mount):
    mount.umount()
    (mount.store / "stepfs.toml").write_text("format = [\n")
    assert doctor(mount.store, code=FAILURE)["store"]["level"] == "problem"


def test_others_who_may_change_the_store_are_named(plain):
    (plain / "open").mkdir()
    os.chmod(plain / "open", 0o777)
    found = doctor(plain / "open/store")["owners"]
    assert found["level"] == "warning" and f"go-w {plain}/open" in found["mend"]


@needs_root
def test_file_systems_that_lack_something(plain):
    disk = plain / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=20", "tmpfs", disk], check=True)
    try:
        found = doctor(disk / "store")
        assert levels(found, "file system", "room", "inodes") == ["warning"] * 3 and "tmpfs" in found["file system"]["says"]
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert "remount,rw" in doctor(disk / "store", code=FAILURE)["writing"]["mend"]
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        with pytest.raises(OSError):
            (disk / "fills").write_bytes(b"x" * (5 << 20))
        assert doctor(disk / "store", code=FAILURE)["room"]["level"] == "problem"
    finally:
        subprocess.run(["umount", disk], check=True)


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv drops the capability")
def test_without_privileges(plain):
    (plain / "bin").mkdir()
    command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", BIN, "doctor", "--json", str(plain)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert levels(found, "privileges", "passthrough") == ["warning"] * 2 and "CAP_SYS_ADMIN" in found["passthrough"]["says"]
    # Nothing can mount, so no package is named that could not help.
    assert "fusermount3" not in found and done.returncode == FAILURE and found["mount"]["level"] == "problem" and "--cap-add SYS_ADMIN" in found["mount"]["mend"]
    # A user could mount by fusermount3, were it there.
    os.chmod(plain, 0o777)
    without = [shutil.which("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups", *command[3:]]
    done = subprocess.run(without, capture_output=True, text=True, env={**os.environ, "PATH": f"{plain}/bin"})
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == FAILURE and "fuse3" in found["fusermount3"]["mend"]


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv drops the capability")
def test_files_of_others_without_the_capability(plain):
    """Without CAP_LEASE root asks as the owner of a file. Without CAP_SETUID, too, it cannot, and says so."""
    level = lambda lost: {finding["check"]: finding for finding in json.loads(subprocess.run(
        ["setpriv", f"--bounding-set={lost}", f"--inh-caps={lost}", BIN, "doctor", "--json", str(plain)], capture_output=True,
        text=True).stdout)}["others"]["level"]  # fmt: skip
    assert level("-lease") == "ok" and level("-lease,-setuid") == "warning"


def test_limits_are_told():
    said = subprocess.run(["bash", "-c", f"ulimit -n 1000; '{BIN}' doctor --json"], capture_output=True, text=True).stdout
    found = {finding["check"]: finding for finding in json.loads(said)}
    assert found["open files"]["level"] == "warning" and "1000" in found["open files"]["says"]
