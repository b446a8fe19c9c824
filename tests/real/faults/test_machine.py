"""What the machine around a mount does: limits of memory, a clock that was wrong, and security labels."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from harness import BIN, FAILURE, OK, is_alive, run
from series import save_walk, walk

pytestmark = pytest.mark.stepfs
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes control groups, or sets attributes of the kernel")

YEAR = 365 * 24 * 3600


def control_group(name, limit):
    """A new control group with so many bytes of memory, and the file that lets a process into it."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    controllers = v2 / "cgroup.controllers"
    if (v1 / "memory.limit_in_bytes").exists():
        group, file = v1 / name, "memory.limit_in_bytes"
    elif controllers.exists() and "memory" in controllers.read_text().split():
        group, file = v2 / name, "memory.max"
    else:
        pytest.skip("no control groups for memory")
    try:
        group.mkdir()
        (group / file).write_text(str(limit))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"control groups cannot be made here: {error}")
    return group


@needs_root
def test_a_daemon_follows_the_limit_of_its_control_group(mount):
    mount.umount()
    group = control_group(f"stepfs-test-{os.getpid()}", 128 << 20)
    try:
        inside = f"echo $$ > {group}/cgroup.procs; exec \"$@\""
        subprocess.run(["bash", "-c", inside, "-", BIN, *map(str, mount.arguments())], check=True)
        mount.pid = mount.find_daemon()
        assert mount.status()["memory"]["limit"] == (128 << 20) // 10
        names = save_walk(mount.dir, 4, scale=2)
        mount.sync()
        mount.require_released(*names[:-1])
        assert is_alive(mount.pid)
    finally:
        mount.umount()
        group.rmdir()
    mount.mount()


# --- the clock


def test_files_from_the_future(mount):
    """A clock was a year ahead while a checkpoint was saved. It is no reason to lose one, to go on from it, or to hold others up."""
    for step, state in enumerate(walk(2, seed=1), 1):
        torch.save(state, mount / f"step_{step}.pt")
    ahead = time.time() + YEAR
    os.utime(mount / "step_1.pt", (ahead, ahead))
    mount.sync()
    done = run("status", "--check", mount.dir, check=False)
    assert done.returncode == FAILURE and "1 file has a time in the future" in done.stdout and "step_1.pt" in done.stdout, done.stdout
    assert "touch -d TIME FILE" in done.stdout and [problem["kind"] for problem in mount.status()["problems"]] == ["clock"]
    found = run("latest", mount.dir)
    assert found.stdout == f"{mount.dir}/step_2.pt\n" and "step_1.pt has a time in the future" in found.stderr, found
    for step, state in enumerate(walk(5, seed=1), 1):
        if step > 2:
            torch.save(state, mount / f"step_{step}.pt")
    mount.sync()
    states = mount.states()
    # The one from the future counts as the newest in time, and the last one has the highest step.
    assert states["step_1.pt"] == states["step_5.pt"] == "sealed" and states["step_3.pt"] == states["step_4.pt"] == "released", states
    subprocess.run(["touch", "-d", "2 hours ago", mount / "step_1.pt"], check=True)
    mount.sync()
    assert mount.state("step_1.pt") == "released" and run("status", "--check", mount.dir).returncode == OK
    found = run("latest", mount.dir)
    assert found.stdout == f"{mount.dir}/step_5.pt\n" and found.stderr == "", found


def test_ages_of_files_from_the_future(mount):
    """A rule by age keeps them, and removes the others as ever."""
    mount.umount()
    settings = mount.store / "stepfs.toml"
    settings.write_text(settings.read_text() + '\n[[retention]]\nglob = "step_*.pt"\nkeep_for = "1h"\n')
    mount.mount()
    names = save_walk(mount.dir, 5, name="step_{}.pt")
    for at, seconds in enumerate((-2 * 3600, YEAR, -3 * 3600)):
        then = time.time() + seconds
        os.utime(mount / names[at], (then, then))
    mount.sync()
    run("gc", mount.dir)
    assert sorted(os.listdir(mount.dir)) == [names[1], names[3], names[4]]


# --- labels of security modules


@needs_root
@pytest.mark.parametrize("name,value", [("security.selinux", b"system_u:object_r:container_file_t:s0:c1,c2\0"),
                                        ("security.stepfs-test", b"\0any bytes\xff"), ("trusted.stepfs-test", b"x")])
def test_security_labels_stay(both, name, value):
    (both / "run").mkdir()
    names = [f"run/{name}" for name in save_walk(both / "run", 3)]
    for path in (*names, "run"):
        os.setxattr(both / path, name, value)
    both.sync()
    both.require_released(*names[:-1])
    kept = lambda path: os.getxattr(both / path, name) == value and name in os.listxattr(both / path)
    assert all(map(kept, (*names, "run"))), "over a release"
    run("recall", both / names[0])
    with open(both / names[1], "r+b"):
        pass
    assert kept(names[0]) and kept(names[1]), "over a recall"
    both.remount()
    assert all(map(kept, (*names, "run"))), "over a mount"
    if name == "security.selinux":
        # An SELinux of the kernel has an opinion of who may take a label away.
        return
    os.removexattr(both / names[0], name)
    assert name not in os.listxattr(both / names[0])

