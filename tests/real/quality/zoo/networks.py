"""Networks that train only in part at any time: the moving parts must not harm the resting ones."""

import torch
from torch import nn
from torch.nn.utils import prune

from .keeper import animal, fit, load, require_choices, require_near, require_no_zero, require_same, require_same_loss

DIM = 128


def generator():
    return nn.Sequential(nn.Linear(32, DIM), nn.ReLU(), nn.Linear(DIM, DIM))


def critic():
    return nn.Sequential(nn.Linear(DIM, DIM), nn.LeakyReLU(0.2), nn.Linear(DIM, 1))


@animal("gan_{}.pt", lossy=["netG.*", "netD.*", "optG.state.*", "optD.state.*", "ema.*"])
class AdversarialPair:
    """A GAN: generator, critic, two Adams with beta1 of 0 and .5, and an average of the generator, in one file."""

    def __init__(self):
        self.g, self.d, self.ema = generator(), critic(), generator()
        self.ema.load_state_dict(self.g.state_dict())
        self.g_step = torch.optim.Adam(self.g.parameters(), 2e-4, betas=(0.5, 0.999))
        self.d_step = torch.optim.Adam(self.d.parameters(), 2e-4, betas=(0.0, 0.9))

    def make(self, path, step):
        for _ in range(10):
            z, real = torch.randn(64, 32), torch.randn(64, DIM) * torch.linspace(0.1, 2, DIM)
            soft = nn.functional.softplus
            fit(self.d_step, lambda: (soft(-self.d(real)) + soft(self.d(self.g(z).detach()))).mean(), 1)
            fit(self.g_step, lambda: soft(-self.d(self.g(z))).mean(), 1)
            with torch.no_grad():
                for slow, fast in zip(self.ema.parameters(), self.g.parameters()):
                    slow.lerp_(fast, 0.05)
        torch.save({"netG": self.g.state_dict(), "netD": self.d.state_dict(), "ema": self.ema.state_dict(),
                    "optG": self.g_step.state_dict(), "optD": self.d_step.state_dict()}, path)

    def use(self, was, now):
        z = torch.randn(500, 32, generator=torch.Generator().manual_seed(1))
        fakes, scores = [], []
        for path in (was, now):
            state, g, d = load(path), generator(), critic()
            g.load_state_dict(state["ema"]), d.load_state_dict(state["netD"])
            fakes.append(g(z).detach())
            scores.append(d(fakes[0]).detach())
        require_near(*fakes, "samples")
        require_near(*scores, "scores")
        assert (fakes[1].std(0) / fakes[0].std(0)).log().abs().max() < 0.05, "the spread of the samples changed"


class Mixture(nn.Module):
    """Experts behind a router that has not chosen some of them for a while."""

    EXPERTS = 8

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, self.EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM)) for _ in range(self.EXPERTS))
        self.register_buffer("expert_bias", torch.zeros(self.EXPERTS))

    def forward(self, x):
        gate, chosen = (self.router(x).softmax(1) + self.expert_bias).max(1)
        out = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            rows = chosen == i
            out[rows] = gate[rows, None] * self.experts[i](x[rows])
        return out


@animal("moe_{}.pt", lossy=["model.router.*", "model.experts.*", "optimizer.state.*"])
class IdleExperts:
    """A mixture of experts of which half get no token between two saves: they rest, then move again."""

    def __init__(self):
        self.net = Mixture()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-3, weight_decay=0)

    def batch(self, count=128, seed=None):
        given = None if seed is None else torch.Generator().manual_seed(seed)
        return torch.randn(count, DIM, generator=given)

    def make(self, path, step):
        self.net.expert_bias[:] = 0
        # Steps 10, 30 and 50 use the first half of the experts, 20 and 40 the second.
        self.net.expert_bias[:4 if step // 10 % 2 else 8] = 0
        self.net.expert_bias[slice(4, 8) if step // 10 % 2 else slice(0, 4)] = -10.0
        x = self.batch()
        fit(self.optimizer, lambda: (self.net(x) - x.roll(1, 1)).square().mean(), 10)
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        losses, x = [], self.batch(300, seed=1)
        for path in (was, now):
            self.net.load_state_dict(load(path)["model"])
            # All experts, the idle ones too.
            losses.append([(expert(x) - x.roll(1, 1)).square().mean().item() for expert in self.net.experts])
        for exact, read in zip(*losses):
            require_same_loss(exact, read)


def backbone():
    return nn.Sequential(nn.Linear(DIM, 256), nn.GELU(), nn.Linear(256, DIM))


@animal("probe_{}.pt", lossy=["model.head.weight", "model.head.bias", "optimizer.state.*"])
class FrozenBackbone:
    """Linear probing: a frozen backbone, of which no optimizer knows, and a trained head."""

    def __init__(self):
        self.net = nn.ModuleDict({"backbone": backbone().requires_grad_(False), "head": nn.Linear(DIM, 300)})
        self.optimizer = torch.optim.AdamW(self.net["head"].parameters(), 1e-3)

    def logits(self, x):
        return self.net["head"](self.net["backbone"](x))

    def make(self, path, step):
        for _ in range(10):
            x = torch.randn(128, DIM)
            fit(self.optimizer, lambda: nn.functional.cross_entropy(self.logits(x), x.argmax(1)), 1)
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        before, after = (load(path)["model"] for path in (was, now))
        for name in (n for n in before if n.startswith("backbone")):
            require_same(before[name], after[name], f"frozen entries of {name}")
        x = torch.randn(500, DIM, generator=torch.Generator().manual_seed(1))
        outs = []
        for state in (before, after):
            self.net.load_state_dict(state)
            outs.append(self.logits(x).detach())
        require_same_loss(*(nn.functional.cross_entropy(out, x.argmax(1)).item() for out in outs))
        require_choices(*outs, "classes")


@animal("head_{}.pt", lossy=["head.weight"])
class FrozenBackboneAlone(FrozenBackbone):
    """Linear probing, model-only: the backbone does not move at all."""

    def make(self, path, step):
        super().make(path, step)
        torch.save(self.net.state_dict(), path)

    def use(self, was, now):
        before, after = load(was), load(now)
        for name in (n for n in before if n.startswith("backbone")):
            require_same(before[name], after[name], f"frozen entries of {name}")
        require_near(before["head.weight"], after["head.weight"], "weights of the head")


@animal("pruned_{}.pt", lossy=["model.*.weight_orig", "model.*.bias", "optimizer.state.*"])
class PruningMask:
    """torch.nn.utils.prune: `weight_orig` and `weight_mask`, pruned further at each save, with AdamW in the file."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(DIM, 256), nn.ReLU(), nn.Linear(256, DIM))
        for layer in (self.net[0], self.net[2]):
            prune.random_unstructured(layer, "weight", 0.2)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-3)

    def make(self, path, step):
        x = torch.randn(128, DIM)
        fit(self.optimizer, lambda: (self.net(x) - x.roll(1, 1)).square().mean(), 10)
        for layer in (self.net[0], self.net[2]):
            prune.l1_unstructured(layer, "weight", 0.1)
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        before, after = (load(path)["model"] for path in (was, now))
        for name in ("0.weight_mask", "2.weight_mask"):
            require_same(before[name], after[name], f"entries of {name}")
        x = torch.randn(300, DIM, generator=torch.Generator().manual_seed(1))
        outs = []
        for state in (before, after):
            self.net.load_state_dict(state)
            outs.append(self.net(x).detach())
        require_near(*outs, "outputs")


@animal("words_{}.pt", lossy=["model.*", "optimizer.state.*"])
class PaddedEmbedding:
    """An embedding with a padding row and Adagrad: rows that no token touched rest, and the padding stays 0."""

    def __init__(self):
        self.net = nn.Sequential(nn.Embedding(2000, 32, padding_idx=0), nn.Linear(32, 32))
        self.optimizer = torch.optim.Adagrad(self.net.parameters(), 0.05)

    def make(self, path, step):
        for _ in range(10):
            tokens = (torch.rand(256).pow(3) * 2000).long()
            fit(self.optimizer, lambda: (self.net(tokens) - torch.sin(tokens[:, None] + torch.arange(32))).square().mean(), 1)
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        assert not after["model"]["0.weight"][0].any(), "the padding row is not 0"
        sums = [state["optimizer"]["state"][0]["sum"] for state in (before, after)]
        require_no_zero(*sums, "sums of squares")
        grown = ((sums[0] == 0) & (sums[1] != 0)).sum().item()
        assert not grown, f"{grown} sums of squares are not 0"
        losses, tokens = [], torch.arange(1, 2000)
        for state in (before, after):
            self.net.load_state_dict(state["model"])
            losses.append((self.net(tokens) - torch.sin(tokens[:, None] + torch.arange(32))).square().mean().item())
        require_same_loss(*losses)


@animal("sparse_{}.pt", lossy=["model.*", "optimizer.state.*"])
class SparseWeights:
    """Weights with the pruned entries set to 0 in place: zeros stay 0, and no other entry becomes 0; with AdamW."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(DIM, 256), nn.ReLU(), nn.Linear(256, DIM))
        self.keep = [torch.rand_like(p) < 0.3 if p.dim() > 1 else torch.ones_like(p).bool() for p in self.net.parameters()]
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-3)

    def make(self, path, step):
        for _ in range(10):
            x = torch.randn(128, DIM)
            fit(self.optimizer, lambda: (self.net(x) - x.roll(1, 1)).square().mean(), 1)
            for parameter, keep in zip(self.net.parameters(), self.keep):
                parameter.data *= keep
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        before, after = (load(path)["model"] for path in (was, now))
        for name in ("0.weight", "2.weight"):
            grown = ((before[name] == 0) & (after[name] != 0)).sum().item()
            assert not grown, f"{grown} pruned entries of {name} are not 0"
