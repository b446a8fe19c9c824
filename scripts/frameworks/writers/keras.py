"""Keras 3 on torch: whole models as .keras or .h5, and weights with the optimizer as .weights.h5."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import points

ENDINGS = {"keras": "keras", "weights": "weights.h5", "h5": "h5"}


def build():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([layers.Input((points.DIM,)), layers.Dense(points.HIDDEN, "tanh"), layers.Dense(points.HIDDEN, "tanh"),
                              layers.Dense(points.CLASSES)])
    prepare(model)
    return model


def prepare(model):
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def path(job, step):
    return job.folder / f"model-{step}.{ENDINGS[job.variant]}"


def train(job):
    model = build()
    for step in job.steps():
        model.train_on_batch(*points.batch(step, job.seed))
        if job.due(step):
            (model.save_weights if job.variant == "weights" else model.save)(path(job, step))
            job.rotate("model-*")
            job.saved()


def resume(job):
    if job.variant == "weights":
        model = build()
        model.optimizer.build(model.trainable_variables)
        model.load_weights(path(job, job.at))
    elif job.variant == "h5":
        # Keras itself cannot train on with the optimizer that it loads from such a file.
        model = keras.saving.load_model(path(job, job.at), compile=False)
        prepare(model)
    else:
        model = keras.saving.load_model(path(job, job.at))
    for step in job.steps():
        model.train_on_batch(*points.batch(step, job.seed))
    return model.evaluate(*points.HELD_OUT, batch_size=2048, verbose=0)
