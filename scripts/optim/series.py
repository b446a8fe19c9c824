"""A small GPT, and the optimizers that people train with, each from its own library, with a suitable rate.

An entry is a name, the library that writes the state, the learning rate, and a function of the model that makes the optimizer.
"""

import importlib
from dataclasses import dataclass
from typing import Callable

import gpt
import torch

# Small enough for a few hundred iterations on one core; every matrix is large enough to have tiles of its own.
SMALL = gpt.Config(context=32, layers=2, heads=4, width=64, batch=8)


@dataclass
class Entry:
    writer: str
    rate: float
    make: Callable
    # Modules beside torch and transformers that must be there, in the order of import.
    needs: str = ""


def library(name, optimizer, **more):
    """An optimizer of a package that is imported only on demand."""
    return lambda model, rate: getattr(importlib.import_module(name), optimizer)(list(model.parameters()), lr=rate, **more)


def of_torch(optimizer, **more):
    return library("torch.optim", optimizer, **more)


class Group(dict):
    """A group whose rate is a tensor and stays one, because torchao requires it."""

    def __setitem__(self, key, value):
        self["lr"].fill_(value) if key == "lr" else super().__setitem__(key, value)


def torchao(model, rate):
    optimizer = importlib.import_module("torchao.optim").AdamW8bit(list(model.parameters()), lr=rate)
    optimizer.param_groups = [Group(group) for group in optimizer.param_groups]
    return optimizer


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as in Moonlight's training script: `moment1` and `moment2` are AdamW's. Muon's
    own steps are torch's.
    """

    def __init__(self, model, rate):
        matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "wte" not in n and "wpe" not in n]
        rest = [p for n, p in model.named_parameters() if not any(p is q for q in matrices)]
        super().__init__([{"params": matrices, "muon": True}, {"params": rest, "muon": False}], {"lr": rate})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if group["muon"]:
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(p)).mul_(0.95).add_(p.grad)
                    update = torch.optim._muon._zeropower_via_newtonschulz(p.grad.add(buffer, alpha=0.95), (3.4445, -4.775, 2.0315), 5, 1e-7)
                    p.mul_(1 - group["lr"] * 0.1).add_(update.to(p), alpha=-0.2 * group["lr"] * max(p.shape) ** 0.5)
                    continue
                state["step"] = state.get("step", 0) + 1
                m = state.setdefault("moment1", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                v = state.setdefault("moment2", torch.zeros_like(p)).lerp_(p.grad.square(), 0.05)
                scale = (1 - 0.9 ** state["step"]) / (1 - 0.95 ** state["step"]) ** 0.5
                p.mul_(1 - group["lr"] * 0.1).add_(m / (1e-8 + v.sqrt()), alpha=-group["lr"] / scale)


def galore(model, rate):
    optimizer = importlib.import_module("galore_torch").GaLoreAdamW
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return optimizer([{"params": rest}, {"params": matrices, "rank": 32, "update_proj_gap": 50, "scale": 1.0, "proj_type": "std"}], lr=rate)


def muon(model, rate):
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=rate)


ENTRIES = {
    "AdamW": Entry("torch", 1e-3, of_torch("AdamW", betas=(0.9, 0.99))),
    "Adam, AMSGrad": Entry("torch", 1e-3, of_torch("Adam", amsgrad=True)),
    "Lion": Entry("lion-pytorch", 2e-4, library("lion_pytorch", "Lion", weight_decay=0.1), "lion_pytorch"),
    "Adamax": Entry("torch", 2e-3, of_torch("Adamax")),
    "Adadelta": Entry("torch", 1.0, of_torch("Adadelta")),
    "Adafactor, beta1": Entry("transformers", 2e-3, library("transformers", "Adafactor", relative_step=False, scale_parameter=False, beta1=0.9)),
    "Adafactor": Entry("torch", 1e-2, of_torch("Adafactor")),
    "RMSprop": Entry("torch", 5e-4, of_torch("RMSprop")),
    "RMSprop, centered": Entry("torch", 5e-4, of_torch("RMSprop", centered=True)),
    "Rprop": Entry("torch", 1e-4, of_torch("Rprop", etas=(0.5, 1.05), step_sizes=(1e-7, 1e-3))),
    "ASGD": Entry("torch", 0.3, of_torch("ASGD")),
    "AdamW, schedule-free": Entry("schedulefree", 2e-3, library("schedulefree", "AdamWScheduleFree"), "schedulefree"),
    "SGD, schedule-free": Entry("schedulefree", 2.0, library("schedulefree", "SGDScheduleFree"), "schedulefree"),
    "Muon": Entry("torch", 2e-2, muon),
    "Muon and AdamW": Entry("as Moonlight's script", 1e-3, MuonAndAdamW),
    "GaLore AdamW": Entry("galore-torch", 1e-3, galore, "bitsandbytes galore_torch"),
    "SOAP": Entry("pytorch_optimizer", 1e-3, library("pytorch_optimizer", "SOAP"), "pytorch_optimizer"),
    "Shampoo": Entry("pytorch_optimizer", 1e-2, library("pytorch_optimizer", "Shampoo", preconditioning_compute_steps=20), "pytorch_optimizer"),
    "AdamW, 8 bits": Entry("bitsandbytes", 1e-3, library("bitsandbytes.optim", "AdamW8bit"), "bitsandbytes"),
    "AdamW, 32 bits": Entry("bitsandbytes", 1e-3, library("bitsandbytes.optim", "AdamW32bit"), "bitsandbytes"),
    "AdamW, 8 bits of torchao": Entry("torchao", 1e-3, torchao, "torchao"),
}


class Run(gpt.Run):
    """A run of the GPT with a given optimizer."""

    def __init__(self, name, seed, config=SMALL):
        entry = ENTRIES[name]
        config = gpt.Config(**{**vars(config), "rate": entry.rate})
        super().__init__(config, seed)
        self.optimizer = entry.make(self.model, entry.rate)
        # For evaluating and saving, schedule-free optimizers hold another iterate of the parameters.
        self.has_modes = hasattr(self.optimizer, "eval") and hasattr(self.optimizer, "train")
        self.mode("train")

    def mode(self, which):
        if self.has_modes:
            getattr(self.optimizer, which)()

    def load(self, state):
        self.mode("eval")
        super().load(state)
        self.mode("train")

    def state(self):
        self.mode("eval")
        return super().state()

    def loss(self, windows=96):
        """Held-out loss; draws no random numbers."""
        self.mode("eval")
        loss = gpt.held_out_loss(self.model, self.config, self.held_out, windows)
        self.mode("train")
        return loss

    def save(self, *paths):
        state = self.state()
        for path in paths:
            torch.save(state, path)
        self.mode("train")

    def steps(self, count):
        for _ in range(count):
            self.step()
