"""Computed or counted tables that stand in a model's state dict like its parameters."""

import math

import torch
from safetensors.torch import save_file
from torch import nn

from .keeper import animal, fit, load, require_finite, require_no_zero, require_same, require_same_choice, require_same_loss

DIM, LENGTH, WORDS = 64, 512, 400


class Body(nn.Module):
    """A trained layer or two for the tables to stand beside."""

    def __init__(self):
        super().__init__()
        self.embed, self.proj, self.head = nn.Embedding(WORDS, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, WORDS)

    def forward(self, tokens):
        return self.head(self.proj(self.embed(tokens)).relu())


class Beside:
    """Trains a body whose state dict also has the `tables` of a step."""

    def __init__(self):
        self.body = Body()
        self.optimizer = torch.optim.AdamW(self.body.parameters(), 1e-3)

    def train(self):
        for _ in range(10):
            tokens = torch.randint(0, WORDS, (256,))
            fit(self.optimizer, lambda: nn.functional.cross_entropy(self.body(tokens), (3 * tokens + 1) % WORDS), 1)

    def make(self, path, step):
        self.train()
        torch.save({**self.body.state_dict(), **self.tables(step)}, path)

    def loss(self, state):
        self.body.load_state_dict({k: v for k, v in state.items() if k in self.body.state_dict()})
        tokens = torch.arange(WORDS)
        return nn.functional.cross_entropy(self.body(tokens), (3 * tokens + 1) % WORDS).item()

    def use(self, was, now):
        before, after = load(was), load(now)
        self.judge(before, after)
        require_same_loss(self.loss(before), self.loss(after))


BODY = ["embed.weight", "proj.weight", "head.weight"]


def rotary(base):
    inverse = base ** -(torch.arange(0, DIM, 2) / DIM)
    angles = torch.outer(torch.arange(LENGTH), inverse)
    return {"rotary.inv_freq": inverse, "rotary.cos_cached": angles.cos(), "rotary.sin_cached": angles.sin()}


@animal("model_{}.pt", lossy=BODY)
class RotaryCache(Beside):
    """Rotary embeddings: `inv_freq`, `cos_cached` and `sin_cached`, which do not move; model-only."""

    def tables(self, step):
        return rotary(10000.0)

    def judge(self, before, after):
        for name in rotary(1.0):
            require_same(before[name], after[name], f"entries of {name}")


@animal("model_{}.pt", lossy=BODY)
class RotaryCacheDynamic(RotaryCache):
    """Rotary embeddings whose base grows with the context: all tables move a little at each save; model-only."""

    def tables(self, step):
        return rotary(10000.0 * (1 + step / 100))


@animal("model_{}.pt", lossy=BODY)
class PositionalTable(Beside):
    """Sinusoidal positions as `pe`, ALiBi's slopes and a causal mask of minus infinity; model-only."""

    def tables(self, step):
        angles = torch.arange(LENGTH)[:, None] * torch.exp(torch.arange(0, DIM, 2) * (-math.log(10000.0) / DIM))
        return {"pos.pe": torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[None], "alibi.slopes": 2.0 ** -torch.arange(1, 65),
                "mask": torch.full((128, 128), -math.inf).triu(1), "bias": torch.ones(128, 128).tril()[None, None]}

    def judge(self, before, after):
        for name in ("pos.pe", "alibi.slopes", "mask", "bias"):
            require_same(before[name], after[name], f"entries of {name}")


@animal("ddpm_{}.pt", lossy=BODY)
class DiffusionSchedule(Beside):
    """A diffusion model's buffers, as in common DDPM code: betas, `alphas_cumprod` and tables made of them; model-only."""

    def tables(self, step):
        betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
        alphas = torch.cumprod(1 - betas, 0)
        before = torch.cat([torch.ones(1, dtype=torch.float64), alphas[:-1]])
        variance = betas * (1 - before) / (1 - alphas)
        tables = {"betas": betas, "alphas_cumprod": alphas, "alphas_cumprod_prev": before, "sqrt_one_minus_alphas_cumprod": (1 - alphas).sqrt(),
                  "sqrt_recipm1_alphas_cumprod": (1 / alphas - 1).sqrt(), "posterior_variance": variance,
                  "posterior_log_variance_clipped": variance.clamp_min(1e-20).log()}
        return {name: table.float() for name, table in tables.items()}

    def judge(self, before, after):
        for name in self.tables(0):
            require_same(before[name], after[name], f"entries of {name}")
        require_finite(1 / after["sqrt_one_minus_alphas_cumprod"], "scales of the noise")


@animal("model_{}.pt", lossy=[f"model.{name}" for name in (*BODY, "*.bias")] + ["optimizer.state.*"])
class ScheduleAndCounters(Beside):
    """Tables of learning rates and counters as floats, in the model's state dict beside an optimizer."""

    def tables(self, step):
        now = torch.arange(2000)
        return {"lr_table": 1e-3 * 0.5 * (1 + torch.cos(now / 2000 * math.pi)), "tokens_seen": torch.arange(64.0) * step * 1e6,
                "wd_schedule": torch.linspace(0.04, 0.4, 2000) + step / 1e4, "num_updates": torch.tensor(float(step))}

    def make(self, path, step):
        self.train()
        torch.save({"model": {**self.body.state_dict(), **self.tables(step)}, "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        before, after = (load(path)["model"] for path in (was, now))
        for name in self.tables(0):
            require_same(before[name], after[name], f"entries of {name}")
        require_same_loss(self.loss(before), self.loss(after))


@animal("tokenizer-{}.safetensors")
class TokenizerTable:
    """A unigram tokenizer's log probabilities and the ranks of merges, between two rounds of its training."""

    PIECES = 16000

    def __init__(self):
        self.counts = torch.logspace(6, 0, self.PIECES)

    def make(self, path, step):
        self.counts *= 1 + 0.05 * torch.rand(self.PIECES)
        scores = (self.counts / self.counts.sum()).log()
        save_file({"scores": scores, "merge_ranks": torch.arange(self.PIECES, dtype=torch.float32),
                   "probabilities": scores.exp()}, path)

    def segment(self, scores, text):
        """The best path through a text of characters below 100; pieces are pairs and single characters."""
        best = [(0.0, -1)]
        for end in range(1, len(text) + 1):
            one = (best[end - 1][0] + scores[text[end - 1]], end - 1)
            two = (best[end - 2][0] + scores[100 + 100 * text[end - 2] + text[end - 1]], end - 2) if end > 1 else one
            best.append(max(one, two))
        return [back for _, back in best]

    def use(self, was, now):
        before, after = load(was), load(now)
        text = torch.randint(0, 100, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
        cuts = [torch.tensor(self.segment(state["scores"].tolist(), text)) for state in (before, after)]
        require_same_choice(*cuts, "cuts of a text")
        require_no_zero(before["probabilities"], after["probabilities"], "probabilities")
        require_same_choice(before["merge_ranks"].argsort(), after["merge_ranks"].argsort(), "merges in order")


def soft_buffer(step, rows=64):
    """Rows of probabilities from near 1 down to 3.7e-14."""
    logits = torch.linspace(0, -31, 100).repeat(rows, 1) + torch.randn(rows, 100) * 0.1 * (1 + step / 100)
    return logits.softmax(1)


def check_soft(before, after):
    require_no_zero(before, after, "probabilities")
    surprise = -(before * after.log()).sum()
    require_finite(surprise, "cross entropies")
    require_same(before.log(), after.log(), "log probabilities")


@animal("model_{}.pt", lossy=BODY)
class SoftmaxBuffer(Beside):
    """Probabilities as a buffer, down to 3.7e-14; model-only."""

    def tables(self, step):
        return {"prior.probs": soft_buffer(step)}

    def judge(self, before, after):
        check_soft(before["prior.probs"], after["prior.probs"])


@animal("model_{}.pt", lossy=[f"model.{name}" for name in (*BODY, "*.bias")] + ["optimizer.state.*"])
class SoftmaxBufferWithOptimizer(Beside):
    """Probabilities as a buffer of less than a tenth of the weights' bytes, with AdamW in the file."""

    ROWS = 10

    def make(self, path, step):
        self.train()
        model = {**self.body.state_dict(), "prior.probs": soft_buffer(step, self.ROWS)}
        torch.save({"model": model, "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        before, after = (load(path)["model"] for path in (was, now))
        check_soft(before["prior.probs"], after["prior.probs"])
        require_same_loss(self.loss(before), self.loss(after))


@animal("model_{}.pt", lossy=[f"model.{name}" for name in (*BODY, "*.bias")] + ["optimizer.state.*"])
class SoftmaxBufferUnpaired(SoftmaxBufferWithOptimizer):
    """Probabilities as a buffer of more than a tenth of the weights' bytes, with AdamW in the file."""

    ROWS = 150


@animal("transitions_{}.pt")
class TransitionMatrix:
    """A hidden Markov model: transition and emission probabilities, and counts, from Baum-Welch."""

    def __init__(self):
        self.state = {"transition": (8 * torch.randn(128, 128)).softmax(1), "emission": (8 * torch.randn(128, 256)).softmax(1)}

    def make(self, path, step):
        for key, table in self.state.items():
            self.state[key] = table.lerp((4 * torch.randn(table.shape)).softmax(1), 0.05)
        torch.save(self.state, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        for key in before:
            require_no_zero(before[key], after[key], f"entries of {key}")
            require_same(before[key].log(), after[key].log(), f"log entries of {key}")


@animal("longtail_{}.pt", lossy=BODY)
class ClassPriors(Beside):
    """Logit adjustment: class priors as a moving average in the model, from .1 to 1e-9; model-only."""

    def __init__(self):
        super().__init__()
        self.prior = torch.logspace(-1, -9, WORDS)

    def tables(self, step):
        self.prior = self.prior * (1 + 0.02 * torch.rand(WORDS))
        return {"class_prior": self.prior.clone()}

    def judge(self, before, after):
        require_no_zero(before["class_prior"], after["class_prior"], "class priors")
        require_same(before["class_prior"].log(), after["class_prior"].log(), "log priors")
