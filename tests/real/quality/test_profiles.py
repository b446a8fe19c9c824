"""Profiles by attribute and command, and restores with torch.load that make a lineage finer."""

import io
import os

import pytest
import torch
from harness import FAILURE, USAGE, run, wait_until
from series import bits_equal, tensors_of, walk

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


def restore(mount, name):
    """As a restarted job does; returns when the daemon has noticed."""
    before = lineage(mount)["restores"]
    state = torch.load(mount / name, weights_only=True)
    wait_until(lambda: lineage(mount)["restores"] == before + 1, 10, f"the restore of {name} is noticed")
    return state


def test_a_run_that_is_restored_more_often_than_expected_goes_on_exact(both):
    mount = both
    set_up(mount, "expected_restores = 1")
    run_ = Training(mount)
    run_.go_on(5)
    assert mount.entry("step_0003.pt")["profile"] == "balanced" and not lineage(mount)["restores"]
    # As often as expected.
    restore(mount, "step_0003.pt")
    run_.go_on(2)
    assert mount.entry("step_0006.pt")["profile"] == "balanced"
    assert [mount.entry(f"step_000{n}.pt")["generations"] for n in (4, 6, 7)] == [0, 1, 1]
    # Once more, from a state that itself descends from a restore.
    restore(mount, "step_0006.pt")
    said = lineage(mount)
    assert (said["restores"], said["expected_restores"], said["asked"], said["profile"]) == (2, 1, "balanced", "exact")
    assert "its next states are exact instead of balanced" in run("status", mount.dir).stdout
    run_.go_on(2)
    assert {mount.entry(f"step_000{n}.pt")["profile"] for n in (7, 8)} == {"exact"}
    assert [mount.entry(f"step_000{n}.pt")["generations"] for n in (8, 9)] == [2, 2]
    assert run_.is_exact("step_0008.pt") and not run_.is_exact("step_0002.pt")
    assert "exact instead of balanced: restored 2 times, 1 expected" in mount.log.read_text()
    assert "profile: exact; 2 lossy restores behind it" in run("inspect", mount / "step_0008.pt").stdout
    # Files released before stay the same, and all of this survives a remount.
    mount.remount()
    assert mount.entry("step_0006.pt")["profile"] == "balanced" and lineage(mount)["restores"] >= 2
    run_.go_on(1)
    assert mount.entry("step_0009.pt")["profile"] == "exact"


def test_a_copy_is_counted_like_a_restore_and_a_backup_is_not(mount):
    run_ = Training(mount)
    run_.go_on(4)
    fd = os.open(mount / "step_0002.pt", os.O_RDONLY | os.O_NOATIME)
    with os.fdopen(fd, "rb") as backup:
        assert torch.load(io.BytesIO(backup.read()), weights_only=True)["step"] == 2
    for command in ["ls", "inspect", "pin"]:
        run(command, mount / "step_0002.pt")
    run("cat", mount.store, "step_0002.pt", text=False)
    run("export", mount.store, "step_0002.pt", mount.base / "out")
    run("verify", mount.store)
    assert not lineage(mount)["restores"]
    restore(mount, "step_0003.pt")
    # Without expectations that changes nothing.
    run_.go_on(2)
    assert mount.entry("step_0005.pt")["profile"] == "balanced"


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
