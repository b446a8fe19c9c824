"""Statistics of data and of gradients: means, variances, covariances, probabilities."""

import torch
from torch import nn

from .keeper import animal, fit, load, require_choices, require_finite, require_no_zero, require_same, require_same_loss

DIM = 128


def pictures(count=64):
    """Two kinds of noise, with their labels."""
    kind = torch.randint(0, 4, (count,))
    base = torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(5))
    return base[kind] * 0.3 + torch.randn(count, 8, 16, 16), kind


def convolutions(normal=nn.BatchNorm2d):
    layers = [nn.Conv2d(8, 64, 3, padding=1), normal(64), nn.ReLU(), nn.Conv2d(64, 64, 3, stride=2), normal(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))


class MovingNorm(nn.Module):
    """Batch normalisation with the names that TensorFlow gives its statistics."""

    def __init__(self, width):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("moving_mean", torch.zeros(width))
        self.register_buffer("moving_variance", torch.ones(width))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.moving_mean, self.moving_variance, self.gamma, self.beta, self.training, 0.1, 1e-12)


class Convolutions:
    normal = nn.BatchNorm2d

    def __init__(self):
        self.net = convolutions(self.normal)
        with torch.no_grad():
            # A third of the channels is nearly silent: their variances are far below the others'.
            self.net[0].weight[::3] *= 1e-4
            self.net[0].bias[::3] = 0
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.02, momentum=0.9)
        self.test = pictures(200)
        # One iteration of an untrained net changes a fifth of its choices.
        self.train(20)

    def train(self, iterations=6):
        def loss():
            x, kind = pictures()
            return nn.functional.cross_entropy(self.net.train()(x), kind)

        fit(self.optimizer, loss, iterations)

    def evaluate(self, state):
        net = convolutions(self.normal)
        net.load_state_dict(state)
        with torch.no_grad():
            return net.eval()(self.test[0])

    def judge(self, before, after):
        for name in before:
            if name.endswith(("var", "variance")):
                require_no_zero(before[name], after[name], f"entries of {name}")
        exact, read = self.evaluate(before), self.evaluate(after)
        require_finite(read, "logits")
        require_same_loss(*(nn.functional.cross_entropy(logits, self.test[1]).item() for logits in (exact, read)))
        require_choices(exact, read, "classes")


@animal("model_{}.pt", lossy=["*.weight"])
class BatchNorm(Convolutions):
    """BatchNorm in a convolutional net, model-only."""

    def make(self, path, step):
        self.train()
        torch.save(self.net.state_dict(), path)

    def use(self, was, now):
        self.judge(load(was), load(now))


@animal("model_{}.pt", lossy=["*.weight"])
class BatchNormMoving(BatchNorm):
    """Batch normalisation by hand: `moving_mean`, `moving_variance` and next to no epsilon, model-only."""

    normal = MovingNorm


@animal("checkpoint_{}.pt", lossy=["model.*.weight", "model.*.bias", "optimizer.state.*"])
class BatchNormWithOptimizer(Convolutions):
    """BatchNorm with SGD's momentum in the file."""

    def make(self, path, step):
        self.train()
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        self.judge(load(was)["model"], load(now)["model"])


def correlated(step, count=200):
    """Data whose covariance has eigenvalues from 1e-7 to 1."""
    turn = torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64))[0]
    return torch.randn(count, DIM, dtype=torch.float64) * torch.logspace(-3.5, 0, DIM, dtype=torch.float64) @ turn * (1 + step / 200)


class Moments:
    def __init__(self):
        self.mean, self.covariance = torch.zeros(DIM, dtype=torch.float64), torch.eye(DIM, dtype=torch.float64) * 1e-6

    def update(self, step):
        for _ in range(10):
            x = correlated(step)
            self.mean.lerp_(x.mean(0), 0.05)
            self.covariance.lerp_(x.T.cov(), 0.05)


@animal("whitening_{}.pt")
class Covariance(Moments):
    """Mean and covariance as moving averages, for a Mahalanobis distance."""

    def make(self, path, step):
        self.update(step)
        torch.save({"mean": self.mean.float(), "covariance": self.covariance}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        lowest = torch.linalg.eigvalsh(after["covariance"])[0].item()
        assert lowest > 0, f"the covariance has the eigenvalue {lowest:.2g}: no Cholesky factor"
        require_same(before["covariance"], after["covariance"], "entries of the covariance")


@animal("whitened_{}.pt", lossy=["body.weight"])
class WhiteningLayer(Moments):
    """A layer `whitening.weight` that is computed from the covariance at each save, beside a trained one; model-only."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(DIM, DIM)
        self.optimizer = torch.optim.Adam(self.body.parameters(), 1e-3)

    def make(self, path, step):
        self.update(step)
        values, vectors = torch.linalg.eigh(self.covariance)
        whitening = (vectors * values.clamp_min(1e-9).rsqrt()) @ vectors.T
        white = lambda: (correlated(step) @ whitening).float()
        fit(self.optimizer, lambda: (self.body(x := white()) - x.sin()).square().mean())
        torch.save({"whitening.weight": whitening.float(), **{f"body.{k}": v for k, v in self.body.state_dict().items()}}, path)

    def use(self, was, now):
        before, after = (load(path)["whitening.weight"].double() for path in (was, now))
        torch.manual_seed(1)
        x = correlated(30)
        spread = lambda w: (x @ w).var(0)
        worst = (spread(after) / spread(before)).log2().abs().max().item()
        assert worst < 0.05, f"a whitened variance is off by a factor of {2**worst:.3g}"


@animal("model_{}.pt", lossy=["body.weight"])
class CovarianceNamedWeight(Moments):
    """The covariance itself as `covariance.weight`, and variances of 64 agents as `normal.weight`; model-only."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(DIM, DIM)
        self.optimizer = torch.optim.Adam(self.body.parameters(), 1e-3)
        self.agents = torch.ones(64, DIM, dtype=torch.float64)

    def make(self, path, step):
        self.update(step)
        self.agents = torch.stack([row.lerp(correlated(step).var(0), 0.1) for row in self.agents])
        x = correlated(step).float()
        fit(self.optimizer, lambda: (self.body(x) - x.sin()).square().mean())
        torch.save({"covariance.weight": self.covariance.float(), "normal.weight": self.agents.float(), "normal.bias": self.mean.float(),
                    **{f"body.{k}": v for k, v in self.body.state_dict().items()}}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        require_no_zero(before["normal.weight"], after["normal.weight"], "variances")
        torch.manual_seed(1)
        x = correlated(30, 50).float()
        distances = [torch.einsum("nd,nd->n", x, torch.linalg.solve(s["covariance.weight"], x.T).T) for s in (before, after)]
        require_same(*distances, "Mahalanobis distances")


@animal("swag_{}.pt")
class SwaGaussian:
    """SWAG: the mean of the weights and of their squares; the variance is the difference, and one takes its root."""

    def __init__(self):
        self.net = nn.Linear(DIM, DIM)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05)
        self.mean = self.square = torch.zeros(DIM, DIM)
        self.count = 0

    def make(self, path, step):
        for _ in range(10):
            x = torch.randn(64, DIM)
            fit(self.optimizer, lambda: (self.net(x) - x.flip(1)).square().mean(), 1)
            weight = self.net.weight.detach()
            self.mean = (self.mean * self.count + weight) / (self.count + 1)
            self.square = (self.square * self.count + weight.square()) / (self.count + 1)
            self.count += 1
        torch.save({"weight_mean": self.mean, "weight_sq_mean": self.square, "n_models": torch.tensor(self.count)}, path)

    def use(self, was, now):
        variances = [state["weight_sq_mean"] - state["weight_mean"].square() for state in (load(was), load(now))]
        negative = ((variances[1] < 0) & (variances[0] >= 0)).sum().item()
        assert not negative, f"{negative} of {DIM * DIM} variances are negative"
        require_same(*variances, "variances")


@animal("task_{}.pt", lossy=["model.weight"])
class FisherInformation:
    """Elastic weight consolidation: Fisher's information, the weights that it anchors to, and the model; model-only."""

    def __init__(self):
        self.net = nn.Linear(DIM, DIM)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-3)
        self.anchor = {k: v.clone() for k, v in self.net.state_dict().items()}
        self.fisher = {k: torch.zeros_like(v) for k, v in self.anchor.items()}

    def make(self, path, step):
        for _ in range(10):
            x = torch.randn(64, DIM) * torch.logspace(-4, 0, DIM)
            fit(self.optimizer, lambda: (self.net(x) - x.flip(1)).square().mean(), 1)
            for name, parameter in self.net.named_parameters():
                self.fisher[name].lerp_(parameter.grad.square(), 0.1)
        torch.save({"model": self.net.state_dict(), "fisher": self.fisher, "anchor": self.anchor}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        require_no_zero(before["fisher"]["weight"], after["fisher"]["weight"], "entries of Fisher's information")
        require_same(before["anchor"]["weight"], after["anchor"]["weight"], "anchored weights")
        # A Laplace posterior divides by it.
        require_finite(after["fisher"]["weight"].rsqrt()[before["fisher"]["weight"] > 0], "posterior deviations")
