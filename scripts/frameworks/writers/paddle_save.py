"""Paddle: `paddle.save` of a network (.pdparams) and of its Adam (.pdopt)."""

import paddle
import points


def build():
    paddle.set_device("cpu")
    paddle.seed(1)
    linear, tanh = paddle.nn.Linear, paddle.nn.Tanh
    net = paddle.nn.Sequential(linear(points.DIM, points.HIDDEN), tanh(), linear(points.HIDDEN, points.HIDDEN), tanh(),
                               linear(points.HIDDEN, points.CLASSES))
    return net, paddle.optimizer.Adam(1e-3, parameters=net.parameters())


def update(net, adam, step, seed):
    loss_of(net, *points.batch(step, seed)).backward()
    adam.step()
    adam.clear_grad()


def loss_of(net, x, y):
    return paddle.nn.functional.cross_entropy(net(paddle.to_tensor(x)), paddle.to_tensor(y))


def train(job):
    net, adam = build()
    for step in job.steps():
        update(net, adam, step, job.seed)
        if job.due(step):
            paddle.save(net.state_dict(), str(job.folder / f"step_{step}.pdparams"))
            paddle.save(adam.state_dict(), str(job.folder / f"step_{step}.pdopt"))
            job.rotate("*.pdparams")
            job.rotate("*.pdopt")
            job.saved()


def resume(job):
    # A second network of one process would get other names, which its optimizer's state goes by.
    with paddle.utils.unique_name.guard():
        net, adam = build()
        net.set_state_dict(paddle.load(str(job.folder / f"step_{job.at}.pdparams")))
        adam.set_state_dict(paddle.load(str(job.folder / f"step_{job.at}.pdopt")))
        for step in job.steps():
            update(net, adam, step, job.seed)
        return float(loss_of(net, *points.HELD_OUT))
