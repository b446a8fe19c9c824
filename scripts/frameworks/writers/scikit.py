"""scikit-learn: MLPClassifier by `partial_fit`, with its Adam inside, dumped by joblib or pickled."""

import pickle

import joblib
import numpy as np
import points
from sklearn.metrics import log_loss
from sklearn.neural_network import MLPClassifier

CLASSES = np.arange(points.CLASSES)


def train(job):
    net = MLPClassifier((points.HIDDEN, points.HIDDEN), activation="tanh", learning_rate_init=1e-3, random_state=1)
    for step in job.steps():
        net.partial_fit(*points.batch(step, job.seed), classes=CLASSES)
        if job.due(step):
            path = job.folder / f"step_{step}.{job.variant}"
            if job.variant == "joblib":
                joblib.dump(net, path)
            else:
                path.write_bytes(pickle.dumps(net, protocol=5))
            job.rotate("step_*")
            job.saved()


def resume(job):
    path = job.folder / f"step_{job.at}.{job.variant}"
    net = joblib.load(path) if job.variant == "joblib" else pickle.loads(path.read_bytes())
    for step in job.steps():
        net.partial_fit(*points.batch(step, job.seed))
    x, y = points.HELD_OUT
    return log_loss(y, net.predict_proba(x), labels=CLASSES)
