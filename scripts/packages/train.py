"""A network of two layers learns by Adam, and saves a checkpoint every 20 steps, as in docs/START.md but without torch."""

import sys

import numpy as np

directory, resume = sys.argv[1], sys.argv[2:]
random = np.random.default_rng(1)
shapes = {"first.weight": (256, 512), "second.weight": (512, 64)}
weights = {name: random.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}
moments = {name: np.zeros((2, *shape), np.float32) for name, shape in shapes.items()}
goal = random.normal(0, 1 / 16, (256, 64)).astype(np.float32)
step = 0
if resume:
    with np.load(resume[0]) as state:
        step = int(state["step"])
        for name in weights:
            weights[name] = state[f"model.{name}"]
            moments[name] = np.stack([state[f"optimizer.{name}.{slot}"] for slot in ("exp_avg", "exp_avg_sq")])
for step in range(step + 1, step + 201):
    x = random.normal(0, 1, (64, 256)).astype(np.float32)
    hidden = np.maximum(x @ weights["first.weight"], 0)
    error = (hidden @ weights["second.weight"] - x @ goal) / 64
    gradients = {"second.weight": hidden.T @ error, "first.weight": x.T @ ((error @ weights["second.weight"].T) * (hidden > 0))}
    for name, gradient in gradients.items():
        moments[name] += np.array([0.1, 0.001], np.float32)[:, None, None] * (np.stack([gradient, gradient**2]) - moments[name])
        m, v = moments[name][0] / (1 - 0.9**step), moments[name][1] / (1 - 0.999**step)
        weights[name] = (weights[name] - 1e-3 * m / (np.sqrt(v) + 1e-8)).astype(np.float32)
    if step % 20 == 0:
        arrays = {f"model.{name}": values for name, values in weights.items()}
        for name, (m, v) in moments.items():
            arrays |= {f"optimizer.{name}.exp_avg": m, f"optimizer.{name}.exp_avg_sq": v}
        np.savez(f"{directory}/step_{step}.npz", step=step, **arrays)
        print(f"step {step}: loss {64 * (error**2).sum() / 2:.2f}")
