"""Small checkpoint series that behave like training, without the training: quick to make, the same every time."""

import io
import os
import shutil
import tempfile

import numpy as np
import torch

SHAPES = {"wte.weight": (256, 128), "block.attn.weight": (384, 128), "block.attn.bias": (384,), "block.up.weight": (512, 128),
          "ln.weight": (128,)}


def walk(count, seed=0, shapes=None, scale=1, dtype=torch.float32):
    """`count` states of a random walk in which updates are small against the weights, with Adam's two moments.

    About 2 MB each at `scale` 1; the first dimension of each matrix grows with `scale`.
    """
    rng = np.random.default_rng(seed)
    shapes = {name: (s[0] * scale, *s[1:]) if len(s) > 1 else s for name, s in (shapes or SHAPES).items()}
    normal = lambda shape: rng.standard_normal(shape, dtype=np.float32)
    weights = {name: 0.05 * normal(shape) for name, shape in shapes.items()}
    m = {name: 1e-3 * normal(shape) for name, shape in shapes.items()}
    v = {name: np.square(1e-3 * normal(shape)) + np.float32(1e-9) for name, shape in shapes.items()}
    for step in range(1, count + 1):
        for name, shape in shapes.items():
            gradient = 1e-3 * normal(shape)
            m[name] = np.float32(0.9) * m[name] + np.float32(0.1) * gradient
            v[name] = np.float32(0.99) * v[name] + np.float32(0.01) * gradient * gradient
            weights[name] = weights[name] - np.float32(1e-3) * m[name] / np.sqrt(v[name])
        tensor = lambda values: torch.from_numpy(values.copy()).to(dtype)
        yield {
            "model": {name: tensor(w) for name, w in weights.items()},
            "optimizer": {"state": {i: {"step": torch.tensor(float(step)), "exp_avg": tensor(m[name]),
                                        "exp_avg_sq": tensor(v[name])} for i, name in enumerate(shapes)},
                          "param_groups": [{"lr": 1e-3, "params": list(range(len(shapes)))}]},
            "rng": torch.from_numpy(rng.integers(0, 256, 5056).astype(np.uint8)),
            "step": step,
        }


def save_walk(folder, count, name="step_{:04d}.pt", save=torch.save, **options):
    """Save a walk into a folder; returns the file names, oldest first."""
    names = []
    for step, state in enumerate(walk(count, **options), 1):
        names.append(name.format(step))
        save(state, f"{folder}/{names[-1]}")
    return names


def torch_bytes(state, name="archive"):
    """The bytes that `torch.save` writes for it. If saved to a path, the file's parts are named after the path."""
    if name == "archive":
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return buffer.getvalue()
    with tempfile.TemporaryDirectory(prefix="stepfs-test-") as folder:
        torch.save(state, f"{folder}/{name}.pt")
        with open(f"{folder}/{name}.pt", "rb") as f:
            return f.read()


def archive_name(data):
    """The name that the parts of a .pt share."""
    return data[30 : 30 + int.from_bytes(data[26:28], "little")].split(b"/")[0].decode()


def copy_in_order(source, target, names):
    for name in names:
        shutil.copyfile(os.path.join(source, name), os.path.join(target, name))


def flatten(value, path=""):
    """{path: leaf} of nested dicts, lists and tuples."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {path: value}
    leaves = {}
    for key, inner in items:
        leaves.update(flatten(inner, f"{path}.{key}" if path else str(key)))
    return leaves


def tensors_of(state):
    return {path: leaf for path, leaf in flatten(state).items() if isinstance(leaf, torch.Tensor)}


def bits_equal(a, b):
    """Equal bit for bit; NaN equals itself, 0.0 does not equal -0.0."""
    a, b = (t.detach().contiguous().reshape(-1) for t in (a, b))
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def difference(a, b):
    """Largest absolute difference, computed in fp64 so that the subtraction itself adds nothing for narrower types."""
    return (a.detach().double() - b.detach().double()).abs().max().item() if a.numel() else 0.0
