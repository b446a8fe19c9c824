"""MLX: a network and its Adam as safetensors by `mx.save_safetensors`."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import points
from mlx.utils import tree_flatten, tree_unflatten

mx.set_default_device(mx.cpu)


def build():
    mx.random.seed(1)
    net = nn.Sequential(nn.Linear(points.DIM, points.HIDDEN), nn.Tanh(), nn.Linear(points.HIDDEN, points.HIDDEN), nn.Tanh(),
                        nn.Linear(points.HIDDEN, points.CLASSES))
    return net, optim.Adam(1e-3)


def loss_of(net, x, y):
    return nn.losses.cross_entropy(net(x), y, reduction="mean")


def update(net, adam, step, seed):
    x, y = points.batch(step, seed)
    _, gradients = nn.value_and_grad(net, loss_of)(net, mx.array(x), mx.array(y))
    adam.update(net, gradients)
    mx.eval(net.parameters(), adam.state)


def train(job):
    net, adam = build()
    for step in job.steps():
        update(net, adam, step, job.seed)
        if job.due(step):
            mx.save_safetensors(str(job.folder / f"weights_{step}.safetensors"), dict(tree_flatten(net.parameters())))
            mx.save_safetensors(str(job.folder / f"optimizer_{step}.safetensors"), dict(tree_flatten(adam.state)))
            job.rotate("weights_*")
            job.rotate("optimizer_*")
            job.saved()


def resume(job):
    net, adam = build()
    net.load_weights(str(job.folder / f"weights_{job.at}.safetensors"))
    adam.state = tree_unflatten(list(mx.load(str(job.folder / f"optimizer_{job.at}.safetensors")).items()))
    for step in job.steps():
        update(net, adam, step, job.seed)
    x, y = points.HELD_OUT
    return loss_of(net, mx.array(x), mx.array(y)).item()
