"""The newest file on a mirror: quantized at once, exact, or not there yet."""

import os
import shutil

import pytest
import torch
from harness import require_clean, run, wait_until
from series import flatten, save_walk, walk

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]


def read(path):
    with open(path, "rb") as f:
        return f.read()


def put_bytes(mirror):
    return sum(mirror.names().values())


def pulled(mirror, mounts, number):
    store = mirror.base / f"pulled_{number}"
    run("pull", mirror.other_url, store)
    require_clean(store)
    return mounts(store=store)


def errors(path, state):
    """Of each weight: the largest error."""
    now, was = flatten(torch.load(path, weights_only=False)["model"]), flatten(state["model"])
    return {name: (now[name] - was[name]).abs().max().item() for name in was}


def test_the_newest_travels_quantized_once_and_for_good(mirror, mounts):
    mount = mounts(mirror, 'newest = "quantized"')
    states, shares = list(walk(8, scale=4)), []
    os.mkdir(mount / "run")
    for step, state in enumerate(states[:7]):
        before = put_bytes(mirror)
        torch.save(state, mount / f"run/step_{step:04d}.pt")
        size = os.path.getsize(mount / f"run/step_{step:04d}.pt")
        mount.sync()
        mount.mirrored()
        shares.append((put_bytes(mirror) - before) / size)
    # The first has no update before it: it travels whole, and once more when it is archived.
    assert shares[0] > 0.5 and max(shares[2:]) < 0.2, shares
    newest = "run/step_0006.pt"
    exact = read(mount / newest)
    assert mount.log.read_text().count("encoded ahead") >= 5
    # Here it is as it was written; elsewhere it is what the archive will make of it.
    mount.kill()
    mount.mount()
    assert read(mount / newest) == exact
    other = pulled(mirror, mounts, 1)
    moved = {n: (states[6]["model"][n] - states[5]["model"][n]).square().mean().sqrt().item() for n in states[6]["model"]}
    wrong = errors(other / newest, states[6])
    # `balanced` has steps of two updates, six times as many at one iteration from state to state; a chain keeps its step
    # within a factor of 1.4. An error is at most half a step.
    assert all(wrong[name] <= 2 * 6 * 1.4 / 2 * moved[name] for name in wrong), (wrong, moved)
    assert any(wrong.values())
    before, there = read(other / newest), put_bytes(mirror)
    # Once it is history, it is what travelled, here too.
    torch.save(states[7], mount / "run/step_0007.pt")
    mount.sync()
    mount.require_released(newest)
    mount.mirrored()
    assert read(mount / newest) == before
    assert put_bytes(mirror) - there < 1.2 * os.path.getsize(mount / newest)


def test_what_must_stay_exact_travels_exact(mirror, mounts):
    mount = mounts(mirror, 'newest = "quantized"')
    os.mkdir(mount / "run")
    names = [f"run/{name}" for name in save_walk(mount / "run", 4)]
    mount.sync()
    mount.mirrored()
    exact = read(mount / names[-1])
    run("pin", mount / names[-1])
    mount.mirrored()
    assert run("cat", mirror.other_url, names[-1], text=False).stdout == exact


def test_what_is_named_the_best_later_travels_exact(mirror, mounts):
    mount = mounts(mirror, 'newest = "quantized"')
    os.mkdir(mount / "run")
    for step, state in enumerate(walk(4, scale=4)):
        torch.save(state, mount / f"run/step_{step:04d}.pt")
        mount.sync()
        mount.mirrored()
    newest = "run/step_0003.pt"
    on_mirror = lambda: run("cat", mirror.other_url, newest, text=False).stdout  # noqa: E731
    exact = read(mount / newest)
    assert on_mirror() != exact
    os.symlink("step_0003.pt", mount / "run/best.pt")
    wait_until(lambda: on_mirror() == exact, 60, "the best is exact there")


def test_none_keeps_the_newest_here(mirror, mounts):
    mount = mounts(mirror, 'newest = "none"')
    os.mkdir(mount / "run")
    names = [f"run/{name}" for name in save_walk(mount / "run", 3)]
    (mount / "small.json").write_text("{}")
    mount.sync()
    mount.mirrored()
    other = pulled(mirror, mounts, 1)
    assert sorted(os.listdir(other / "run")) == [os.path.basename(name) for name in names[:-1]]
    assert (other / "small.json").read_text() == "{}"
    assert all(read(other / name) == read(mount / name) for name in names[:-1])
    assert put_bytes(mirror) < os.path.getsize(mount / names[-1]) * 1.5


def test_four_ranks_of_one_node_and_reshard_from_the_mirror(mirror, mounts, tmp_path):
    """ElasticDL's servers write shards beside each other; a mirror gives them to another number of servers."""
    import sys
    from harness import ROOT
    sys.path.insert(0, str(ROOT / "tests/real/frameworks"))
    import elasticdl_files as elasticdl

    mount = mounts(mirror)
    for version, state in zip((10, 20, 30), elasticdl.train(3)):
        elasticdl.save(mount / f"version-{version}", version, state, 2)
    mount.mirrored()
    shutil.copytree(mount / "version-30", tmp_path / "plain/version-30")
    for number, source in enumerate((tmp_path / "plain/version-30", f"{mirror.other_url}:version-30")):
        target = tmp_path / f"new_{number}/version-30"
        os.mkdir(target.parent)
        run("reshard", source, 3, target)
    for name in os.listdir(tmp_path / "new_0/version-30"):
        assert read(tmp_path / "new_1/version-30" / name) == read(tmp_path / "new_0/version-30" / name), name
