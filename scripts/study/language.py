"""Small byte-level GPTs that differ in width, depth, optimizer and schedule. One continues from a trained model, one is bf16.

The model and the text are those of gpt.py. Batches are a function of (seed, iteration), so a state holds no random generators.
"""

import functools
import sysconfig
from pathlib import Path

import gpt
import torch
from torch import nn

from .training import Run, generator_of

HEAD = 16  # least width of an attention head
CLIP = 1.0  # norm for clipping gradients


@functools.cache
def python():
    """(training bytes, held-out bytes) of Python sources"""
    return gpt.corpus()


@functools.cache
def headers(limit=3 << 20):
    """(training bytes, held-out bytes) of C++ headers, which come with torch: text of another kind."""
    root = Path(torch.__file__).parent / "include/ATen"
    text = bytearray()
    for path in sorted(root.glob("*.h")):
        if len(text) < limit:
            text += path.read_bytes()
    data = torch.frombuffer(text[:limit], dtype=torch.uint8).long()
    cut = len(data) * 95 // 100
    return data[:cut], data[cut:]


TEXTS = {"python": python, "headers": headers}


class Language(Run):
    """`beta2`, `warmup` and the rest of a recipe are settings. `windows` of the held-out text are measured."""

    def __init__(self, seed, width=96, layers=3, heads=4, context=64, batch=8, rate=1e-3, beta2=0.99, warmup=20, decay=0.1, text="python", windows=96):
        super().__init__(seed)
        self.config = gpt.Config(context=context, layers=layers, heads=heads, width=width, batch=batch, rate=rate, warmup=warmup, decay=decay)
        self.windows, self.beta2 = windows, beta2
        self.learn, self.held_out = TEXTS[text]()
        self.model = self.build()
        self.optimizer = self.optimize()

    def build(self):
        return gpt.GPT(self.config)

    def groups(self):
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        return [{"params": matrices, "weight_decay": self.config.decay}, {"params": vectors, "weight_decay": 0.0}]

    def optimize(self):
        return torch.optim.AdamW(self.groups(), lr=self.config.rate, betas=(0.9, self.beta2))

    def batch(self, text, n):
        c = self.config
        return gpt.batch(text, c, torch.randint(len(text) - c.context - 1, (c.batch,), generator=generator_of(self.seed, n)).tolist())

    def rate(self, n):
        return self.config.rate * min(1.0, n / self.config.warmup)

    def loss(self, n):
        return gpt.loss_of(self.model, *self.batch(self.learn, n))

    def backward(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()

    def step(self):
        self.iteration += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.iteration)
        loss = self.loss(self.iteration)
        self.backward(loss)
        return loss.item()

    def evaluate(self):
        c, part = self.config, 32
        starts = torch.linspace(0, len(self.held_out) - c.context - 2, self.windows).long().tolist()
        losses = [gpt.loss_of(self.model, *gpt.batch(self.held_out, c, starts[n : n + part])).item() for n in range(0, self.windows, part)]
        return sum(losses) / len(losses), {}


class FineTuned(Language):
    """A model that was trained on Python before, with other text, a new optimizer and a smaller rate."""

    def __init__(self, seed, before=500, before_rate=1.5e-3, **settings):
        super().__init__(seed, **settings)
        self.before, self.before_rate = before, before_rate

    def step(self):
        if self.iteration == 0:
            self.pretrain()
        return super().step()

    def pretrain(self):
        """A run that starts from a checkpoint is past the first training."""
        settings = {"width": self.config.width, "layers": self.config.layers, "heads": self.config.heads, "context": self.config.context}
        first = Language(self.seed, batch=self.config.batch, rate=self.before_rate, **settings)
        for _ in range(self.before):
            first.step()
        self.model.load_state_dict(first.model.state_dict())


class Halves(Language):
    """The model is bf16. The optimizer keeps fp32 masters and moments, and rounds the masters to the model after each update."""

    def build(self):
        return super().build().to(torch.bfloat16)

    def optimize(self):
        self.masters = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        groups = self.groups()
        master_of = dict(zip(map(id, self.model.parameters()), self.masters))
        for group in groups:
            group["params"] = [master_of[id(p)] for p in group["params"]]
        return torch.optim.AdamW(groups, lr=self.config.rate, betas=(0.9, self.beta2))

    def backward(self, loss):
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        for p, master in zip(self.model.parameters(), self.masters):
            master.grad = p.grad.float()
        nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self):
        for p, master in zip(self.model.parameters(), self.masters):
            p.copy_(master)

    def state(self):
        """As mixed-precision optimizers write it: each parameter's master stands beside its moments."""
        state = super().state()
        moments = state["optimizer"]["state"]
        flat = [p for group in self.optimizer.param_groups for p in group["params"]]
        state["optimizer"]["state"] = {n: {**moments[n], "master_param": p.detach()} for n, p in enumerate(flat)}
        return state

    def load(self, state):
        moments = state["optimizer"]["state"]
        flat = [p for group in self.optimizer.param_groups for p in group["params"]]
        with torch.no_grad():
            for n, p in enumerate(flat):
                p.copy_(moments[n]["master_param"])
        kept = {n: {key: value for key, value in part.items() if key != "master_param"} for n, part in moments.items()}
        super().load({**state, "optimizer": {**state["optimizer"], "state": kept}})
