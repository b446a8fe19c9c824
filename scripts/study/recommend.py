"""Clicks of users on items, two embedding tables with Adagrad: the typical state of recommendation models.

Users and items are drawn by Zipf's law. Each has a hidden vector that the model never sees. The probability of a click grows
with the product of the two. Rows that are not drawn between two checkpoints do not change.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from .training import Run, generator_of

ROWS, WIDTH, HIDDEN = 60_000, 16, 6
EXPONENT = 1.0  # of Zipf's law
DATA_SEED = 77
HELD_OUT = 40_000


@functools.cache
def world():
    """(cumulative probabilities of the ranks, hidden vectors of users, of items, which user / item has which rank)"""
    generator = torch.Generator().manual_seed(DATA_SEED)
    share = torch.arange(1, ROWS + 1, dtype=torch.float64).pow(-EXPONENT)
    hidden = [torch.randn(ROWS, HIDDEN, generator=generator) for _ in range(2)]
    rank = [torch.randperm(ROWS, generator=generator) for _ in range(2)]
    return (share.cumsum(0) / share.sum()), *hidden, *rank


def clicks(count, generator):
    """(users, items, 1. where there was a click)"""
    shares, of_user, of_item, user_rank, item_rank = world()
    draw = lambda: torch.searchsorted(shares, torch.rand(count, generator=generator, dtype=torch.float64)).clamp(max=ROWS - 1)
    users, items = user_rank[draw()], item_rank[draw()]
    odds = 1.2 * (of_user[users] * of_item[items]).sum(1) - 1.0
    return users, items, (torch.rand(count, generator=generator) < torch.sigmoid(odds)).float()


class Recommender(nn.Module):
    """Both rows and their product through a small network."""

    def __init__(self, rows=ROWS):
        super().__init__()
        self.user = nn.Embedding(rows, WIDTH)
        self.item = nn.Embedding(rows, WIDTH)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)
        self.top = nn.Sequential(nn.Linear(3 * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, users, items):
        u, i = self.user(users), self.item(items)
        return (self.top(torch.cat([u, i, u * i], 1)).squeeze(1) + (u * i).sum(1)).float()


class Recommend(Run):
    def __init__(self, seed, batch=2048):
        super().__init__(seed)
        self.size = batch
        self.model = Recommender()
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.05)
        self.fixed = clicks(HELD_OUT, torch.Generator().manual_seed(DATA_SEED + 1))

    def loss(self, n):
        users, items, clicked = clicks(self.size, generator_of(self.seed, n))
        return F.binary_cross_entropy_with_logits(self.model(users, items), clicked)

    def evaluate(self):
        users, items, clicked = self.fixed
        logits = self.model(users, items)
        right = ((logits > 0) == (clicked > 0.5)).float().mean().item()
        return F.binary_cross_entropy_with_logits(logits, clicked).item(), {"accuracy": right}
