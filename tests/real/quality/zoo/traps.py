"""Tensors that look as if an optimizer trained them: by shape, by number, by name or by their movement."""

import torch
from torch import nn

from .clusters import DIM, features, require_same_codes
from .keeper import animal, fit, load, require_finite, require_no_zero, require_same, require_same_choice
from .normalisers import DIM as SEEN
from .normalisers import actor, observations, rsl_rl_normalization


@animal("task_{}.pt", lossy=["model.*", "optimizer.state.*"])
class FisherWithOptimizer:
    """Fisher's information and control variates under the names of the model's parameters, with AdamW in the file."""

    def __init__(self):
        self.net = nn.Linear(128, 128)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-3)
        self.fisher = {k: torch.zeros_like(v) for k, v in self.net.state_dict().items()}
        self.variates = {k: torch.zeros_like(v) for k, v in self.net.state_dict().items()}

    def make(self, path, step):
        for _ in range(10):
            x = torch.randn(64, 128) * torch.logspace(-4, 0, 128)
            fit(self.optimizer, lambda: (self.net(x) - x.flip(1)).square().mean(), 1)
            for name, parameter in self.net.named_parameters():
                self.fisher[name].lerp_(parameter.grad.square(), 0.05)
                self.variates[name].lerp_(parameter.grad, 0.05)
        torch.save({"model": self.net.state_dict(), "fisher": self.fisher, "c_local": self.variates,
                    "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        for name in before["fisher"]:
            require_no_zero(before["fisher"][name], after["fisher"][name], f"entries of Fisher's information of {name}")
            require_same(before["c_local"][name], after["c_local"][name], f"control variates of {name}")
        require_finite(after["fisher"]["weight"].rsqrt(), "posterior deviations")


@animal("swag_{}.pt", lossy=["classifier.*", "optimizer.state.*"])
class SwaGaussianWithOptimizer:
    """SWAG under the names of the model's parameters: mean, mean of squares, and SGD's momentum in the file."""

    def __init__(self):
        self.net = nn.Linear(128, 128)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)
        self.mean = {k: torch.zeros_like(v) for k, v in self.net.state_dict().items()}
        self.square = {k: torch.zeros_like(v) for k, v in self.net.state_dict().items()}
        self.count = 0

    def make(self, path, step):
        for _ in range(10):
            x = torch.randn(64, 128)
            fit(self.optimizer, lambda: (self.net(x) - x.flip(1)).square().mean(), 1)
            self.count += 1
            for name, tensor in self.net.state_dict().items():
                self.mean[name].lerp_(tensor, 1 / self.count)
                self.square[name].lerp_(tensor.square(), 1 / self.count)
        torch.save({"classifier": self.net.state_dict(), "mean": self.mean, "sq_mean": self.square, "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        for name in before["mean"]:
            variances = [s["sq_mean"][name] - s["mean"][name].square() for s in (before, after)]
            negative = ((variances[1] < 0) & (variances[0] >= 0)).sum().item()
            assert not negative, f"{negative} of {variances[0].numel()} variances are negative"


@animal("agent_{}.pt", lossy=["agent.actor.*", "optimizer.state.*"])
class UnusedParameters:
    """A policy with its normaliser, and an optimizer that knows as many parameters as the file has tensors.

    Three of them belong to a critic without gradients, which is not saved: the number proves nothing.
    """

    def __init__(self):
        self.agent = nn.ModuleDict({"actor": actor(), "normalizer": rsl_rl_normalization()})
        self.critic = [nn.Parameter(torch.zeros(9)) for _ in range(3)]
        self.optimizer = torch.optim.Adam([*self.agent["actor"].parameters(), *self.critic], 1e-3)

    def make(self, path, step):
        for i in range(5):
            self.agent["normalizer"].update(observations(step + i))
        look = lambda: self.agent["normalizer"](observations(step))
        fit(self.optimizer, lambda: (self.agent["actor"](x := look()) - x[:, :17]).square().mean(), 5)
        torch.save({"agent": self.agent.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        before, after = (load(path)["agent"] for path in (was, now))
        require_no_zero(before["normalizer._var"], after["normalizer._var"], "variances")
        require_no_zero(before["normalizer._std"], after["normalizer._std"], "standard deviations")
        assert after["normalizer._var"].numel() == SEEN


class OneMatrix:
    """A matrix in training, and a covariance of the same shape."""

    def __init__(self):
        self.proj = nn.Linear(128, 128, bias=False)
        self.optimizer = torch.optim.Adam(self.proj.parameters(), 1e-3)
        self.covariance = torch.eye(128, dtype=torch.float64) * 1e-4

    def train(self):
        for _ in range(10):
            x = torch.randn(200, 128) * torch.logspace(-3, 0, 128)
            fit(self.optimizer, lambda: (self.proj(x) - x.flip(1)).square().mean(), 1)
            self.covariance.lerp_(x.double().T.cov(), 0.05)

    def judge(self, before, after):
        lowest = torch.linalg.eigvalsh(after.double())[0].item()
        assert lowest > 0, f"the covariance has the eigenvalue {lowest:.2g}: no Cholesky factor"
        require_same(before, after, "entries of the covariance")


@animal("proj_{}.pt", lossy=["proj.weight", "optimizer.state.*"])
class CovarianceWithOptimizer(OneMatrix):
    """A covariance in a mapping of its own, of the shape of the only parameter that the optimizer in the file trains."""

    def make(self, path, step):
        self.train()
        torch.save({"proj": self.proj.state_dict(), "whiten": {"covariance": self.covariance.float()},
                    "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        self.judge(*(load(path)["whiten"]["covariance"] for path in (was, now)))


@animal("checkpoint-{}/whiten.pt", lossy=["weight", "state.*"])
class CovarianceBesideOptimizer(OneMatrix):
    """A covariance in a file of its own, in a checkpoint whose optimizer.pt trains one parameter of that shape."""

    def make(self, path, step):
        self.train()
        torch.save({"covariance": self.covariance.float(), "inverse": torch.linalg.inv(self.covariance).float()}, path)
        torch.save(self.proj.state_dict(), path.parent / "model.pt")
        torch.save(self.optimizer.state_dict(), path.parent / "optimizer.pt")

    def use(self, was, now):
        before, after = load(was), load(now)
        self.judge(before["covariance"], after["covariance"])
        require_same(before["inverse"], after["inverse"], "entries of the inverse")


@animal("checkpoint-{}/per_layer.pt", lossy=["0.*", "state.*"])
class FisherBesideOptimizer:
    """Fisher's information under the names of the model's layers, in a file beside the model's and the optimizer's."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(128, 128))
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-3)
        self.fisher = {k: torch.zeros_like(v) for k, v in self.net.state_dict().items()}

    def make(self, path, step):
        for _ in range(10):
            x = torch.randn(64, 128) * torch.logspace(-4, 0, 128)
            fit(self.optimizer, lambda: (self.net(x) - x.flip(1)).square().mean(), 1)
            for name, parameter in self.net.named_parameters():
                self.fisher[name].lerp_(parameter.grad.square(), 0.05)
        torch.save(self.fisher, path)
        torch.save(self.net.state_dict(), path.parent / "model.pt")
        torch.save(self.optimizer.state_dict(), path.parent / "optimizer.pt")

    def use(self, was, now):
        before, after = load(was), load(now)
        for name in before:
            require_same(before[name], after[name], f"entries of Fisher's information of {name}")


@animal("averages_{}.pt", lossy=["model.*", "ema.*", "optimizer.state.*"])
class AveragesOfMoreThanWeights:
    """Averages of the parameters, of their squares and of their gradients, all under keys that say so."""

    def __init__(self):
        self.net = nn.Linear(128, 128)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-3)
        state = self.net.state_dict()
        self.mean = {k: v.clone() for k, v in state.items()}
        self.square = {k: v.square() for k, v in state.items()}
        self.gradient = {k: torch.zeros_like(v) for k, v in state.items()}

    def make(self, path, step):
        for _ in range(10):
            x = torch.randn(64, 128)
            fit(self.optimizer, lambda: (self.net(x) - x.flip(1)).square().mean(), 1)
            for name, parameter in self.net.named_parameters():
                self.mean[name].lerp_(parameter.detach(), 0.05)
                self.square[name].lerp_(parameter.detach().square(), 0.05)
                self.gradient[name].lerp_(parameter.grad, 0.05)
        torch.save({"model": self.net.state_dict(), "ema": self.mean, "ema_sq": self.square, "grokfast_ema": self.gradient,
                    "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        for name in before["ema_sq"]:
            require_same(before["ema_sq"][name], after["ema_sq"][name], f"mean squares of {name}")
            require_same(before["grokfast_ema"][name], after["grokfast_ema"][name], f"mean gradients of {name}")


@animal("vq_{}.pt", lossy=["encoder.weight", "decoder.weight"])
class CodebookAlone:
    """A codebook `quantizer.codebook.weight` that follows the mean of data, its counts not saved; model-only."""

    def __init__(self):
        self.encoder, self.decoder, self.book = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), features(256)
        self.optimizer = torch.optim.Adam([*self.encoder.parameters(), *self.decoder.parameters()], 1e-3)

    def make(self, path, step):
        for _ in range(8):
            x = features(512)
            fit(self.optimizer, lambda: (self.decoder(self.encoder(x)) - x).square().mean(), 1)
            near = torch.cdist(x, self.book).argmin(1)
            for code in near.unique():
                self.book[code].lerp_(x[near == code].mean(0), 0.05)
        torch.save({"encoder.weight": self.encoder.weight.detach(), "quantizer.codebook.weight": self.book,
                    "decoder.weight": self.decoder.weight.detach()}, path)

    def use(self, was, now):
        require_same_codes(*(load(path)["quantizer.codebook.weight"] for path in (was, now)))


class Observed:
    """A network in training, and a data set that stays the same."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(DIM, 128), nn.Tanh(), nn.Linear(128, DIM))
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-3)
        self.x = torch.randn(1000, DIM)

    def train(self):
        fit(self.optimizer, lambda: (self.net(self.x) - self.x.roll(1, 1)).square().mean())


@animal("embeddings_{}.pt")
class ComputedEmbeddings(Observed):
    """`embeddings` of a data set, computed by a model at each of its checkpoints: data for a search, not a layer."""

    def make(self, path, step):
        self.train()
        torch.save({"embeddings": self.net(self.x).detach(), "labels": torch.arange(1000)}, path)

    def use(self, was, now):
        before, after = (load(path)["embeddings"] for path in (was, now))
        require_same(before, after, "entries of the embeddings")
        near = lambda table: (torch.cdist(table, table) + 1e9 * torch.eye(1000)).argmin(1)
        require_same_choice(near(before), near(after), "nearest neighbours")


@animal("hooks_{}.pt")
class ActivationsByModule(Observed):
    """Activations of one batch under the names of the modules that they come from, such as `layers.0.mlp.down_proj`."""

    def make(self, path, step):
        self.train()
        with torch.no_grad():
            hidden = self.net[0](self.x[:300])
            out = self.net[2](hidden.tanh())
        torch.save({"model.layers.0.mlp.up_proj": hidden, "model.layers.0.mlp.down_proj": out,
                    "model.layers.0.self_attn.q_proj": out @ self.net[0].weight.detach().T}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        for name in before:
            require_same(before[name], after[name], f"activations of {name}")
