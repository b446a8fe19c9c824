#!/usr/bin/env python3
"""Train a small byte-level GPT on the Python standard library's sources and write full checkpoints.

An ordinary training script: it knows nothing of stepfs and saves with plain `torch.save(state, path)`. A checkpoint holds
model, optimizer (AdamW), the random number generators of torch, numpy and Python, the step, the configuration and the held-out
loss at that step. The same seed and the same number of threads give the same bytes.

    gpt.py --out DIR --iters 300 --every 25          train, one checkpoint every 25 iterations
    gpt.py --out DIR --resume FILE --iters 25        continue from a checkpoint
    gpt.py --evaluate FILE...                        held-out loss of each file, beside the recorded one
"""

import argparse
import math
import os
import random
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass

# Waiting threads must not spin: with another program on the same cores, spinning costs most of the speed.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    """About a million parameters: large enough that weights dominate the file, small enough for two cores."""

    vocab: int = 256
    context: int = 128
    layers: int = 5
    heads: int = 4
    width: int = 128
    batch: int = 16
    rate: float = 1e-3
    warmup: int = 20
    decay: float = 0.1


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.heads
        self.ln_1 = nn.LayerNorm(c.width)
        self.attn = nn.Linear(c.width, 3 * c.width)
        self.proj = nn.Linear(c.width, c.width)
        self.ln_2 = nn.LayerNorm(c.width)
        self.up = nn.Linear(c.width, 4 * c.width)
        self.down = nn.Linear(4 * c.width, c.width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.attn(self.ln_1(x)).split(w, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab, c.width)
        self.wpe = nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.ln_f = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        self.head.weight = self.wte.weight  # tied, as in nanoGPT: one storage under two names
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * c.layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def corpus(limit=4 << 20):
    """(training bytes, held-out bytes): top-level modules and packages of the standard library, in a fixed order."""
    root = sysconfig.get_path("stdlib")
    text = bytearray()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})
        for name in sorted(files):
            if name.endswith(".py") and len(text) < limit:
                with open(os.path.join(folder, name), "rb") as f:
                    text += f.read()
    if len(text) < 100_000:
        sys.exit(f"gpt.py: found only {len(text)} bytes of Python sources under {root}")
    data = torch.frombuffer(text[:limit], dtype=torch.uint8).long()
    cut = len(data) * 95 // 100
    return data[:cut], data[cut:]


def batch(data, c, starts):
    x = torch.stack([data[s : s + c.context] for s in starts])
    y = torch.stack([data[s + 1 : s + 1 + c.context] for s in starts])
    return x, y


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


@torch.no_grad()
def held_out_loss(model, c, data, windows=64):
    """Mean loss over `windows` windows spread evenly over the held-out text; draws no random numbers."""
    starts = torch.linspace(0, len(data) - c.context - 2, windows).long().tolist()
    model.eval()
    x, y = batch(data, c, starts)
    value = loss_of(model, x, y).item()
    model.train()
    return value


def build(c, dtype=torch.float32):
    model = GPT(c).to(dtype)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": c.decay}, {"params": vectors, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=c.rate, betas=(0.9, 0.99))


def rng_state():
    """The three generators, as types that `torch.load(weights_only=True)` accepts."""
    name, keys, *rest = np.random.get_state()
    return {"torch": torch.get_rng_state(), "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
            "python": random.getstate()}


def set_rng_state(state):
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))


class Run:
    """A training run: the state that one iteration needs and changes. Weights and moments have the type `dtype`."""

    def __init__(self, config, seed, dtype=torch.float32):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.config, self.iteration = config, 0
        self.learn, self.held_out = corpus()
        self.model, self.optimizer = build(config, dtype)

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        set_rng_state(state["rng"])
        self.iteration = state["step"]

    def state(self):
        loss = held_out_loss(self.model, self.config, self.held_out)
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "rng": rng_state(), "step": self.iteration,
                "config": asdict(self.config), "loss": loss}

    def step(self):
        """One iteration; returns the loss on its batch, before the update."""
        c = self.config
        self.iteration += 1
        for group in self.optimizer.param_groups:
            group["lr"] = c.rate * min(1.0, self.iteration / c.warmup)
        x, y = batch(self.learn, c, torch.randint(len(self.learn) - c.context - 1, (c.batch,)).tolist())
        loss = loss_of(self.model, x, y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def train(outs, iters, every, resume=None, seed=1, threads=2, config=None, say=print, after_save=None):
    """Train `iters` iterations and save every `every` of them into each directory of `outs`; returns the file names.

    `after_save(name)` is called after each save, between two iterations.
    """
    torch.set_num_threads(threads)
    state = torch.load(resume, map_location="cpu") if resume else None
    run = Run(Config(**state["config"]) if state else config or Config(), seed)
    if state:
        run.load(state)
    first = run.iteration
    count = sum(p.numel() for p in run.model.parameters())
    where = f"resumed from {os.path.basename(resume)} at step {first}" if resume else f"seed {seed}"
    say(f"GPT, {count / 1e6:.2f} M parameters, fp32, AdamW; {len(run.learn) / 1e6:.1f} MB of text; {where}")
    names, began = [], time.perf_counter()
    for n in range(first + 1, first + iters + 1):
        loss = run.step()
        if n % every == 0:
            state = run.state()
            speed = (n - first) / (time.perf_counter() - began)
            name, saving = f"step_{n:05d}.pt", time.perf_counter()
            for out in outs:
                torch.save(state, f"{out}/{name}")
            saving = (time.perf_counter() - saving) / len(outs)
            size = os.path.getsize(f"{outs[0]}/{name}")
            names.append(name)
            say(f"step {n:5d}   loss {loss:.4f}   held-out {state['loss']:.4f}   {speed:4.1f} it/s   "
                f"{name}  {size / 1e6:.1f} MB saved in {saving * 1e3:3.0f} ms")
            if after_save:
                after_save(name)
    return names


def evaluate(path):
    """(step, held-out loss of the file's weights, held-out loss recorded in it)."""
    state = torch.load(path, map_location="cpu")
    c = Config(**state["config"])
    model, _ = build(c)
    model.load_state_dict(state["model"])
    return state["step"], held_out_loss(model, c, corpus()[1]), state["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="DIR", help="where the checkpoints go")
    parser.add_argument("--iters", type=int, default=300)
    parser.add_argument("--every", type=int, default=25, help="iterations between two checkpoints")
    parser.add_argument("--resume", metavar="FILE", help="continue from this checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate", metavar="FILE", nargs="+", help="print held-out losses instead of training")
    args = parser.parse_args()
    say = lambda line: print(line, flush=True)
    if args.evaluate:
        torch.set_num_threads(args.threads)
        for path in args.evaluate:
            step, now, then = evaluate(path)
            say(f"{os.path.basename(path)}   step {step:5d}   held-out loss {now:.4f}, recorded when saved {then:.4f}, "
                f"difference {now - then:+.4f}")
    elif args.out:
        os.makedirs(args.out, exist_ok=True)
        train([args.out], args.iters, args.every, args.resume, args.seed, args.threads, say=say)
    else:
        parser.error("one of --out and --evaluate is needed")


if __name__ == "__main__":
    main()
