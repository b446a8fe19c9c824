#!/usr/bin/env python3
"""Writes others/NAME, others/expected.json and others_pairs/NAME.before and .after: pickles, joblib's files and Paddle's, Flax's msgpack, Equinox's leaves, and zips of
stable-baselines3. The layout is that of `make.py`. The place of each array is found by its bytes, which are random.

Needs numpy, joblib, scikit-learn, paddlepaddle, flax, optax, equinox and stable-baselines3.
"""

import json
import pickle
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent / "others"
PAIRS = Path(__file__).parent / "others_pairs"
expected = {}
rng = np.random.default_rng(7)
DTYPES = {"float32": "F32", "float16": "F16", "float64": "F64", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
          "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL", "complex64": "C64", "complex128": "C128",
          "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


def expect(name, kind, tensors):
    """`tensors`: path, array, role and perhaps other paths of each. An array of an unknown type is its bytes."""
    data, found, seen = (HERE / name).read_bytes(), [], Counter()
    arrays = [(path, np.asarray(array), *more) for path, array, *more in tensors]
    for path, array, role, *aliases in arrays:
        flat = array.flags.f_contiguous and not array.flags.c_contiguous
        raw = array.tobytes("F" if flat else "C")
        offset = -1
        # Equal arrays are listed in the order of the file.
        for _ in range(seen[raw] + 1):
            offset = data.index(raw, offset + 1)
        seen[raw] += 1
        dtype = DTYPES.get(array.dtype.name) if array.dtype.byteorder != ">" else None
        shape = [array.size] if flat else list(array.shape)
        if dtype is None:
            dtype, shape, role = "U8", [len(raw)], "other"
        found.append({"path": path, "aliases": aliases, "dtype": dtype, "shape": shape, "offset": offset, "role": role})
    counts = {raw: data.count(raw) for raw in seen}
    assert all(seen[raw] == counts[raw] for raw in seen if len(raw) > 8), f"{name}: bytes of an array stand elsewhere, too"
    found.sort(key=lambda tensor: tensor["offset"])
    expected[name] = {"kind": kind, "tensors": found}


def dump(name, value, protocol=4):
    (HERE / name).write_bytes(pickle.dumps(value, protocol=protocol))


def normal(*shape, dtype="float32"):
    return (rng.standard_normal(shape) * 9).astype(dtype)


def model(prefix=""):
    return {f"{prefix}fc.weight": normal(6, 5), f"{prefix}fc.bias": normal(6)}


def pickles():
    import ml_dtypes

    for protocol in (3, 4, 5):
        weights = model()
        state = {"model": weights, "optimizer": {"state": {i: {"exp_avg": normal(*w.shape), "exp_avg_sq": normal(*w.shape) ** 2, "step": 9}
                                                           for i, w in enumerate(weights.values())},
                                                 "param_groups": [{"lr": 1e-3, "params": [0, 1]}]},
                 "rng": np.random.default_rng(1), "seed": np.random.RandomState(1).get_state(legacy=False), "note": b"x" * 99}
        dump(f"trained.{protocol}.pkl", state, protocol)
        tensors = [(f"model/{k}", w, "weight") for k, w in weights.items()]
        tensors += [(f"optimizer/state/{i}/{slot}", slots[slot], "optimizer") for i, slots in state["optimizer"]["state"].items()
                    for slot in ("exp_avg", "exp_avg_sq")]
        words = state["rng"].bit_generator.seed_seq.pool
        tensors += [("rng/args/0/1/2", words, "other"), ("seed/state/key", state["seed"]["state"]["key"], "other")]
        expect(f"trained.{protocol}.pkl", "pickle", tensors)
    kinds = {f"w.{name}": normal(3, 4, dtype=name) for name in DTYPES if name[:3] not in ("uin", "boo", "flo") and name[:2] != "bf"}
    kinds |= {f"w.{name}": rng.integers(0, 99, (5, 4)).astype(name) for name in ("uint8", "uint16", "uint32", "uint64")}
    kinds |= {f"w.{name}": normal(5, 4, dtype=name) for name in ("float32", "float16", "float64")}
    kinds |= {"w.bfloat16": normal(5, 4).astype(ml_dtypes.bfloat16), "w.f8": normal(5, 4).astype(ml_dtypes.float8_e5m2)}
    kinds |= {"turned": np.asfortranarray(normal(3, 5)), "row": np.asfortranarray(normal(1, 5)), "big": normal(4).astype(">f4"),
              "text": np.array(["apple", "pear"]), "times": np.array(["2020-01-01", "1999-12-31"], "M8[ns]"),
              "fields": np.array([(1, 2.5), (7, 9.5)], "i4,f8"), "void": np.frombuffer(rng.bytes(8), "V2")}
    for protocol in (4, 5):
        others = {"empty": np.empty((0, 3)), "objects": np.array([{}, "a"], dtype=object), "scalar": np.float32(2.5)}
        dump(f"odd.{protocol}.pkl", kinds | {"others": others}, protocol)
        expect(f"odd.{protocol}.pkl", "pickle", [(k, w, "weight" if w.dtype.name in DTYPES and k[2:5] not in ("int", "uin") else "other")
                                                 for k, w in kinds.items()])
    shared = normal(4, 4)
    dump("shared.pkl", {"a": shared, "b": [shared]})
    expect("shared.pkl", "pickle", [("a", shared, "other", "b/0")])


def joblibs():
    import joblib
    from sklearn.cluster import KMeans
    from sklearn.neural_network import MLPClassifier
    from sklearn.preprocessing import StandardScaler

    weights = model()
    value = {"model": weights, "labels": np.array(["a", {}], dtype=object), "turned": np.asfortranarray(normal(3, 5)), "step": 3}
    joblib.dump(value, HERE / "plain.joblib")
    expect("plain.joblib", "joblib", [*((f"model/{k}", w, "weight") for k, w in weights.items()), ("turned", value["turned"], "other")])
    x, y = normal(60, 4, dtype="float64"), np.arange(60) % 3
    warnings.simplefilter("ignore")
    for solver in ("adam", "lbfgs"):
        net = MLPClassifier((7, 6), solver=solver, random_state=1, max_iter=3).fit(x, y)
        # In the order of the attributes, and both states of the random numbers.
        key, tensors = net._random_state.get_state()[1], []
        for name, value in vars(net).items():
            if name == "_random_state":
                tensors += [(f"{name}/args/0/0/state/key", key, "other"), (f"{name}/state/key", key, "other")]
            elif isinstance(value, np.ndarray):
                tensors.append((name, value, "other"))
            elif isinstance(value, list) and value and isinstance(value[0], np.ndarray):
                tensors += [(f"{name}/{i}", w, "other") for i, w in enumerate(value)]
            elif name == "_label_binarizer":
                tensors.append((f"{name}/classes_", value.classes_, "other"))
        if solver == "adam":
            tensors += [(f"_optimizer/{slot}/{i}", a, "optimizer") for slot in ("ms", "vs") for i, a in enumerate(getattr(net._optimizer, slot))]
        joblib.dump(net, HERE / f"{solver}.joblib")
        expect(f"{solver}.joblib", "joblib", tensors)
        dump(f"{solver}.pkl", net)
        # The pickle has one array of this object only.
        assert net._label_binarizer.classes_ is net.classes_
        tensors = [(*t, "classes_") if t[0].endswith("/classes_") else t for t in tensors if t[0] != "classes_"]
        expect(f"{solver}.pkl", "pickle", tensors)
    scaler, groups = StandardScaler().fit(x), KMeans(3, n_init=1, random_state=1).fit(normal(60, 4))
    joblib.dump({"scaler": scaler, "groups": groups}, HERE / "statistics.joblib")
    expect("statistics.joblib", "joblib", [("scaler/mean_", scaler.mean_, "other"), ("scaler/var_", scaler.var_, "other"),
                                           ("scaler/scale_", scaler.scale_, "other"),
                                           ("groups/cluster_centers_", groups.cluster_centers_, "other"),
                                           ("groups/labels_", groups.labels_, "other")])


def paddles():
    import paddle

    paddle.seed(3)
    for name, make in (("adam", paddle.optimizer.AdamW), ("momentum", paddle.optimizer.Momentum), ("adadelta", paddle.optimizer.Adadelta)):
        with paddle.utils.unique_name.guard():
            net = paddle.nn.Sequential(paddle.nn.Linear(4, 5), paddle.nn.BatchNorm1D(5), paddle.nn.Linear(5, 3))
            optimizer = make(1e-2, parameters=net.parameters())
        for _ in range(2):
            net(paddle.randn([8, 4])).square().mean().backward()
            optimizer.step()
        paddle.save(net.state_dict(), str(HERE / f"{name}.pdparams"))
        paddle.save(optimizer.state_dict(), str(HERE / f"{name}.pdopt"))
        paddle.save({"model": net.state_dict(), "opt": optimizer.state_dict(), "epoch": 3}, str(HERE / f"{name}.pd"))
        weights = [(k, v.numpy(), "weight") for k, v in net.state_dict().items()]
        state = []
        for key, value in optimizer.state_dict().items():
            parameter, slot = key.removesuffix("_0").split(".")[0] + "." + key.split(".")[1][:3], key.split(".")[1][4:].removesuffix("_0")
            slot = {"velocity": "momentum_buffer"}.get(slot, slot)
            state.append((key if name == "adadelta" else f"state/{parameter}/{slot}", value.numpy()))
        expect(f"{name}.pdparams", "pickle", weights)
        # Of an optimizer that stepfs does not know, names alone say nothing, and nothing is proven.
        expect(f"{name}.pdopt", "pickle", [(k, v, "weight" if name == "adadelta" else "optimizer") for k, v in state])
        expect(f"{name}.pd", "pickle", [(f"model/{k}", v, r) for k, v, r in weights] + [(f"opt/{k}", v, "optimizer") for k, v in state])


def flaxes():
    import jax
    import jax.numpy as jnp
    import optax
    from flax import serialization
    from flax.training.train_state import TrainState

    def leaves(tree, path=""):
        """In the order of the file, which that of `jax.tree` is not."""
        for key, value in tree.items():
            below = f"{path}/{key}" if path else key
            if isinstance(value, dict):
                yield from leaves(value, below)
            else:
                yield below, value

    params = {f"Dense_{i}": {"kernel": jnp.asarray(normal(5, 5)), "bias": jnp.asarray(normal(5))} for i in range(2)}
    makers = {"adam": optax.adamw(1e-2), "sgd": optax.sgd(1e-2, momentum=0.9), "amsgrad": optax.amsgrad(1e-2), "adafactor": optax.adafactor(1e-2)}
    for name, tx in makers.items():
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        for _ in range(2):
            grads = jax.tree.map(lambda w: jnp.asarray(normal(*w.shape)), params)
            state = state.apply_gradients(grads=grads)
        extra = {"train": state, "batch_stats": {"norm": {"mean": jnp.asarray(normal(5)), "var": jnp.asarray(normal(5))}}, "half": jnp.ones(3, jnp.bfloat16)}
        (HERE / f"{name}.msgpack").write_bytes(serialization.to_bytes(extra))
        tree = serialization.to_state_dict(extra)
        tensors = []
        for path, leaf in leaves(tree):
            if isinstance(leaf, int):
                continue
            role = "optimizer" if "opt_state" in path else "other" if path.startswith("batch_stats") else "weight"
            tensors.append((path, leaf, role))
        expect(f"{name}.msgpack", "flax", tensors)


def equinoxes():
    import equinox
    import jax
    import jax.numpy as jnp

    net = equinox.nn.MLP(3, 2, 4, 1, key=jax.random.PRNGKey(3))
    leaves = [net.layers[0].weight, net.layers[0].bias, net.layers[1].weight, net.layers[1].bias]
    tree = {"model": net, "half": jnp.ones((3, 2), jnp.bfloat16), "step": 7}
    equinox.tree_serialise_leaves(HERE / "tiny.eqx", tree)
    # numpy writes bfloat16 as two bytes of no type.
    as_written = lambda leaf: np.asarray(leaf).reshape(-1).view(np.uint8) if leaf is tree["half"] else leaf
    flat = [as_written(leaf) for leaf in jax.tree.leaves(tree) if not callable(leaf)]
    expect("tiny.eqx", "npy", [(str(i), leaf, "other") for i, leaf in enumerate(flat)])
    del leaves
    with open(HERE / "objects.eqx", "wb") as f:
        arrays = [normal(3, 2), normal(4)]
        for array in [*arrays, np.array([{}], dtype=object), normal(5)]:
            np.save(f, array)


class Nested:
    """A zip of torch files, as stable-baselines3 writes it, but for the times."""

    def __init__(self, name):
        self.zip = zipfile.ZipFile(name, "w")

    def add(self, name, value):
        import torch

        with self.zip.open(zipfile.ZipInfo(name), mode="w", force_zip64=True) as f:
            torch.save(value, f)

    def text(self, name, value):
        self.zip.writestr(zipfile.ZipInfo(name), value)


def nested():
    import stable_baselines3
    import torch
    from gymnasium.envs.classic_control import CartPoleEnv
    from stable_baselines3 import PPO

    torch.manual_seed(4)
    model = PPO("MlpPolicy", CartPoleEnv(), n_steps=8, batch_size=8, seed=1, device="cpu", policy_kwargs={"net_arch": [6]}).learn(8)
    # What `PPO.save` writes, but for `data` and `system_info.txt`: those name directories of the machine.
    out = Nested(HERE / "ppo.zip")
    out.text("data", "{}")
    for name, value in {"pytorch_variables": None, **model.get_parameters()}.items():
        out.add(f"{name}.pth", value)
    out.text("_stable_baselines3_version", stable_baselines3.__version__)
    out.zip.close()
    weights = [(f"policy.pth/{k}", v.numpy(), "weight") for k, v in model.policy.state_dict().items()]
    slots = model.policy.optimizer.state_dict()["state"]
    state = [(f"policy.optimizer.pth/state/{i}/{slot}", v.numpy(), "optimizer") for i, of in slots.items() for slot, v in of.items()]
    # The steps are equal numbers: in the order of the file.
    expect("ppo.zip", "zip of torch zips", weights + state)
    before = {"a.weight": normal(4, 3), "b.weight": normal(7), "c.weight": normal(3, 2), "ids": np.arange(9)}
    after = before | {"a.weight": before["a.weight"] + 1, "b.weight": before["b.weight"] * 2, "c.weight": before["c.weight"] - 1}
    for label, arrays in (("before", before), ("after", after)):
        tensors = {k: torch.from_numpy(v) for k, v in arrays.items()}
        out = Nested(PAIRS / f"nested.{label}")
        out.text("data", "{}")
        out.add("policy.pth", {k: tensors[k] for k in ("a.weight", "ids")})
        out.add("policy.optimizer.pth", {k: tensors[k] for k in ("b.weight", "c.weight")})
        out.zip.close()


if __name__ == "__main__":
    for folder in (HERE, PAIRS):
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
    for make in (pickles, joblibs, paddles, flaxes, equinoxes, nested):
        make()
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(expected.items())]
    (HERE / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
