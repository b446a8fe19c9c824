"""Checkpoints of TensorFlow, written and read by TensorFlow's own code in the second environment of scripts/frameworks.sh.

    tensorflow_bundles.py write FOLDER PLAIN   saves a series into FOLDER, and the same into PLAIN, with a torch-like .npz of each
    tensorflow_bundles.py write FOLDER PLAIN large   the same, one layer of more than 8 MiB, and three checkpoints
    tensorflow_bundles.py read PREFIX NPZ      reads all tensors of a checkpoint, with TensorFlow's checksums, into an .npz
    tensorflow_bundles.py resume PREFIX        loads a checkpoint into a model and trains it; prints the loss before and after
"""

import os
import shutil
import sys
from pathlib import Path

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3", KERAS_BACKEND="tensorflow")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

COUNT = 6


def build(width=256):
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential([layers.Input((96,)), layers.Dense(width, "tanh"), layers.Dense(width, "tanh"), layers.Dense(256),
                              layers.BatchNormalization(), layers.Dropout(0.1), layers.Dense(10)])
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(4)
    centers = rng.standard_normal((10, 96), np.float32)

    def batch():
        labels = rng.integers(0, 10, 64)
        return centers[labels] + rng.standard_normal((64, 96), np.float32), labels

    return model, batch, tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def arrays(prefix):
    reader = tf.train.load_checkpoint(str(prefix))
    found = {key: np.asarray(reader.get_tensor(key)) for key in reader.get_variable_to_shape_map()}
    return {key.replace("/", "|"): value for key, value in found.items() if value.dtype.kind in "fi"}


def write(folder, plain, size=""):
    model, batch, checkpoint = build(1536 if size else 256)
    for step in range(3 if size else COUNT):
        for _ in range(10):
            model.train_on_batch(*batch())
        checkpoint.write(f"{folder}/ckpt-{step}")
        for path in Path(folder).glob(f"ckpt-{step}.*"):
            shutil.copyfile(path, f"{plain}/{path.name}")
        np.savez(f"{plain}/ckpt-{step}.npz", **arrays(f"{plain}/ckpt-{step}"))


def resume(prefix):
    model, batch, checkpoint = build()
    checkpoint.read(prefix).assert_existing_objects_matched()
    held_out = batch()
    before = model.evaluate(*held_out, verbose=0)
    for _ in range(20):
        model.train_on_batch(*batch())
    print(before, model.evaluate(*held_out, verbose=0))


if __name__ == "__main__":
    how, path, *more = sys.argv[1:]
    if how == "write":
        write(path, *more)
    elif how == "read":
        np.savez(more[0], **arrays(path))
    else:
        resume(path)
