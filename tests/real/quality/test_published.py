"""Published systems as profiles of a real mount: a torch series is saved into it, read back, merged and continued."""

import pytest
import torch
from harness import USAGE, run
from series import bits_equal, difference, save_walk, tensors_of, walk

pytestmark = pytest.mark.stepfs

# LC-Checkpoint never sends a value twice. Values outside of the largest exponents wait, with their error.
SYSTEMS = ["lc-2", "lc-3", "lc", "lc-layer-3", "scar-5", "scar-priority-5", "topn-10"]


def mounted_with(mount, profile):
    mount.umount()
    path = mount.store / "stepfs.toml"
    path.write_text(path.read_text().replace('default_profile = "balanced"', f'default_profile = "{profile}"'))
    mount.mount()


def saved(count, seed):
    return dict(enumerate(walk(count, seed=seed), 1))


def errors(mount, name, state):
    """Largest error of each tensor against its saved value."""
    read = tensors_of(torch.load(mount / name, weights_only=True))
    assert read.keys() == tensors_of(state).keys()
    return {path: difference(tensor, read[path]) for path, tensor in tensors_of(state).items()
            if not bits_equal(tensor, read[path])}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_torch_series_under_a_published_system(mount, system):
    mounted_with(mount, system)
    states = saved(7, seed=21)
    names = save_walk(mount.dir, 7, seed=21)
    mount.sync()
    assert not errors(mount, names[0], states[1]), "the first of a chain has its full precision"
    for at in range(2, 7):
        assert mount.entry(names[at - 1])["profile"] == system
        wrong = errors(mount, names[at - 1], states[at])
        # Only weights. A value that a state does not send is off by at most its movement since the first state.
        assert wrong and all(path.startswith("model") for path in wrong), wrong.keys()
        moves = [(tensors_of(states[i]), tensors_of(states[i + 1])) for i in range(1, at)]
        for path, error in wrong.items():
            assert error <= sum(difference(a[path], b[path]) for a, b in moves) * (1 + 1e-6), path
    assert not errors(mount, names[6], states[7]), "the newest is exact"
    said = run("inspect", mount / names[3]).stdout
    assert "published" in said and f"profile: {system}" in said
    before = {name: tensors_of(torch.load(mount / name, weights_only=True)) for name in (names[2], names[5])}
    for name in (names[0], names[1], names[3], names[4]):
        (mount / name).unlink()
    mount.sync()
    mount.remount()
    for name, tensors in before.items():
        read = tensors_of(torch.load(mount / name, weights_only=True))
        assert all(bits_equal(tensor, read[path]) for path, tensor in tensors.items()), name
    mount.umount()
    run("verify", mount.store)


def test_a_profile_of_the_mount_by_command(mount):
    mount.umount()
    wrong = run("mount", mount.store, mount.dir, "--profile", "lc-9", check=False)
    assert wrong.returncode == USAGE and "has a number, 1 to 8" in wrong.stderr
    run("mount", mount.store, mount.dir, "--profile", "lc-3")
    names = [f"step_{step:04d}.pt" for step in range(1, 5)]
    for name, state in zip(names, walk(4, seed=3)):
        torch.save(state, mount / name)
        if name == names[1]:
            # While it is the newest: after the next one, it may be archived before the command arrives.
            run("profile", mount / name, "--set", "topn-5")
    mount.sync()
    assert [mount.entry(name)["profile"] for name in names[:3]] == ["lc-3", "topn-5", "lc-3"]
    assert 'default_profile = "lc-3"' in (mount.store / "stepfs.toml").read_text()
    assert "LC-Checkpoint" in run("profile", "--help").stdout
