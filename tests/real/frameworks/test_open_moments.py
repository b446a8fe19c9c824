"""The moments of optax, of which several optimizers write the same names, stay exact."""

import sys

import numpy as np
import pytest
from harness import BIN, ROOT, run, shell

sys.path.insert(0, str(ROOT / "scripts/frameworks"))

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]

COUNT, EVERY = 5, 10


def lossy(folder, name, load):
    """The kinds of tensors that lose anything in an old checkpoint: `load(path)` gives tensors by kind and name."""
    store = folder / "store"
    files = [folder / name.format(EVERY * (i + 1)) for i in range(COUNT)]
    run("import", store, *files)
    # The second has a state before it.
    back = folder / f"back_{files[1].name}"
    shell(f"{BIN} cat {store} {files[1].name} > {back}")
    now, written = load(back), load(files[1])
    assert now.keys() == written.keys()
    return {kind for kind, name in now if now[kind, name].tobytes() != written[kind, name].tobytes()}


OPTAX = ["adam", "adamw", "nadam", "lamb", "amsgrad", "adamax", "novograd", "lion", "yogi", "adabelief", "centered"]


def of_optax(optax, name):
    return optax.rmsprop(1e-3, centered=True) if name == "centered" else getattr(optax, name)(1e-3)


@pytest.mark.parametrize("name", OPTAX)
def test_optax(tmp_path, name):
    serialization, optax = pytest.importorskip("flax.serialization"), pytest.importorskip("optax")
    import jax
    import points
    from writers import jax_libraries as network

    optimizer = of_optax(optax, name)
    params = jax.tree.map(jax.numpy.asarray, points.start())
    state = optimizer.init(params)
    gradient = jax.jit(jax.grad(lambda params, x, y: network.loss_of(params, x, y)))
    for step in range(1, COUNT * EVERY + 1):
        updates, state = optimizer.update(gradient(params, *points.batch(step, 0)), state, params)
        params = optax.apply_updates(params, updates)
        if step % EVERY == 0:
            tree = serialization.to_bytes({"params": params, "opt_state": state})
            (tmp_path / f"step_{step}.msgpack").write_bytes(tree)

    def load(path):
        found = {}
        for keys, value in jax.tree_util.tree_leaves_with_path(serialization.msgpack_restore(path.read_bytes())):
            keys = [key.key for key in keys]
            kind = "weight" if keys[0] == "params" else "first" if "mu" in keys else "second" if "nu" in keys else "other"
            found[kind, "/".join(keys)] = np.asarray(value)
        return found

    assert lossy(tmp_path, "step_{}.msgpack", load) <= {"weight"}
