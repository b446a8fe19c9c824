"""Bundles of TensorFlow on a mount. TensorFlow itself is in the second environment of scripts/frameworks.sh; without it they are skipped."""

import os
import re
import subprocess

import numpy as np
import pytest
import torch
from formats import HALF_A_POINT
from harness import PLAIN, ROOT, make_base, open_mount, remove_base, require_clean, run_json, shell

SECOND = os.environ.get("FRAMEWORKS_PYTHON", str(ROOT / ".venv-frameworks/bin/python"))
SCRIPT = ROOT / "tests/real/frameworks/tensorflow_bundles.py"
COUNT = 6
DATA = "ckpt-{}.data-00000-of-00001"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.path.exists(SECOND), reason="no second environment")]


def tensorflow(*args):
    done = subprocess.run([SECOND, SCRIPT, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def load(path):
    with np.load(path) as file:
        return {key.replace("|", "/"): file[key] for key in file.files}


def torch_zip(state, path):
    """The tensors of a bundle, as torch's programs keep them."""
    number = lambda key, pattern: int(found[1]) if (found := re.search(pattern, key)) else None
    tensors = {key: torch.from_numpy(value) for key, value in state.items()}
    weights = {number(key, r"_trainable_variables/(\d+)/"): value for key, value in tensors.items() if "_trainable_variables/" in key}
    moments = {number(key, r"/_variables/(\d+)/"): value for key, value in tensors.items() if "/_variables/" in key}
    model = {f"layer{n}.{'weight' if value.dim() == 2 else 'bias'}": value for n, value in sorted(weights.items())}
    model |= {f"norm.running_{key.split('moving_')[1][:3]}": value for key, value in tensors.items() if "moving_" in key}
    step = next(value for key, value in tensors.items() if "_iterations" in key)
    slots = {n: {"step": torch.tensor(float(step)), "exp_avg": moments[2 + 2 * n], "exp_avg_sq": moments[3 + 2 * n]} for n in sorted(weights)}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-7, "params": list(slots)}
    torch.save({"model": model, "optimizer": {"state": slots, "param_groups": [group]}}, path)


@pytest.fixture(scope="module")
def series():
    """A mount with a series of bundles, all older ones released, and a plain directory with the same."""
    plain = make_base()
    mounts = open_mount(True)
    mount = next(mounts)
    try:
        tensorflow("write", mount.dir, plain)
        mount.sync()
        mount.require_released(*[DATA.format(step) for step in range(COUNT - 1)])
        yield mount, plain
        if not PLAIN:
            mount.umount()
            require_clean(mount.store)
    finally:
        mounts.close()
        remove_base(plain)


def share(mount, names):
    rows = [mount.entry(name) for name in names]
    return sum(row["stored_bytes"] for row in rows) / sum(row["logical_bytes"] for row in rows)


def test_tensorflow_reads_released_bundles_with_its_checksums(series, tmp_path):
    """Lossy, but each tensor has the CRC-32C that the index has, and the index is what was written."""
    mount, plain = series
    for step in range(COUNT):
        shell(f"cmp {mount / f'ckpt-{step}.index'} {plain / f'ckpt-{step}.index'}")
        tensorflow("read", f"{mount.dir}/ckpt-{step}", tmp_path / "read.npz")
        exact, read = load(plain / f"ckpt-{step}.npz"), load(tmp_path / "read.npz")
        assert exact.keys() == read.keys()
        changed = [key for key in exact if exact[key].tobytes() != read[key].tobytes()]
        assert PLAIN or len(changed) >= 20 * (step < COUNT - 1), changed
        for key in changed:
            before, after = exact[key].ravel()[-32:].view(np.int32), read[key].ravel()[-32:].view(np.int32)
            assert (before ^ after).max() < 4, f"{key}: more than the lowest bits of its tail"
    shell(f"cmp {mount / DATA.format(COUNT - 1)} {plain / DATA.format(COUNT - 1)}")


def test_a_tensor_with_edges_in_the_skeleton_keeps_its_checksum(mount, tmp_path):
    """Tensors from 8 MiB on leave their first and their last pages out."""
    plain = make_base()
    try:
        tensorflow("write", mount.dir, plain, "large")
        mount.sync()
        mount.require_released(DATA.format(0), DATA.format(1))
        tensorflow("read", f"{mount.dir}/ckpt-1", tmp_path / "read.npz")
        exact, read = load(plain / "ckpt-1.npz"), load(tmp_path / "read.npz")
        large = [key for key in exact if exact[key].nbytes > 8 << 20]
        assert len(large) == 3
        for key in large:
            before, after = exact[key].ravel().view(np.int32), read[key].ravel().view(np.int32)
            assert PLAIN or (before != after).sum() > before.size / 2, key
            assert (before[:2048] == after[:2048]).all() and (before[-1024:-32] == after[-1024:-32]).all(), key
            assert (before[-32:] ^ after[-32:]).max() < 4, key
    finally:
        remove_base(plain)


def test_every_tensor_is_within_its_bound(series, tmp_path):
    mount, plain = series
    name = DATA.format(2)
    tensorflow("read", f"{mount.dir}/ckpt-2", tmp_path / "read.npz")
    exact, read = load(plain / "ckpt-2.npz"), load(tmp_path / "read.npz")
    stated = sorted(tensor["max_abs_error"] or 0 for tensor in run_json("inspect", "--json", mount / name)["tensors"])
    errors = sorted(float(np.abs(exact[key].astype(np.float64) - read[key]).max()) for key in exact)
    assert len(stated) == len(errors) and (PLAIN or max(stated) > 0)
    # By size: the largest error is at most the largest that is stated, and so on. The tail adds 3 units in the last place.
    for error, limit in zip(errors, stated):
        assert PLAIN or error <= limit + 1e-6, (errors, stated)


def test_a_bundle_is_nearly_as_small_as_a_torch_zip(series):
    if PLAIN:
        return
    mount, plain = series
    names = [f"step_{step}.pt" for step in range(COUNT)]
    mounts = open_mount(True)
    zips = next(mounts)
    try:
        for step, name in enumerate(names):
            torch_zip(load(plain / f"ckpt-{step}.npz"), zips / name)
        zips.sync()
        zips.require_released(*names[:-1])
        of_zip, own = share(zips, names[:-1]), share(mount, [DATA.format(step) for step in range(COUNT - 1)])
    finally:
        mounts.close()
    print(f"bundle: {own:.2%} of the files, as zip {of_zip:.2%}")
    assert own <= of_zip + HALF_A_POINT


def test_keras_trains_on_from_a_released_bundle(series):
    mount, _ = series
    before, after = map(float, tensorflow("resume", f"{mount.dir}/ckpt-1").split()[-2:])
    assert after < before


def test_a_bundle_without_an_index_is_no_newer_state(mount):
    """A save that was cut short releases nothing. Once the index comes, it does."""
    if PLAIN:
        return
    plain = make_base()
    try:
        (plain / "again").mkdir()
        tensorflow("write", plain, plain / "again")
        put = lambda name: shell(f"cp {plain / name} {mount / name}")
        for name in ["ckpt-0.index", DATA.format(0), DATA.format(1)]:
            put(name)
        mount.sync()
        # Copied before its file: as if the file had been written over. TensorFlow writes the index last.
        put("ckpt-0.index")
        mount.sync()
        assert mount.entry(DATA.format(0))["state"] != "released"
        assert "not finished" in os.getxattr(mount / DATA.format(1), "user.stepfs.why").decode()
        put("ckpt-1.index")
        mount.sync()
        mount.require_released(DATA.format(0))
    finally:
        remove_base(plain)
