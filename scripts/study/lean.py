#!/usr/bin/env python3
"""How much of the training do steps of the lattice keep? From the files of a series alone, without training.

Two things lean against the update, and cost iterations. Noise of the same size costs next to nothing:

- A first moment is rounded to a lattice from 0 in units of u = m / sqrt(v). With coarse steps most elements become 0. Kept is
  <u_q, u> / <u, u>; the rest of the momentum is lost.
- A run that resumes from a restored state begins *on* the lattice of the weights. The next restore rounds any movement of less
  than half a step back. Kept is <moved_q, moved> / <moved, moved>.

Both are weighted with sqrt(v), the size of the gradient: the cost of a lean in loss, to first order. `bits` is the entropy of
the symbols of a difference in an uninterrupted series, where weights lie at random places of the lattice.

    lean.py RAW/gpt_w64_i20 --every 20 --at 200,400,600 --apart 40
"""

import argparse
from pathlib import Path

import torch

WEIGHT_STEPS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0)
MOMENT_STEPS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
TINY = 1e-30


def matrices(state):
    """(name, first moment, second moment) of each matrix of a model whose AdamW has two groups: its matrices, then its vectors."""
    names = [name for name in state["model"] if name != "head.weight"]  # tied to the embedding
    ordered = [name for name in names if state["model"][name].dim() >= 2] + [name for name in names if state["model"][name].dim() < 2]
    moments = state["optimizer"]["state"]
    places = [place for group in state["optimizer"]["param_groups"] for place in group["params"]]
    found = zip(ordered, (moments[place] for place in places), strict=True)
    return [(name, part["exp_avg"], part["exp_avg_sq"]) for name, part in found if state["model"][name].dim() >= 2]


def entropy(symbols):
    """Bits a symbol."""
    counts = torch.unique(symbols, return_counts=True)[1].double()
    share = counts / counts.sum()
    return float(-(share * share.log2()).sum())


class Sums:
    """Over tensors and places: the kept share, the squared error over the square, and bits an element."""

    def __init__(self):
        self.both = self.square = self.error = self.bits = self.elements = 0.0

    def add(self, gradient, value, rounded, symbols):
        self.both += float((gradient * value * rounded).sum())
        self.square += float((gradient * value * value).sum())
        self.error += float((gradient * (rounded - value) ** 2).sum())
        self.bits += entropy(symbols) * symbols.numel()
        self.elements += symbols.numel()

    def words(self):
        return f"{self.both / self.square:8.3f} {self.error / self.square:8.2f} {self.bits / self.elements:8.2f}"


def moments(states, step):
    sums = Sums()
    for state in states:
        for _, m, v in matrices(state):
            root = v.double().sqrt().clamp_min(TINY)
            u = m.double() / root
            g = step * float((u * u).mean().sqrt())
            symbols = (u / g).round()
            sums.add(root, u, symbols * g, symbols)
    return sums


def weights(triples, step):
    """Each of a state, the one an interval later, and the one at the start of the next restore."""
    sums = Sums()
    for now, later, restore in triples:
        for (name, _, _), (_, _, v) in zip(matrices(now), matrices(restore)):
            w, after, then = (state["model"][name].double() for state in (now, later, restore))
            g = step * float(((after - w) ** 2).mean().sqrt())
            moved = then - w
            sums.add(v.double().sqrt(), moved, (moved / g).round() * g, (after / g).round() - (w / g).round())
    return sums


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, help="a series of the study: files step_NNNNN.pt with Adam's state")
    parser.add_argument("--every", type=int, required=True, help="iterations between two checkpoints")
    parser.add_argument("--at", required=True, help="iterations to look at, such as 200,400,600")
    parser.add_argument("--apart", type=int, default=40, help="iterations between two restores (default: %(default)s)")
    arguments = parser.parse_args()
    load = lambda n: torch.load(arguments.raw / f"step_{n:05d}.pt", weights_only=True)
    places = [int(word) for word in arguments.at.split(",")]
    triples = [(load(n), load(n + arguments.every), load(n + arguments.apart)) for n in places]
    print("first moments: step in rms of u, kept, squared error, bits")
    for step in MOMENT_STEPS:
        print(f"{step:6.2f} {moments([now for now, _, _ in triples], step).words()}")
    print(f"weights, restores {arguments.apart} iterations apart: step in rms of the update of {arguments.every}, kept, squared error, bits")
    for step in WEIGHT_STEPS:
        print(f"{step:6.2f} {weights(triples, step).words()}", flush=True)


if __name__ == "__main__":
    main()
