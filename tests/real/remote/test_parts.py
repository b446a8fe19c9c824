"""One tensor of a large checkpoint that only the remote has."""

import os

import numpy as np
import pytest
from harness import wait_until
from safetensors.numpy import load_file, safe_open, save_file

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]

TENSORS = 160


def one(path):
    with safe_open(path, "numpy") as f:
        return f.get_tensor("layer.77.weight")


def test_one_tensor_costs_its_bytes(remote, nodes):
    """As `scripts/remote_tensor.py` measures it with 2 GB. Tensors of 1 MB; also as a difference to another state."""
    first, second = nodes(), nodes()
    draw = np.random.default_rng(1)
    state = {f"layer.{n}.weight": draw.standard_normal(1 << 18, np.float32) * 0.02 for n in range(TENSORS)}
    os.mkdir(first / "run")
    for step in range(3):
        save_file(state, first / f"run/step_{step}.safetensors")
        for value in state.values():
            value += draw.standard_normal(1 << 18, np.float32) * 1e-3
    first.sync()
    first.pushed()
    size = os.path.getsize(first / "run/step_1.safetensors")
    for name in ("run/step_2.safetensors", "run/step_1.safetensors"):
        second.sees(name)
        before = second.progress()["came"]
        tensor = one(second / name)
        came = second.progress()["came"] - before
        assert np.array_equal(tensor, one(first / name)), name
        # The read-ahead of the kernel and of stepfs is a few MB, however large the checkpoint is.
        assert came < 16e6 < size / 8, (name, came)
    newest = "run/step_2.safetensors"
    assert second.state(newest) == "remote"
    # A whole read brings the whole.
    whole = load_file(second / newest)
    assert all(np.array_equal(whole[name], value) for name, value in load_file(first / newest).items())
    wait_until(lambda: second.state(newest) == "released", 20, "the object is here")
