"""The tasks of the study: the model, the start and end of its checkpoints, and their interval."""

import hashlib
import json
import platform
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable

import gpt
import torch

from . import convolution, glyphs, language, lenet, mixture, recommend, training


class Language(gpt.Run):
    """gpt.py's training program, with a larger held-out set than it prints."""

    WINDOWS = 128  # of 128 bytes each: 8 batches

    def __init__(self, seed, dtype="float32", **config):
        super().__init__(gpt.Config(**config), seed, getattr(torch, dtype))

    def measure(self):
        return gpt.held_out_loss(self.model, self.config, self.held_out, self.WINDOWS), {}


# The settings that decide the numbers of each program.
SOURCES = {
    Language: (gpt,),
    lenet.Digits: (training, lenet, glyphs),
    recommend.Recommend: (training, recommend),
    language.Language: (training, gpt, language),
    language.FineTuned: (training, gpt, language),
    language.Halves: (training, gpt, language),
    mixture.Mixture: (training, gpt, language, mixture),
    convolution.Noisy: (training, glyphs, convolution),
}

JUDGED_FROM = 20  # iterations after a restore from which on a promise is judged: held-out loss dips at first, and falls behind later
CALIBRATION, HELD_OUT, HELD_OUT_2 = "calibration", "held_out", "second"
HISTORY = 9  # checkpoints that the store gets before the first restore of a chain: one more than lie between two super-steps
WEIGHED = 33  # checkpoints that a store gets to be weighed; the last one stays exact


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
    grid: int = 25  # iterations between two other measurements, at most
    threads: int = 1
    singles: int = 0  # single restores, each from its own checkpoint, for the papers' rework
    # Only for tasks that judge the promises:
    set: str = ""  # CALIBRATION: its results choose the steps. HELD_OUT: was written down before the steps were chosen, and judged them. HELD_OUT_2: see below.
    starts: tuple[int, ...] = ()  # places of the first checkpoints of chains of restores
    apart: int = 0  # checkpoints from one restore of a chain to the next
    chain: int = 9  # restores of a chain
    weighed_only: bool = False  # no chains: too large a model for so many, but small enough to be weighed
    quick: dict = field(default_factory=dict)  # settings that differ in the smoke version

    def make(self, seed):
        """A new program, as in a new process. Sets the number of threads, because sums depend on it."""
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

    def needed(self):
        """Places of the checkpoints that the uninterrupted run must leave: those that chains begin with, and those to weigh."""
        before = (place for start in self.starts for place in range(max(0, start - HISTORY), start + 2))
        return {*before, *self.weighed()} if self.starts else {*range(self.count)}

    def weighed(self):
        first = self.starts[0] if self.starts else 0
        return range(first, min(first + WEIGHED, self.count))

    def chain_from(self, start):
        """Places of the restores of the chain that begins with the checkpoint at `start`, and the iteration that it ends with."""
        found = [start + n * self.apart for n in range(self.chain)]
        return found, self.iteration(found[-1]) + max(self.offsets)

    def window(self, at):
        """First and last of the iterations that judge a restore at iteration `at`, all before the next crash."""
        return at + JUDGED_FROM, at + min(max(self.offsets), (self.apart + 1) * self.every)

    def windows(self):
        """The windows of the restores of all chains."""
        if self.weighed_only:
            return []
        return sorted({self.window(self.iteration(place)) for start in self.starts for place in self.chain_from(start)[0]})

    def measured(self):
        """Iterations at which the uninterrupted run is measured, to compare restored runs with."""
        grid = {*(range(self.grid, self.length + 1, self.grid) if self.starts else range(self.start, self.length, self.grid))}
        if self.weighed_only:
            return grid
        restores = [place for start in self.starts for place in self.chain_from(start)[0]] or range(self.count)
        return grid | {self.iteration(place) + offset for place in restores for offset in self.offsets}

    def recipe(self):
        """Changes when the uninterrupted run would: with the task, the program's text, torch, and Python (whose library GPT
        reads).
        """
        parts = [self.settings, self.every, self.start, self.length, self.count, self.offsets, self.grid, self.threads]
        parts += [self.starts, self.apart, self.chain] if self.starts else []
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


LATE = (0, 5, 10, 20, 30, 40, 60)  # promises are judged 20 to 60 iterations after a restore
SMALL_JUDGED = {"every": 5, "start": 5, "count": 14, "length": 70, "starts": (1, 2, 3), "apart": 4, "chain": 2, "offsets": (0, 5, 10, 20, 25), "grid": 5}


def judged(name, what, program, every, first, sets, quick=None, weighed_only=False, **settings):
    """Three chains of nine restores each, about 40 iterations apart, that begin at iterations `first`."""
    apart = max(1, -(-40 // every))
    length = max(first) + (WEIGHED - 1) * every if weighed_only else max(first) + 8 * apart * every + max(LATE)
    places = tuple((iteration - every) // every for iteration in first)
    small = {**SMALL_JUDGED, "settings": {**settings, **(quick or {})}}
    return Task(name, what, program, every=every, start=every, length=length, settings=settings, count=length // every, offsets=LATE, grid=10,
                set=sets, starts=places, apart=apart, weighed_only=weighed_only, quick=small)


SHORT = {"batch": 6, "windows": 64}  # many chains of short iterations tell more than few of long ones
GPTS = {"layers": 1, "heads": 2, "width": 64, "context": 32, "batch": 4, "windows": 32}

JUDGED = (
    # Their results choose the steps.
    judged("gpt_w96_i25", "GPT 0.37 M, width 96, 3 layers, beta2 .99, rate 1e-3, every 25 iterations", language.Language, 25, (100, 250, 400), CALIBRATION, GPTS,
           width=96, layers=3, beta2=0.99, rate=1e-3, warmup=20),
    judged("gpt_w64_i20", "GPT 0.12 M, width 64, 2 layers, beta2 .95, rate 2e-3, every 20 iterations", language.Language, 20, (100, 280, 460), CALIBRATION, GPTS,
           width=64, layers=2, beta2=0.95, rate=2e-3, warmup=40),
    judged("gpt_w80_i5", "GPT 0.18 M, width 80, 2 layers, beta2 .999, rate 1e-3, every 5 iterations", language.Language, 5, (100, 280, 460), CALIBRATION, GPTS,
           width=80, layers=2, beta2=0.999, rate=1e-3, warmup=60),
    judged("gpt_w64_i1", "GPT 0.12 M, width 64, 2 layers, beta2 .99, rate 1e-3, every iteration", language.Language, 1, (100, 280, 460), CALIBRATION, GPTS,
           width=64, layers=2, beta2=0.99, rate=1e-3, warmup=20),
    judged("dense_momentum_i10", "dense net 0.27 M, SGD with momentum, every 10 iterations", convolution.Noisy, 10, (100, 280, 460), CALIBRATION, {},
           model="dense", rate=0.01),
    judged("mixture_w64_i20", "mixture of 6 experts, top-1, with a table of embeddings, 0.42 M, AdamW, every 20 iterations", mixture.Mixture, 20, (100, 280, 460),
           CALIBRATION, {**GPTS, "experts": 4}, width=64, layers=1, experts=6, beta2=0.98, rate=1e-3, warmup=40, **SHORT),
    # Written down before the steps were chosen; they judge them.
    judged("held_gpt_w96_i20", "GPT 0.25 M, width 96, 2 layers, beta2 .95, rate 1.5e-3, warm-up 50, every 20 iterations", language.Language, 20, (60, 180, 300),
           HELD_OUT, GPTS, width=96, layers=2, beta2=0.95, rate=1.5e-3, warmup=50, **SHORT),
    judged("held_gpt_w128_i25", "GPT 0.24 M, width 128, 1 layer, beta2 .999, rate 6e-4, warm-up 100, every 25 iterations", language.Language, 25, (100, 200, 300),
           HELD_OUT, GPTS, width=128, layers=1, beta2=0.999, rate=6e-4, warmup=100, **SHORT),
    judged("held_gpt_w48_i5", "GPT 0.16 M, width 48, 5 layers, beta2 .98, rate 2e-3, warm-up 30, every 5 iterations", language.Language, 5, (60, 180, 300),
           HELD_OUT, GPTS, width=48, layers=5, beta2=0.98, rate=2e-3, warmup=30, **SHORT),
    judged("held_gpt_w128x5_i20", "GPT 1.03 M, width 128, 5 layers, beta2 .98, rate 1e-3, warm-up 50, every 20 iterations; weighed only", language.Language, 20, (20,),
           HELD_OUT, GPTS, weighed_only=True, width=128, layers=5, beta2=0.98, rate=1e-3, warmup=50, batch=4, windows=16),
    judged("held_convolution_i20", "convolutional net with batch norm 0.23 M, SGD with momentum, every 20 iterations", convolution.Noisy, 20, (60, 180, 300), HELD_OUT,
           {}, model="convolutional", rate=0.01, batch=16, held=800),
    judged("held_mixture_i20", "mixture of 8 experts, top-1, with a table of embeddings, 0.31 M, AdamW, every 20 iterations", mixture.Mixture, 20, (60, 180, 300),
           HELD_OUT, {**GPTS, "experts": 4}, width=48, layers=1, experts=8, beta2=0.99, rate=1.5e-3, warmup=40, **SHORT),
    judged("held_finetune_i20", "fine-tuning of a GPT 0.18 M, width 80, 2 layers, from Python to C++ headers, rate 2e-4, every 20 iterations", language.FineTuned, 20,
           (40, 160, 280), HELD_OUT, {**GPTS, "before": 20}, width=80, layers=2, text="headers", rate=2e-4, beta2=0.999, warmup=20, **SHORT),
    judged("held_masters_i20", "GPT 0.12 M, bf16 with fp32 masters, width 64, 2 layers, beta2 .95, rate 1e-3, every 20 iterations", language.Halves, 20, (60, 180, 300),
           HELD_OUT, GPTS, width=64, layers=2, beta2=0.95, rate=1e-3, warmup=40, **SHORT),
    # The second set. The program was changed after the results of the first set. So the first set has influenced the program, and
    # cannot judge it any more. Somebody who did not change the program wrote this set down meanwhile. Before the program is
    # frozen, nobody trains a restored run of it, weighs one of its files or looks at one. Then each task runs once, with the
    # frozen program. These tasks differ from all earlier ones, also those that chose steps, in width, depth, beta2, rate, warm-up
    # and interval together. So no constant can fit them because it was fitted to others:
    # - Three GPTs: one with beta2 .999, where errors in second moments last longest; one at an interval of 4, where steps are
    #   longest in updates.
    # - The kinds that failed or were not shown on the first set. Convolutions with batch norm, here with means over the image
    #   before the last layer. A mixture with a table of embeddings, with fewer experts and rows. Fine-tuning with beta2 .999.
    #   fp32 masters beside a bf16 model.
    # - Two of a million parameters, every 22 and every 5 iterations, are only weighed: small files say little about the size of
    #   large ones.
    #
    # Iterations are short, since many chains tell more than long ones. Seeds are those from 1 on, and none is left out.
    judged("second_gpt_w112_i24", "GPT 0.19 M, width 112, 1 layer, beta2 .999, rate 1.2e-3, warm-up 70, every 24 iterations", language.Language, 24, (72, 192, 312),
           HELD_OUT_2, GPTS, width=112, layers=1, beta2=0.999, rate=1.2e-3, warmup=70, **SHORT),
    judged("second_gpt_w72_i4", "GPT 0.21 M, width 72, 3 layers, beta2 .985, rate 8e-4, warm-up 25, every 4 iterations", language.Language, 4, (60, 180, 300),
           HELD_OUT_2, GPTS, width=72, layers=3, heads=6, beta2=0.985, rate=8e-4, warmup=25, **SHORT),
    judged("second_gpt_w60_i15", "GPT 0.20 M, width 60, 4 layers, beta2 .97, rate 2.5e-3, warm-up 60, every 15 iterations", language.Language, 15, (75, 195, 315),
           HELD_OUT_2, GPTS, width=60, layers=4, heads=3, beta2=0.97, rate=2.5e-3, warmup=60, **SHORT),
    judged("second_gpt_w144x4_i22", "GPT 1.04 M, width 144, 4 layers, beta2 .99, rate 8e-4, warm-up 45, every 22 iterations; weighed only", language.Language, 22, (44,),
           HELD_OUT_2, GPTS, weighed_only=True, width=144, layers=4, beta2=0.99, rate=8e-4, warmup=45, batch=4, windows=16),
    judged("second_gpt_w104x8_i5", "GPT 1.07 M, width 104, 8 layers, beta2 .95, rate 6e-4, warm-up 30, every 5 iterations; weighed only", language.Language, 5, (100,),
           HELD_OUT_2, GPTS, weighed_only=True, width=104, layers=8, beta2=0.95, rate=6e-4, warmup=30, batch=4, windows=16),
    judged("second_convolution_i12", "convolutional net with batch norm and pooling 0.19 M, SGD with momentum, every 12 iterations", convolution.Noisy, 12, (60, 180, 300),
           HELD_OUT_2, {}, model="pooled", rate=0.015, batch=16, held=800),
    judged("second_mixture_i22", "mixture of 5 experts, top-1, with a table of embeddings of 3000 rows, 0.27 M, AdamW, every 22 iterations", mixture.Mixture, 22,
           (66, 198, 308), HELD_OUT_2, {**GPTS, "experts": 4}, width=56, layers=1, experts=5, rows=3000, beta2=0.995, rate=1.2e-3, warmup=30, **SHORT),
    judged("second_finetune_i16", "fine-tuning of a GPT 0.16 M, width 104, 1 layer, from Python to C++ headers, rate 4e-4, beta2 .999, every 16 iterations",
           language.FineTuned, 16, (48, 160, 288), HELD_OUT_2, {**GPTS, "before": 20}, width=104, layers=1, text="headers", rate=4e-4, beta2=0.999, warmup=35, **SHORT),
    judged("second_masters_i25", "GPT 0.21 M, bf16 with fp32 masters, width 88, 2 layers, beta2 .98, rate 1.5e-3, every 25 iterations", language.Halves, 25, (75, 200, 300),
           HELD_OUT_2, GPTS, width=88, layers=2, beta2=0.98, rate=1.5e-3, warmup=55, **SHORT),
)  # fmt: skip

TASKS = {
    task.name: task
    for task in (
        *JUDGED,
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
