"""Files of Keras and h5py on a mount, written and read by their own libraries, beside a torch zip of the same tensors."""

import io
import os
import shutil
import subprocess
import sys
import warnings
import zipfile

# Only the processes that run these tests import keras: that takes seconds.
os.environ["KERAS_BACKEND"] = "torch"

import h5py
import numpy as np
import pytest
import torch
from bounds import check_within_bounds
from formats import COUNT, HALF_A_POINT, Format, released, share
from harness import PLAIN, require_clean, run, run_json, shell
from series import walk

# Keras itself raises this warning at each look at a tensor.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def model_and_data():
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential([layers.Input((96,)), layers.Dense(256, "tanh"), layers.Dense(256, "tanh"), layers.Dense(256),
                              layers.BatchNormalization(), layers.Dropout(0.1), layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)
    rng = np.random.default_rng(4)
    centers = rng.standard_normal((10, 96), np.float32)

    def batch():
        labels = rng.integers(0, 10, 64)
        return centers[labels] + rng.standard_normal((64, 96), np.float32), labels

    return model, batch


def trained():
    """States of a small classifier and its Adam; two kernels have the same shape."""
    model, batch = model_and_data()
    for step in range(10 * COUNT):
        model.train_on_batch(*batch())
        if step % 10 == 9:
            yield model


def torch_zip(model, path):
    """The same tensors, as torch's programs keep them."""
    trainable = {id(variable): number for number, variable in enumerate(model.trainable_variables)}
    numpy = lambda variable: torch.from_numpy(variable.numpy().copy())
    words = {"kernel": "weight", "moving_mean": "running_mean", "moving_variance": "running_var", "gamma": "weight", "beta": "bias"}
    state = {}
    for layer in model.layers:
        for variable in layer.weights:
            if variable.dtype == "float32":
                state[f"{layer.name}.{words.get(variable.name, variable.name)}"] = numpy(variable)
    moments = [numpy(variable) for variable in model.optimizer.variables[2:]]
    assert len(moments) == 2 * len(trainable)
    slots = {number: {"step": torch.tensor(float(model.optimizer.iterations.numpy())), "exp_avg": moments[2 * number],
                      "exp_avg_sq": moments[2 * number + 1]} for number in trainable.values()}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-7, "params": list(slots)}
    torch.save({"model": state, "optimizer": {"state": slots, "param_groups": [group]}}, path)


def arrays(path):
    """All datasets, as tensors. zipfile compares the CRC."""
    source = path
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            source = io.BytesIO(archive.read("model.weights.h5"))
    found = {}

    def visit(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = torch.from_numpy(np.asarray(item[()]).copy())

    with h5py.File(source, "r") as file:
        file.visititems(visit)
    return found


FORMATS = {
    "zip": Format("step_{}.pt", torch_zip, torch.load, trained),
    "keras": Format("step_{}.keras", lambda model, path: model.save(path), arrays, trained),
    "weights": Format("step_{}.weights.h5", lambda model, path: model.save_weights(path), arrays, trained),
    "legacy": Format("step_{}.h5", lambda model, path: model.save(path), arrays, trained),
}


@pytest.fixture(scope="module")
def share_of_zip():
    if PLAIN:
        return 1.0
    with released(FORMATS["zip"], "balanced") as (mount, _, names):
        return share(mount, names)


# The quantized tensors of a file: four kernels and all of Adam's moments; with names also all vectors but the statistics.
QUANTIZED = {"keras": 4 + 20, "weights": 4 + 20, "legacy": 10 + 20}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keras", "weights", "legacy"])
def test_nearly_as_small_as_a_zip_and_within_bounds(kind, share_of_zip):
    with released(FORMATS[kind], "balanced") as (mount, plain, names):
        for name in names[:-1]:
            quantized = check_within_bounds(mount, name, arrays(plain / name), arrays(mount / name))
            assert PLAIN or QUANTIZED[kind] // 2 < quantized <= QUANTIZED[kind], f"{quantized} tensors of {name} were quantized"
            if kind == "keras":
                shell(f"unzip -tqq {mount / name}")
        shell(f"cmp {mount / names[-1]} {plain / names[-1]}")
        own = share(mount, names)
        if not PLAIN:
            mount.umount()
            require_clean(mount.store)
    print(f"{kind}: {own:.2%} of the files, as zip {share_of_zip:.2%}")
    assert PLAIN or own <= share_of_zip + HALF_A_POINT, f"{own:.2%} of the files, as zip {share_of_zip:.2%}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keras", "weights"])
def test_keras_loads_a_released_file_and_trains_on(kind):
    with released(FORMATS[kind], "balanced") as (mount, _, names):
        model, batch = model_and_data()
        stored = arrays(mount / names[1])
        with warnings.catch_warnings(action="error"):
            if kind == "keras":
                import keras

                model = keras.saving.load_model(mount / names[1])
            else:
                model.train_on_batch(*batch())
                model.load_weights(mount / names[1])
        assert np.array_equal(model.layers[0].kernel.numpy(), stored["layers/dense/vars/0"].numpy())
        assert int(model.optimizer.iterations.numpy()) == 20
        before = model.evaluate(*batch(), verbose=0)
        for _ in range(20):
            model.train_on_batch(*batch())
        assert model.evaluate(*batch(), verbose=0) < before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keras", "legacy"])
def test_exact_is_exact(kind):
    with released(FORMATS[kind], "exact") as (mount, plain, names):
        for name in names:
            shell(f"cmp {mount / name} {plain / name}")


def test_arrays_of_h5py_without_proof_are_exact(mount, plain):
    """Plain arrays, chunks and compressed ones, with names that training never uses."""
    names = [f"step_{step}.h5" for step in range(4)]
    for name, state in zip(names, walk(4)):
        with h5py.File(mount / name, "w") as file:
            for path, tensor in state["model"].items():
                file[f"arrays/{path}/x"] = tensor.numpy()
            largest = max(state["model"].values(), key=torch.numel).numpy()
            file.create_dataset("chunks", data=largest, chunks=tuple(max(1, dim // 3) for dim in largest.shape))
            file.create_dataset("packed", data=largest, compression="gzip")
            file.create_dataset("checked", data=largest, fletcher32=True)
        shutil.copyfile(mount / name, plain / name)
    mount.sync()
    mount.require_released(*names[:-1])
    for name in names:
        shell(f"cmp {mount / name} {plain / name}")
    assert PLAIN or mount.entry(names[2])["chain_len"] > 0, "each is kept by itself"


@pytest.mark.stepfs
def test_inspect_says_why_a_filter_is_in_the_way(plain):
    with h5py.File(plain / "w.h5", "w") as file:
        file.create_dataset("w", data=np.ones((50, 50)), compression="gzip")
    said = run("inspect", plain / "w.h5").stdout
    assert "compressed with gzip" in said and "compression=None" in said, said


def own_adam():
    import keras

    class Adam(keras.optimizers.Adam):
        """An author's own class of that name: `v` divides nothing."""

        def update_step(self, gradient, variable, learning_rate):
            index = self._get_variable_index(variable)
            first, second = self._momentums[index], self._velocities[index]
            self.assign_add(first, (gradient - first) * 0.1)
            self.assign_add(second, (gradient * gradient - second) * 0.001)
            self.assign_sub(variable, learning_rate * first)

    return Adam


OPTIONS = {"amsgrad": {"amsgrad": True}, "ema": {"use_ema": True}, "accumulated": {"gradient_accumulation_steps": 2},
           "both": {"amsgrad": True, "use_ema": True}}


@pytest.mark.stepfs
@pytest.mark.parametrize("made", [*OPTIONS, "own.keras"])
def test_an_optimizer_that_looks_like_adam_is_no_adam(plain, made):
    """Frozen layers of the same shape lend the options' variables a weight each."""
    import keras

    keras.utils.clear_session()
    layers = keras.layers
    alike = [layers.Dense(32, use_bias=False, trainable=number > 3) for number in range(6)]
    model = keras.Sequential([layers.Input((32,)), *alike])
    own = made.startswith("own")
    optimizer = own_adam()(1e-3) if own else keras.optimizers.Adam(1e-3, **OPTIONS[made])
    model.compile(optimizer=optimizer, loss="mse")
    model.train_on_batch(np.ones((4, 32), np.float32), np.zeros((4, 32), np.float32))
    path = plain / (made if own else f"{made}.weights.h5")
    (model.save if own else model.save_weights)(path)
    roles = {tensor["path"]: tensor["role"] for tensor in run_json("inspect", "--json", path)["tensors"]}
    assert len(roles) >= 10 and not {"first_moment", "second_moment"} & set(roles.values()), roles


@pytest.mark.stepfs
def test_a_learning_rate_schedule_changes_nothing(plain):
    import keras

    model, batch = model_and_data()
    schedule = keras.optimizers.schedules.CosineDecay(1e-3, 100)
    model.compile(optimizer=keras.optimizers.AdamW(schedule), loss=model.loss)
    model.train_on_batch(*batch())
    model.save(plain / "a.keras")
    roles = [tensor["role"] for tensor in run_json("inspect", "--json", plain / "a.keras")["tensors"]]
    assert roles.count("first_moment") == roles.count("second_moment") == len(model.trainable_variables)


@pytest.mark.stepfs
def test_a_file_that_was_not_closed_is_no_newer_state(mount, plain):
    """Its writer has flushed all datasets, filled some, and died: HDF5 had not cut the file to its length yet."""
    file = plain / "died.h5"
    done = subprocess.run([sys.executable, "-c", DIES, file], check=False)
    assert done.returncode == 9 and file.stat().st_size > 100_000
    said = run("inspect", file).stdout
    assert "not closed by its writer" in said or "cut short" in said, said
    for number in range(2):
        with h5py.File(mount / f"step_{number}.h5", "w") as whole:
            for name in "abcd":
                whole.create_dataset(f"{name}/kernel", data=np.random.default_rng(number).standard_normal((128, 128), np.float32))
    shutil.copyfile(file, mount / "step_2.h5")
    mount.sync()
    assert PLAIN or "step_1.h5" not in mount.released()


DIES = """
import h5py, numpy, os, sys
file = h5py.File(sys.argv[1], "w")
parts = [file.create_dataset(f"{name}/kernel", data=numpy.zeros((128, 128), "<f4")) for name in "abcd"]
file.flush()
for part in parts[:2]:
    part[:] = numpy.ones((128, 128), "<f4")
file["log"] = numpy.ones(4000)
os._exit(9)
"""
