"""A small language model with a mixture of experts and a table of embeddings of byte pairs.

Each token goes to the expert with the largest score, and nothing balances them: some experts are seldom used, and so are most
rows of the table.
"""

import gpt
import torch
import torch.nn.functional as F
from torch import nn

from .language import Language

ROWS = 4096  # hashed rows of the table of byte pairs, unless a setting says otherwise


class Experts(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = F.softmax(self.gate(flat), dim=1).max(1)
        out = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            mine = (chosen == n).nonzero().squeeze(1)
            if len(mine):
                out = out.index_add(0, mine, expert(flat[mine]) * weight[mine, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, c, count):
        super().__init__()
        self.heads = c.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.attn, self.proj = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.mixture = Experts(c.width, count)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.attn(self.ln_1(x)).split(w, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.mixture(self.ln_2(x))


class Model(nn.Module):
    def __init__(self, c, count, rows):
        super().__init__()
        self.rows = rows
        self.byte, self.pair, self.place = nn.Embedding(c.vocab, c.width), nn.Embedding(rows, c.width), nn.Embedding(c.context, c.width)
        for table in (self.byte, self.pair, self.place):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(c, count) for _ in range(c.layers))
        self.ln_f, self.head = nn.LayerNorm(c.width), nn.Linear(c.width, c.vocab, bias=False)

    def forward(self, tokens):
        before = F.pad(tokens, (1, 0))[:, :-1]
        x = self.byte(tokens) + self.pair((tokens * 257 + before * 31) % self.rows) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class Mixture(Language):
    def __init__(self, seed, experts=8, rows=ROWS, **settings):
        self.experts, self.rows = experts, rows
        super().__init__(seed, **settings)

    def build(self):
        return Model(self.config, self.experts, self.rows)
