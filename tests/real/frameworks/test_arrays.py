"""Pickles, joblib's files, Paddle's, Flax's, Equinox's and stable-baselines3's on a mount. Each is written and read by its own
library, beside a torch zip of the same tensors.
"""

import pickle
import warnings

import numpy as np
import pytest
import torch
from formats import COUNT, ZIP, Format, check_like, named, released, trained
from harness import PLAIN, shell
from series import bits_equal, tensors_of

BOTH = pytest.mark.parametrize("profile", ["balanced", "exact"])


def arrays(value):
    """Tensors as arrays of numpy."""
    if isinstance(value, dict):
        return {key: arrays(inner) for key, inner in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value


def tensors(value):
    """Arrays as tensors."""
    if isinstance(value, dict):
        return {key: tensors(inner) for key, inner in value.items()}
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value


def pickled(protocol):
    def save(state, path):
        with open(path, "wb") as file:
            pickle.dump(arrays(state), file, protocol=protocol)

    def load(path):
        with open(path, "rb") as file:
            return tensors(pickle.load(file))

    return Format("step_{}.pkl", save, load)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("protocol", [4, 5])
def test_a_pickle_is_as_small_as_a_zip(protocol, profile):
    check_like(pickled(protocol), ZIP, profile)


@pytest.mark.slow
@BOTH
def test_joblib_is_as_small_as_a_zip(profile):
    joblib = pytest.importorskip("joblib")

    def load(path):
        with warnings.catch_warnings(action="error"):
            # What maps the file must see the same.
            mapped, read = tensors(joblib.load(path, mmap_mode="r")), tensors(joblib.load(path))
        mapped, of = tensors_of(mapped), tensors_of(read)
        assert mapped.keys() == of.keys() and all(bits_equal(mapped[key], of[key]) for key in of)
        return read

    check_like(Format("step_{}.joblib", lambda state, path: joblib.dump(arrays(state), path), load), ZIP, profile)


def tree(state):
    """The same state as Flax and optax name it."""
    def nested(flat):
        out = {}
        for name, tensor in flat.items():
            *above, last = name.split(".")
            inner = out
            for part in above:
                inner = inner.setdefault(part, {})
            inner[last] = tensor.numpy()
        return out

    names = [name for name in state["model"] if not name.split(".")[-1].startswith(("running_", "num_"))]
    slots = state["optimizer"]["state"]
    moments = {tree: nested({names[i]: slots[i][slot] for i in slots}) for tree, slot in (("mu", "exp_avg"), ("nu", "exp_avg_sq"))}
    statistics = {name: tensor for name, tensor in state["model"].items() if name not in names}
    return {"step": state["step"], "params": nested({name: state["model"][name] for name in names}),
            "opt_state": {"0": {"count": np.int32(state["step"]), **moments}, "1": {}}, "batch_stats": nested(statistics)}


@pytest.mark.slow
@BOTH
def test_flax_is_as_small_as_a_zip(profile):
    """Of both the weights are quantized, and the moments stay exact: Adamax has the same names."""
    serialization = pytest.importorskip("flax.serialization")

    def save(state, path):
        path.write_bytes(serialization.to_bytes(tree(state)))

    def load(path):
        return tensors(serialization.msgpack_restore(path.read_bytes()))

    like = Format("step_{}.pt", lambda state, path: torch.save(tensors(tree(state)), path), None)
    check_like(Format("step_{}.msgpack", save, load), like, profile)


def of_paddle():
    """States of a network of Paddle, and of its Adam."""
    import paddle

    paddle.set_device("cpu")
    paddle.seed(3)
    rng = np.random.default_rng(3)
    centers = rng.standard_normal((10, 96))
    linear, tanh = paddle.nn.Linear, paddle.nn.Tanh
    # Else a second network of one process, and its state, would have other names.
    with paddle.utils.unique_name.guard():
        net = paddle.nn.Sequential(linear(96, 256), tanh(), linear(256, 256), tanh(), linear(256, 10))
        adam = paddle.optimizer.Adam(1e-3, parameters=net.parameters())
        for step in range(10 * COUNT):
            labels = rng.integers(0, 10, 64)
            x = paddle.to_tensor((centers[labels] + rng.standard_normal((64, 96))).astype("float32"))
            paddle.nn.functional.cross_entropy(net(x), paddle.to_tensor(labels)).backward()
            adam.step()
            adam.clear_grad()
            if step % 10 == 9:
                yield {"model": net.state_dict(), "opt": adam.state_dict()}


def accumulators(state):
    """Paddle's Adam by parameter and by accumulator."""
    found = {}
    for key, value in state.items():
        for name in ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"):
            if key.endswith(f"_{name}_0"):
                found.setdefault(key.removesuffix(f"_{name}_0"), {})[name] = torch.from_numpy(value.numpy())
    assert sum(map(len, found.values())) == len(state)
    return found


def as_torch_has_it(state, path):
    names = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "beta1_pow_acc": "step"}
    slots = accumulators(state["opt"]).values()
    slots = {i: {names[name]: tensor for name, tensor in of.items() if name in names} for i, of in enumerate(slots)}
    model = {name: torch.from_numpy(weight.numpy()) for name, weight in state["model"].items()}
    torch.save({"model": model, "optimizer": {"state": slots, "param_groups": [{"params": list(slots)}]}}, path)


@pytest.mark.slow
@BOTH
def test_paddle_is_as_small_as_a_zip(profile):
    paddle = pytest.importorskip("paddle")

    def load(path):
        with warnings.catch_warnings(action="error"):
            read = paddle.load(str(path))
        model = {name: torch.from_numpy(weight.numpy()) for name, weight in read["model"].items()}
        return {"model": model, "opt/state": accumulators(read["opt"])}

    own = Format("step_{}.pd", lambda state, path: paddle.save(state, str(path)), load, of_paddle)
    check_like(own, Format("step_{}.pt", as_torch_has_it, None, of_paddle), profile)


def agents():
    """States of PPO on CartPole."""
    from gymnasium.envs.classic_control import CartPoleEnv
    from stable_baselines3 import PPO

    agent = PPO("MlpPolicy", CartPoleEnv(), n_steps=64, batch_size=32, seed=3, device="cpu", policy_kwargs={"net_arch": [256, 256]})
    for _ in range(COUNT):
        agent.learn(64, reset_num_timesteps=False)
        yield agent


def load_agent(path):
    from stable_baselines3.common.save_util import load_from_zip_file

    shell(f"unzip -tqq {path}")
    with warnings.catch_warnings(action="error"):
        _, params, _ = load_from_zip_file(path, device="cpu")
    return {f"{name}.pth": value for name, value in params.items()}


def save_agent(agent, path):
    state = agent.get_parameters()
    torch.save({"model": state["policy"], "optimizer": state["policy.optimizer"]}, path)


@pytest.mark.slow
@BOTH
def test_an_agent_of_stable_baselines_is_as_small_as_a_zip(profile):
    pytest.importorskip("stable_baselines3")
    own = Format("agent_{}_steps.zip", lambda agent, path: agent.save(path), load_agent, agents)
    check_like(own, Format("step_{}.pt", save_agent, None, agents), profile)


@pytest.mark.slow
def test_equinox_files_are_exact():
    """No array of Equinox has a name."""
    equinox = pytest.importorskip("equinox")

    def load(path):
        like = arrays(named(next(trained())))
        return tensors(equinox.tree_deserialise_leaves(path, like))

    save = lambda state, path: equinox.tree_serialise_leaves(path, arrays(named(state)))  # noqa: E731
    format = Format("step_{}.eqx", save, load)
    with released(format, "balanced") as (mount, plain, names):
        for name in names:
            shell(f"cmp {mount / name} {plain / name}")
            one, other = tensors_of(load(mount / name)), tensors_of(load(plain / name))
            assert one.keys() == other.keys() and all(bits_equal(one[key], other[key]) for key in one)
        assert PLAIN or mount.entry(names[2])["chain_len"] > 0, "each is kept by itself"


@pytest.mark.slow
def test_statistics_in_a_pickle_stay_exact():
    """A scaler, centers of clusters, a replay buffer: nothing proves that training moves them."""
    joblib = pytest.importorskip("joblib")
    rng = np.random.default_rng(5)

    def states():
        kept = {"scaler": {"mean_": rng.standard_normal(4096), "var_": rng.random(4096)}, "cluster_centers_": rng.standard_normal((256, 64)),
                "buffer": {"observations": rng.standard_normal((512, 64)).astype("f4"), "rewards": rng.standard_normal(4096)}}
        for _ in range(COUNT):
            kept["scaler"]["mean_"] = kept["scaler"]["mean_"] + rng.standard_normal(4096) * 1e-3
            kept["cluster_centers_"] = kept["cluster_centers_"] + rng.standard_normal((256, 64)) * 1e-3
            yield kept

    with released(Format("step_{}.joblib", joblib.dump, joblib.load, states), "balanced") as (mount, plain, names):
        for name in names:
            shell(f"cmp {mount / name} {plain / name}")
