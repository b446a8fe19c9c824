"""The tasks of the study: what is trained, from where to where checkpoints are saved, and how often."""

import hashlib
import json
import platform
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable

import gpt
import torch

from . import glyphs, lenet, recommend, training


class Language(gpt.Run):
    """gpt.py's training program, with a larger held-out set than it prints."""

    WINDOWS = 128  # of 128 bytes each: 8 batches

    def __init__(self, seed, dtype="float32", **config):
        super().__init__(gpt.Config(**config), seed, getattr(torch, dtype))

    def measure(self):
        return gpt.held_out_loss(self.model, self.config, self.held_out, self.WINDOWS), {}


# What decides the numbers of each program.
SOURCES = {Language: (gpt,), lenet.Digits: (training, lenet, glyphs), recommend.Recommend: (training, recommend)}


@dataclass(frozen=True)
class Task:
    """`every` and `start` in iterations; checkpoint i (from 0) is that of iteration start + i * every."""

    name: str
    what: str
    program: Callable[..., object]
    every: int
    start: int
    length: int  # iterations of the whole run, at least one more than `every` after the last checkpoint
    settings: dict = field(default_factory=dict)
    count: int = 34  # checkpoints: the last one stays exact, so 33 can be released
    offsets: tuple[int, ...] = (0, 1, 5, 10, 25, 40)  # iterations after a restore at which the held-out loss is measured
    grid: int = 25  # iterations between two measurements where nothing else asks for one
    threads: int = 1
    singles: int = 0  # single restores, each from a checkpoint of its own, for the papers' rework
    quick: dict = field(default_factory=dict)  # what is different in the smoke version

    def make(self, seed):
        """A program that has not begun, as a new process would have it. Sets the number of threads: sums depend on it."""
        torch.set_num_threads(self.threads)
        return self.program(seed, **self.settings)

    def iteration(self, place):
        return self.start + place * self.every

    def file(self, place):
        return f"step_{self.iteration(place):05d}.pt"

    def saves(self, iteration):
        """Is there a checkpoint of this iteration?"""
        place, rest = divmod(iteration - self.start, self.every)
        return rest == 0 and 0 <= place < self.count

    def recipe(self):
        """Changes when the uninterrupted run would: with the task, the program's text, torch, and Python (whose library GPT reads)."""
        parts = [self.settings, self.every, self.start, self.length, self.count, self.offsets, self.grid, self.threads]
        found = hashlib.sha256(json.dumps([*parts, torch.__version__, platform.python_version()], sort_keys=True).encode())
        for module in SOURCES[self.program]:
            found.update(Path(module.__file__).read_bytes())
        return found.hexdigest()[:16]

    def without_restores(self):
        return replace(self, singles=0)

    def smoke(self):
        return replace(self, **self.quick)


TINY = {"layers": 1, "heads": 2, "width": 64, "context": 32, "batch": 4}
SMALL_GPT = {"settings": TINY, "every": 5, "start": 10, "count": 8, "length": 60, "offsets": (0, 1, 5, 10)}
SMALL_BF16 = {**SMALL_GPT, "settings": {**TINY, "dtype": "bfloat16"}}
SMALL = {"count": 8, "start": 20, "length": 80, "singles": 4, "offsets": (0, 1, 5, 10)}


def digits(name, what, model, optimizer, rate, start, singles=28, batch=64):
    settings = {"model": model, "optimizer": optimizer, "rate": rate, "batch": batch}
    return Task(name, what, lenet.Digits, every=5, start=start, length=600, settings=settings, singles=singles, quick=SMALL)


TASKS = {
    task.name: task
    for task in (
        Task("gpt_i25", "GPT 1.08 M, fp32, AdamW, every 25 iterations", Language, every=25, start=25, length=890, threads=2, quick=SMALL_GPT),
        Task("gpt_i1", "GPT 1.08 M, fp32, AdamW, every iteration", Language, every=1, start=500, length=574, threads=2, grid=10, quick={**SMALL_GPT, "every": 1}),
        Task("gpt_bf16", "GPT 1.08 M, weights and moments bf16, AdamW, every 25 iterations", Language, every=25, start=25, length=890, threads=2,
             settings={"dtype": "bfloat16"}, quick=SMALL_BF16),
        digits("lenet_sgd5", "LeNet-5, SGD, every 5 iterations", "lenet", "sgd", 0.02, 120, batch=128),
        digits("lenet_momentum5", "LeNet-5, SGD with momentum, every 5 iterations", "lenet", "momentum", 0.005, 120),
        digits("lenet_adam", "LeNet-5, Adam, every 5 iterations", "lenet", "adam", 0.0005, 60),
        digits("mlr_sgd5", "multinomial logistic regression, SGD, every 5 iterations", "mlr", "sgd", 0.0025, 20),
        Task("recommend", "recommendation, 2 embeddings of 60k x 16, Adagrad, every 20 iterations", recommend.Recommend, every=20, start=200, length=920,
             quick={"count": 5, "start": 10, "every": 5, "length": 45, "offsets": (0, 1, 5, 10)}),
    )
}  # fmt: skip
