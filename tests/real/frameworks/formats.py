"""A series of checkpoints in one format, on a mount of its own, beside the same tensors in another."""

import shutil
from contextlib import contextmanager
from typing import Callable, NamedTuple

import torch
from bounds import check_within_bounds
from harness import PLAIN, make_base, open_mount, remove_base, require_clean, run, shell

COUNT = 6
# Points of the file's size by which a format may take more than another of the same tensors.
HALF_A_POINT = 0.005


def trained():
    """States of a small classifier and its Adam; several parameters have the same shape."""
    torch.manual_seed(3)
    rng = torch.Generator().manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(96, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh(),
                                torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    centers = torch.randn(10, 96, generator=rng)
    for step in range(10 * COUNT):
        labels = torch.randint(0, 10, (64,), generator=rng)
        loss = torch.nn.functional.cross_entropy(model(centers[labels] + torch.randn(64, 96, generator=rng)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            yield {"model": {k: v.clone() for k, v in model.state_dict().items()}, "optimizer": copied(optimizer.state_dict()),
                   "step": step}


def copied(value):
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def named(state):
    """The same tensors in one mapping, as a framework flattens them."""
    names = [name for name in state["model"] if not name.split(".")[-1].startswith(("running_", "num_"))]
    slots = state["optimizer"]["state"]
    moments = {f"state.{names[i]}.{slot}": slots[i][slot] for i in slots for slot in ("exp_avg", "exp_avg_sq")}
    return {**state["model"], **moments}


class Format(NamedTuple):
    """`save(state, path)` and `load(path)` of a library; `load` gives tensors by the paths that `inspect` shows."""

    name: str
    save: Callable
    load: Callable
    states: Callable = trained


ZIP = Format("step_{}.pt", torch.save, torch.load)
ZIP_OF_NAMES = Format("step_{}.pt", lambda state, path: torch.save(named(state), path), torch.load)


@contextmanager
def released(format, profile):
    """A mount with the series in one format, a plain directory with the same, and the names. One mount for each format: of two
    files with the same tensors one would be a difference to the other.
    """
    names, plain = [format.name.format(step) for step in range(COUNT)], make_base()
    mounts = open_mount(True)
    mount = next(mounts)
    try:
        if not PLAIN:
            run("profile", mount.dir, "--set", profile)
        for name, state in zip(names, format.states()):
            format.save(state, mount / name)
            shutil.copyfile(mount / name, plain / name)
        mount.sync()
        mount.require_released(*names[:-1])
        yield mount, plain, names
    finally:
        mounts.close()
        remove_base(plain)


def share(mount, names):
    """The stored share of the released files."""
    rows = [mount.entry(name) for name in names[:-1]]
    return sum(row["stored_bytes"] for row in rows) / sum(row["logical_bytes"] for row in rows)


def check_like(format, like, profile):
    """Files of `format` keep their bounds, and take no more room than the same tensors in `like`, but for half a point."""
    with released(format, profile) as (mount, plain, names):
        for name in names[:-1]:
            quantized = check_within_bounds(mount, name, format.load(plain / name), format.load(mount / name))
            assert PLAIN or (quantized > 0) == (profile == "balanced"), f"{quantized} tensors of {name} were quantized"
        shell(f"cmp {mount / names[-1]} {plain / names[-1]}")
        if profile == "exact":
            for name in names:
                shell(f"cmp {mount / name} {plain / name}")
        own = share(mount, names)
        if not PLAIN:
            mount.umount()
            require_clean(mount.store)
    with released(like, profile) as (mount, _, names):
        other = share(mount, names)
    print(f"{format.name} {profile}: {own:.2%} of the files, as {like.name} {other:.2%}")
    assert own <= other + HALF_A_POINT, f"{own:.2%} of the files, as {like.name} {other:.2%}"
