"""Profiles by attribute and command, and restores with torch.load and torch.save that make a lineage finer."""

import os
import subprocess
import sys

import pytest
import torch
from harness import FAILURE, USAGE, run
from series import bits_equal, tensors_of, torch_bytes, walk

pytestmark = pytest.mark.stepfs


def set_up(mount, settings):
    """Mounts again with more settings."""
    mount.umount()
    path = mount.store / "stepfs.toml"
    path.write_text(path.read_text().replace("[[profile]]", settings + "\n[[profile]]", 1))
    mount.mount()


class Training:
    """Saves states one after the other, as a run does, and remembers their bytes."""

    def __init__(self, mount):
        self.mount, self.states, self.saved, self.step = mount, walk(40, seed=11), {}, 0

    def go_on(self, count):
        for _ in range(count):
            self.step += 1
            state = next(self.states)
            name = f"step_{self.step:04d}.pt"
            torch.save(state, self.mount / name)
            self.saved[name] = state
        self.mount.sync()

    def is_exact(self, name):
        read = tensors_of(torch.load(self.mount / name, weights_only=True))
        return all(bits_equal(tensor, read[path]) for path, tensor in tensors_of(self.saved[name]).items())


def lineage(mount):
    """The `status` of the only lineage; its count is 0 before the first restore."""
    rows = mount.status()["restored"]
    return rows[0] if rows else {"restores": 0}


def load(mount, name):
    return torch.load(mount / name, weights_only=True)


def test_a_run_that_is_restored_more_often_than_expected_goes_on_exact(both):
    mount = both
    set_up(mount, "expected_restores = 1")
    run_ = Training(mount)
    run_.go_on(5)
    # As often as expected. What is loaded is no restore before the run saves.
    load(mount, "step_0003.pt")
    assert mount.entry("step_0003.pt")["profile"] == "balanced" and not lineage(mount)["restores"]
    run_.go_on(2)
    assert mount.entry("step_0006.pt")["profile"] == "balanced" and lineage(mount)["restores"] == 1
    assert [mount.entry(f"step_000{n}.pt")["generations"] for n in (4, 6, 7)] == [0, 1, 1]
    # Once more, from a state that itself descends from a restore.
    load(mount, "step_0006.pt")
    run_.go_on(2)
    said = lineage(mount)
    assert (said["restores"], said["expected_restores"], said["asked"], said["profile"]) == (2, 1, "balanced", "exact")
    assert "its next states are exact instead of balanced" in run("status", mount.dir).stdout
    assert {mount.entry(f"step_000{n}.pt")["profile"] for n in (7, 8)} == {"exact"}
    assert [mount.entry(f"step_000{n}.pt")["generations"] for n in (8, 9)] == [2, 2]
    assert run_.is_exact("step_0008.pt") and not run_.is_exact("step_0002.pt")
    assert "exact instead of balanced: restored 2 times, 1 expected" in mount.log.read_text()
    assert "profile: exact; 2 lossy restores behind it" in run("inspect", mount / "step_0008.pt").stdout
    # Files released before stay the same, and all of this survives a remount.
    mount.remount()
    assert mount.entry("step_0006.pt")["profile"] == "balanced" and lineage(mount)["restores"] == 2
    run_.go_on(1)
    assert mount.entry("step_0009.pt")["profile"] == "exact"


def test_what_others_read_is_no_restore(mount):
    run_ = Training(mount)
    run_.go_on(4)
    old = mount / "step_0002.pt"
    evaluate = f"import torch; assert torch.load({str(old)!r}, weights_only=True)['step'] == 2"
    run_all = [["cp", "-r", mount.dir, mount.base / "backup"], ["cmp", old, mount.base / "backup/step_0002.pt"], ["sha256sum", old], [sys.executable, "-c", evaluate]]
    for command in run_all:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for command in ["ls", "inspect", "pin"]:
        run(command, old)
    run("cat", mount.store, "step_0002.pt", text=False)
    run("export", mount.store, "step_0002.pt", mount.base / "out")
    run("verify", mount.store)
    run_.go_on(1)
    assert not lineage(mount)["restores"]
    # The run itself loads one. Without expectations that changes nothing.
    load(mount, "step_0003.pt")
    run_.go_on(2)
    assert lineage(mount)["restores"] == 1 and mount.entry("step_0006.pt")["profile"] == "balanced"


def test_a_state_that_a_helper_saves_is_a_restore(mount):
    """As `torch.distributed.checkpoint` saves in a process of its own, which the run starts and feeds."""
    run_ = Training(mount)
    run_.go_on(4)
    load(mount, "step_0003.pt")
    saver = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())"
    state = torch_bytes(next(run_.states))
    subprocess.run([sys.executable, "-c", saver, mount / "step_0005.pt"], input=state, check=True)
    mount.sync()
    assert lineage(mount)["restores"] == 1


@pytest.mark.parametrize("role, key", [("second_moment", "exp_avg_sq"), ("first_moment", "exp_avg"), ("weight", "model")])
def test_one_role_can_be_exact_and_the_others_not(mount, role, key):
    set_up(mount, f'[[profile]]\nrole = "{role}"\nprofile = "exact"\n')
    run_ = Training(mount)
    run_.go_on(4)
    read = tensors_of(torch.load(mount / "step_0003.pt", weights_only=True))
    matrices = {path: tensor for path, tensor in tensors_of(run_.saved["step_0003.pt"]).items() if tensor.dim() == 2}
    same = {path for path, tensor in matrices.items() if bits_equal(tensor, read[path])}
    # A second moment is lossy only beside a first one in units of it.
    keys = {key, "exp_avg_sq"} if role == "first_moment" else {key}
    assert same == {path for path in matrices if keys & set(path.replace("/", ".").split("."))}
    assert role in mount.entry("step_0003.pt")["profile"] or role == "weight"


def test_profiles_by_command(mount):
    run_ = Training(mount)
    os.mkdir(mount / "keep")
    run("profile", mount / "keep", "--set", "exact")
    run_.go_on(2)
    run("profile", mount / "step_0002.pt", "--set", "exact")
    run_.go_on(2)
    assert run_.is_exact("step_0002.pt") and not run_.is_exact("step_0003.pt")
    run("profile", mount.dir, "--set", "exact")
    run_.go_on(1)
    assert mount.entry("step_0004.pt")["profile"] == "exact" and run_.is_exact("step_0004.pt")
    shown = run("profile", mount / "keep", mount / "step_0005.pt", mount.dir).stdout
    assert [line.split()[1] for line in shown.splitlines()] == ["exact"] * 3
    # The attribute is hidden from programs, and goes with the file.
    assert not os.listxattr(mount / "step_0002.pt")
    os.rename(mount / "step_0002.pt", mount / "other.pt")
    run("profile", mount.dir, "--unset")
    assert os.getxattr(mount / "other.pt", "user.stepfs.profile") == b"exact"
    assert run("profile", mount.dir).stdout.strip().endswith("by the rules of stepfs.toml")
    assert run("profile", mount.dir, "--unset", check=False).returncode == FAILURE
    wrong = run("profile", mount.dir, "--set", "best", check=False)
    assert wrong.returncode == USAGE and "write exact, balanced or compact" in wrong.stderr
