#!/usr/bin/env python3
"""Writes bundle/: checkpoints of tf.train.Checkpoint after one and two steps, and a JSON with TensorFlow's own view. Needs the second
environment of scripts/frameworks.sh."""

import json
import os
import zlib
from pathlib import Path

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3", KERAS_BACKEND="tensorflow")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

HERE = Path(__file__).resolve().parent / "bundle"
OPTIMIZERS = {"adam": lambda: keras.optimizers.Adam(), "adamax": lambda: keras.optimizers.Adamax(),
              "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9), "rmsprop": lambda: keras.optimizers.RMSprop(momentum=0.9),
              "nadam": lambda: keras.optimizers.Nadam(), "amsgrad": lambda: keras.optimizers.Adam(amsgrad=True)}


def view(prefix):
    reader = tf.train.load_checkpoint(str(prefix))
    found = {}
    for key, shape in sorted(reader.get_variable_to_shape_map().items()):
        value = np.asarray(reader.get_tensor(key))
        if value.dtype != object and value.dtype.kind != "S":
            found[key] = {"shape": shape, "dtype": str(value.dtype), "crc": zlib.crc32(value.tobytes())}
    return found


def main():
    HERE.mkdir(exist_ok=True)
    views = {}
    for name, optimizer in OPTIMIZERS.items():
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        layers = keras.layers
        model = keras.Sequential([layers.Input((8,)), layers.Dense(32, "tanh"), layers.BatchNormalization(), layers.Dense(4)])
        model.compile(optimizer=optimizer(), loss="mse")
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, noise=tf.Variable(tf.random.normal((8, 32))))
        for step in range(1, 3 if name == "adam" else 2):
            model.train_on_batch(np.random.standard_normal((16, 8)), np.random.standard_normal((16, 4)))
            prefix = HERE / f"{name}-{step}"
            checkpoint.write(str(prefix))
            views[prefix.name] = view(prefix)
    (HERE / "views.json").write_text(json.dumps(views, indent=1, sort_keys=True))
    # Variables without objects, as programs of TensorFlow 1 have them.
    tf1 = tf.compat.v1
    with tf.Graph().as_default(), tf1.Session() as session:
        kernel = tf1.get_variable("dense/kernel", (8, 32))
        tf1.train.AdamOptimizer().minimize(tf.reduce_sum(kernel**2))
        session.run(tf1.global_variables_initializer())
        tf1.train.Saver().save(session, str(HERE / "graph-1"), write_meta_graph=False, write_state=False)


if __name__ == "__main__":
    main()
