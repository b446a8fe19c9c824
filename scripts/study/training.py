"""Shared by all training programs of the study.

A run's batches are a function of (seed, iteration). So a run that resumes from a checkpoint of iteration n takes the batch of
n + 1 next, as the uninterrupted run did.
"""

import hashlib
import random

import numpy as np
import torch


def generator_of(seed, iteration):
    return torch.Generator().manual_seed(seed * 1_000_003 + iteration)


class Run:
    """A model in training. A subclass sets `model` and `optimizer`, and defines the loss."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.seed, self.iteration = seed, 0

    def loss(self, n):
        """Loss tensor on the batch of iteration `n`."""
        raise NotImplementedError

    def evaluate(self):
        """(loss on the held-out set, other figures by name); runs without gradients."""
        raise NotImplementedError

    def step(self):
        """One iteration; returns the loss on its batch, before the update."""
        self.iteration += 1
        loss = self.loss(self.iteration)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def measure(self):
        self.model.eval()
        answer = self.evaluate()
        self.model.train()
        return answer

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.iteration, "seed": self.seed}

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration = state["step"]


def digest(state):
    """SHA-256 over everything in a state: equal exactly if all tensors have the same bits and all else is equal."""
    found = hashlib.sha256()

    def add(value, where):
        if isinstance(value, dict):
            for key, part in value.items():
                add(part, f"{where}/{key}")
        elif isinstance(value, (list, tuple)):
            for n, part in enumerate(value):
                add(part, f"{where}/{n}")
        elif isinstance(value, torch.Tensor):
            found.update(f"{where} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            found.update(f"{where} {value!r}".encode())

    add(state, "")
    return found.hexdigest()


def nudge(state, seed):
    """Move model weights by one unit in the last place, up or down at random: the smallest change that a run can suffer.

    Moves every element of 32-bit types. Of 16-bit ones, where a unit is as large as an update, it moves one of 256.
    """
    generator = torch.Generator().manual_seed(seed)
    for value in state["model"].values():
        if value.is_floating_point():
            towards = torch.where(torch.rand(value.shape, generator=generator) < 0.5, -1.0, 1.0).to(value.dtype) * float("inf")
            hit = torch.rand(value.shape, generator=generator) < (1.0 if value.element_size() > 2 else 1 / 256)
            value.copy_(torch.where(hit, torch.nextafter(value, towards), value))
