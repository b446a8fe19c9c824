"""The task of the writers that train in torch: the GPT of scripts/gpt.py, small, on Python's own sources."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpt  # noqa: E402
import torch  # noqa: E402

CONFIG = gpt.Config(context=64, layers=2, heads=4, width=96, batch=8)
LEARN, HELD_OUT = gpt.corpus(limit=1 << 20)


def build():
    """(model, AdamW), the same each time."""
    torch.manual_seed(1)
    return gpt.build(CONFIG)


def batch(step, seed, rank=0):
    """The windows of one step depend on the step and the seed only, so a resumed run sees the uninterrupted one's."""
    draw = random.Random(f"{seed} {step} {rank}")
    return gpt.batch(LEARN, CONFIG, [draw.randrange(len(LEARN) - CONFIG.context - 1) for _ in range(CONFIG.batch)])


class Windows(torch.utils.data.Dataset):
    """The same windows for libraries that draw batches themselves: item i belongs to step i // batch + 1."""

    def __init__(self, seed, steps, keys=("x", "y")):
        self.seed, self.steps, self.keys = seed, steps, keys

    def __len__(self):
        return self.steps * CONFIG.batch

    def __getitem__(self, i):
        x, y = batch(i // CONFIG.batch + 1, self.seed)
        return dict(zip(self.keys, (x[i % CONFIG.batch], y[i % CONFIG.batch])))


def backward(model, x, y):
    loss = gpt.loss_of(model, x, y)
    loss.backward()
    return loss


def update(model, optimizer, step, seed, rank=0):
    optimizer.zero_grad(set_to_none=True)
    backward(model, *batch(step, seed, rank))
    optimizer.step()


def loss(model):
    return gpt.held_out_loss(model, CONFIG, HELD_OUT)


def train(job, save):
    """The loop of a script that saves by itself: `save(model, optimizer, step)`."""
    model, optimizer = build()
    for step in job.steps():
        update(model, optimizer, step, job.seed)
        if job.due(step):
            save(model, optimizer, step)
            job.saved()


def go_on(job, model, optimizer):
    for step in job.steps():
        update(model, optimizer, step, job.seed)
    return loss(model)
