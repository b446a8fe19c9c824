"""TensorFlow: CheckpointManager with `max_to_keep`, of a Keras model and its Adam."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import points
import tensorflow as tf
from job import KEEP, EVERY


def build():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([layers.Input((points.DIM,)), layers.Dense(points.HIDDEN, "tanh"), layers.Dense(points.HIDDEN, "tanh"),
                              layers.Dense(points.CLASSES)])
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def train(job):
    model, checkpoint = build()
    manager = tf.train.CheckpointManager(checkpoint, str(job.folder), max_to_keep=KEEP)
    for step in job.steps():
        model.train_on_batch(*points.batch(step, job.seed))
        if job.due(step):
            manager.save()
            job.saved()


def resume(job):
    model, checkpoint = build()
    checkpoint.restore(str(job.folder / f"ckpt-{job.at // EVERY}")).assert_existing_objects_matched()
    for step in job.steps():
        model.train_on_batch(*points.batch(step, job.seed))
    return model.evaluate(*points.HELD_OUT, batch_size=2048, verbose=0)
