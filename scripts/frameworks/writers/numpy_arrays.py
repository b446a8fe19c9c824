"""A network and its Adam in numpy alone: one .npz per checkpoint, or one .npy of all values."""

import numpy as np
import points


def build():
    layers = {f"{layer}.{kind}": values for layer, kinds in points.start().items() for kind, values in kinds.items()}
    return layers, {name: np.zeros_like(v) for name, v in layers.items()}, {name: np.zeros_like(v) for name, v in layers.items()}


def forward(w, x):
    hidden = [x]
    for number in range(3):
        x = hidden[-1] @ w[f"dense_{number}.kernel"] + w[f"dense_{number}.bias"]
        hidden.append(np.tanh(x) if number < 2 else x - x.max(axis=1, keepdims=True))
    logits = hidden.pop()
    return hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def update(w, m, v, step, seed):
    x, y = points.batch(step, seed)
    hidden, logs = forward(w, x)
    slope = np.exp(logs)
    slope[np.arange(len(y)), y] -= 1
    slope /= len(y)
    gradients = {}
    for number in (2, 1, 0):
        gradients[f"dense_{number}.kernel"], gradients[f"dense_{number}.bias"] = hidden[number].T @ slope, slope.sum(axis=0)
        slope = (slope @ w[f"dense_{number}.kernel"].T) * (1 - hidden[number] ** 2)
    for name, g in gradients.items():
        m[name] += np.float32(0.1) * (g - m[name])
        v[name] += np.float32(0.001) * (g * g - v[name])
        w[name] -= 1e-3 * (m[name] / (1 - 0.9**step)) / (np.sqrt(v[name] / (1 - 0.999**step)) + 1e-8)


def loss(w):
    x, y = points.HELD_OUT
    return -forward(w, x)[1][np.arange(len(y)), y].mean(dtype=np.float64)


def parts(w, m, v):
    """Each part, and how its arrays are named."""
    return [("params/{}", w), ("optimizer/{}/exp_avg", m), ("optimizer/{}/exp_avg_sq", v)]


def train(job):
    state = build()
    for step in job.steps():
        update(*state, step, job.seed)
        if not job.due(step):
            continue
        if job.variant == "npz":
            arrays = {part.format(name): values for part, own in parts(*state) for name, values in own.items()}
            np.savez(job.folder / f"step_{step}.npz", step=step, **arrays)
        else:
            np.save(job.folder / f"step_{step}.npy", np.concatenate([values.ravel() for _, own in parts(*state) for values in own.values()]))
        job.rotate("step_*")
        job.saved()


def resume(job):
    state = build()
    if job.variant == "npz":
        with np.load(job.folder / f"step_{job.at}.npz") as arrays:
            for part, own in parts(*state):
                own.update({name: arrays[part.format(name)] for name in own})
    else:
        flat, at = np.load(job.folder / f"step_{job.at}.npy"), 0
        for _, own in parts(*state):
            for name, values in own.items():
                own[name] = flat[at:at + values.size].reshape(values.shape).copy()
                at += values.size
    for step in job.steps():
        update(*state, step, job.seed)
    return loss(state[0])
