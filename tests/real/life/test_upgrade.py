"""The program's file is replaced while its daemon serves a mount: an upgrade, and a way back."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import BIN, OK, wait_dead
from series import save_walk

pytestmark = pytest.mark.stepfs


def other_version(own):
    """The program with another version; nothing else differs."""
    version = subprocess.run([BIN, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1].encode()
    other = bytes([*version[:-1], (version[-1] - ord("0") + 1) % 10 + ord("0")])
    data = Path(BIN).read_bytes()
    assert b"stepfs " + version in data
    own.write_bytes(data.replace(b"stepfs " + version, b"stepfs " + other))
    own.chmod(0o755)
    return other.decode()


@pytest.mark.parametrize("upgrade", [True, False], ids=["upgrade", "downgrade"])
def test_the_daemon_serves_on_when_its_program_is_replaced(plain, upgrade):
    program, store, place = plain / "stepfs", plain / "store", plain / "mnt"
    builds = [plain / "one", plain / "two"]
    shutil.copy(BIN, builds[0])
    version = other_version(builds[1])
    if not upgrade:
        builds.reverse()
    os.rename(builds[0], program)
    said = lambda *arguments: subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                                             timeout=180)
    assert said("mount", store, place).returncode == OK
    try:
        status = said("status", place).stdout
        assert "which is stepfs" not in status
        os.rename(builds[1], program)
        names = save_walk(place, 3)
        # Every command that asks the daemon.
        for command in (["sync"], ["ls"], ["why"], ["status"], ["latest"], ["gc"], ["gc", "--dry-run"], ["pin"], ["unpin"], ["verify"]):
            done = said(*command, place)
            assert done.returncode == OK, done
        assert said("recall", place / names[0]).returncode == said("release", place / names[0]).returncode == OK
        status = said("status", place)
        assert "which is stepfs" in status.stdout and version in status.stdout and "the next mount runs it" in status.stdout, status
        pid = json.loads(said("status", "--json", place).stdout)["daemon"]
        again = said("mount", store, place)
        assert again.returncode == OK and "already mounted" in again.stderr and version in again.stderr, again
        assert "keeps its options" in again.stderr
        assert said("umount", place).returncode == OK
        wait_dead(pid)
        assert said("mount", store, place).returncode == OK
        assert "which is" not in said("status", place).stdout and sorted(os.listdir(place)) == names
    finally:
        said("umount", place)
