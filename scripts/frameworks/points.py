"""The task of the writers without torch: points that a fixed random network has sorted into classes, with noise."""

import numpy as np

DIM, HIDDEN, CLASSES, BATCH = 64, 320, 10, 64
_fixed = np.random.default_rng(0)
_TEACHER = [_fixed.standard_normal((DIM, 32)) / 8, _fixed.standard_normal((32, CLASSES))]


def batch(step, seed, size=BATCH):
    """(points, classes) of one step: the same whenever this step is run."""
    rng = np.random.default_rng([seed, step])
    points = rng.standard_normal((size, DIM)).astype(np.float32)
    scores = np.tanh(2 * points @ _TEACHER[0]) @ _TEACHER[1]
    return points, np.argmax(scores + rng.gumbel(size=scores.shape) / 2, axis=1)


HELD_OUT = batch(0, 1 << 20, 2048)


def start(seed=1):
    """Weights of a network of two hidden layers, for libraries that leave the first values to the script."""
    rng = np.random.default_rng(seed)
    sizes = (DIM, HIDDEN, HIDDEN, CLASSES)
    layers = {}
    for number, (rows, columns) in enumerate(zip(sizes, sizes[1:])):
        layers[f"dense_{number}"] = {"kernel": (rng.standard_normal((rows, columns)) / rows**0.5).astype(np.float32),
                                     "bias": np.zeros(columns, np.float32)}
    return layers
