"""Trained parameters that are used under an exponential, a root or a division: their optimizer is in the file, or is not."""

import torch
from torch import nn
from torch.nn.utils import parametrizations

from .keeper import animal, fit, load, require_choices, require_finite, require_near, require_no_zero, require_same, require_same_loss

DIM = 192


class Saved:
    """Trains `self.net` by `loss`, and saves it with or without its optimizer."""

    alone, rate = False, 1e-3

    def start(self, net):
        self.net = net
        self.optimizer = torch.optim.AdamW(net.parameters(), self.rate)

    def make(self, path, step):
        fit(self.optimizer, self.loss, 10)
        model = self.net.state_dict()
        torch.save(model if self.alone else {"model": model, "optimizer": self.optimizer.state_dict()}, path)

    def states(self, was, now):
        return [load(path) if self.alone else load(path)["model"] for path in (was, now)]

    def result(self, state, call):
        self.net.load_state_dict(state)
        with torch.no_grad():
            return call(self.net)


class StateSpace(nn.Module):
    """One selective state space layer with Mamba's parameters."""

    STATES = 64

    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.arange(1, self.STATES + 1).float().log().repeat(DIM, 1))
        self.D = nn.Parameter(torch.ones(DIM))
        self.dt_bias = nn.Parameter(torch.linspace(-6, -2, DIM))
        self.in_proj, self.out_proj = nn.Linear(DIM, 2 * self.STATES), nn.Linear(DIM, DIM)

    def forward(self, x):
        step = nn.functional.softplus(self.dt_bias)
        decay = torch.exp(step[:, None] * -self.A_log.exp())
        state, outs = torch.zeros(len(x), DIM, self.STATES), []
        for at in range(x.shape[1]):
            b, c = self.in_proj(x[:, at]).chunk(2, 1)
            state = state * decay + step[:, None] * x[:, at, :, None] * b[:, None]
            outs.append((state * c[:, None]).sum(2) + self.D * x[:, at])
        return self.out_proj(torch.stack(outs, 1))


class Mamba(Saved):
    def __init__(self):
        self.start(StateSpace())

    def loss(self):
        x = torch.randn(4, 6, DIM)
        return (self.net(x) - x.roll(1, 1)).square().mean()

    def use(self, was, now):
        before, after = self.states(was, now)
        rates = [-state["A_log"].exp() for state in (before, after)]
        # A slow state remembers 1 / rate steps: that must not change by more than a few percent.
        require_near(rates[0], rates[1], "decay rates")
        memory = (rates[1] / rates[0]).log().abs().max().item()
        assert memory < 0.05, f"a state's memory is off by {100 * memory:.3g} %"
        x = torch.randn(4, 40, DIM, generator=torch.Generator().manual_seed(1))
        outs = [self.result(state, lambda net: net(x)) for state in (before, after)]
        require_finite(outs[1], "outputs")
        require_near(*outs, "outputs")


@animal("mamba_{}.pt", lossy=["model.*", "optimizer.state.*"])
class MambaWithOptimizer(Mamba):
    """Mamba: `A_log`, `D` and `dt_bias` with AdamW in the file."""


@animal("mamba_{}.pt", lossy=["in_proj.weight", "out_proj.weight"])
class MambaAlone(Mamba):
    """Mamba, model-only: nothing proves that `A_log`, `D` and `dt_bias` are trained."""

    alone = True


class Autoencoder(nn.Module):
    """A variational autoencoder whose decoder has a learned variance of each pixel."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(DIM, 128), nn.Linear(64, DIM)
        self.log_var = nn.Parameter(torch.linspace(-13.8, 0, DIM))
        self.log_std = nn.Parameter(torch.full((17,), -0.5))

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, 1)
        error = (self.decoder(mean) - x).square()
        return (0.5 * error / self.log_var.exp() + 0.5 * self.log_var).mean() + 0.1 * (log_var.exp() - log_var).mean()


@animal("vae_{}.pt", lossy=["model.*", "optimizer.state.*"])
class LogVariance(Saved):
    """A variational autoencoder: log variances as parameters, from -14 to 0, with AdamW in the file."""

    def __init__(self):
        self.start(Autoencoder())

    def loss(self):
        return self.net(torch.randn(128, DIM) * torch.logspace(-3, 0, DIM))

    def use(self, was, now):
        before, after = self.states(was, now)
        ratio = (after["log_var"] - before["log_var"]).abs().max().item()
        assert ratio < 0.05, f"a variance is off by a factor of {torch.tensor(ratio).exp():.3g}"
        x = torch.randn(500, DIM, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 0, DIM)
        losses = []
        # A run that resumes from the released file is at most two iterations behind, 20 iterations later. `balanced` promises
        # half of one in the mean.
        for path, iterations in ((was, 18), (now, 20)):
            torch.manual_seed(1)
            self.start(Autoencoder())
            self.net.load_state_dict(load(path)["model"])
            self.optimizer.load_state_dict(load(path)["optimizer"])
            fit(self.optimizer, self.loss, iterations)
            losses.append(self.net(x).item())
        assert losses[1] <= losses[0] * 1.01, f"the loss is {losses[1]:.4g}, and was {losses[0]:.4g} two iterations before"


class Kernel(nn.Module):
    """A Gaussian process with one length scale per input, kept positive by a clamp and stored as it is."""

    def __init__(self):
        super().__init__()
        self.lengthscale = nn.Parameter(torch.logspace(-2, 2, 64 * DIM).view(64, DIM))
        self.noise, self.outputscale = nn.Parameter(torch.tensor(1e-4)), nn.Parameter(torch.tensor(1.0))

    def covariance(self, x):
        z = x / self.lengthscale[0]
        return self.outputscale * torch.exp(-0.5 * torch.cdist(z, z).square() / DIM) + self.noise * torch.eye(len(x))

    def forward(self, x, y):
        # All kernels but the first are fitted to their own scales: 64 tasks with one head each.
        factor = torch.linalg.cholesky(self.covariance(x))
        fit_term = torch.cholesky_solve(y[:, None], factor).squeeze() @ y / len(x)
        return fit_term + 2 * factor.diagonal().log().mean() + (self.lengthscale[1:].log() - 1).square().mean() * 0.01


@animal("gp_{}.pt", lossy=["model.*", "optimizer.state.*"])
class GaussianProcess(Saved):
    """A Gaussian process: length scales from .01 to 100 and the noise, as they are, with AdamW in the file."""

    def __init__(self):
        self.start(Kernel())
        self.x = torch.randn(60, DIM)

    def loss(self):
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.clamp_(min=1e-5)
        return self.net(self.x, self.x[:, 0].sin())

    def use(self, was, now):
        before, after = self.states(was, now)
        for name in before:
            require_no_zero(before[name], after[name], f"entries of {name}")
        ratio = (after["lengthscale"] / before["lengthscale"]).log2().abs().max().item()
        assert ratio <= 1, f"a length scale is off by a factor of {2**ratio:.3g}"
        require_same_loss(*(self.result(state, lambda net: net(self.x, self.x[:, 0].sin())).item() for state in (before, after)))


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(DIM, 128), nn.Linear(DIM, 128)
        self.logit_scale, self.logit_bias = nn.Parameter(torch.tensor(2.66)), nn.Parameter(torch.tensor(-10.0))
        self.temperature = nn.Parameter(torch.full((1, 8), 0.07))

    def forward(self, x, y):
        image, text = nn.functional.normalize(self.image(x), dim=1), nn.functional.normalize(self.text(y), dim=1)
        return self.logit_scale.exp() * image @ text.T + self.logit_bias + (image / self.temperature.mean()).mean()


@animal("clip_{}.pt", lossy=["model.image.*", "model.text.*", "optimizer.state.*"])
class LogitScale(Saved):
    """CLIP: `logit_scale` and temperatures, scalars and short tensors that stay exact, with AdamW in the file."""

    def __init__(self):
        self.start(Contrast())

    def loss(self):
        x = torch.randn(64, DIM)
        return nn.functional.cross_entropy(self.net(x, x + 0.3 * torch.randn(64, DIM)), torch.arange(64))

    def use(self, was, now):
        before, after = self.states(was, now)
        for name in ("logit_scale", "logit_bias", "temperature"):
            require_same(before[name], after[name], name)
        x = torch.randn(100, DIM, generator=torch.Generator().manual_seed(1))
        logits = [self.result(state, lambda net: net(x, x + 0.3)) for state in (before, after)]
        require_same_loss(*(nn.functional.cross_entropy(each, torch.arange(100)).item() for each in logits))
        require_choices(*logits, "matches")


class Normed(Saved):
    """A network under a parametrization of torch."""

    @staticmethod
    def wrap(layer):
        raise NotImplementedError

    def __init__(self):
        self.start(nn.Sequential(self.wrap(nn.Linear(DIM, DIM)), nn.LeakyReLU(), self.wrap(nn.Linear(DIM, DIM))))

    def loss(self):
        x = torch.randn(64, DIM)
        return (self.net.train()(x) - x.roll(1, 1)).square().mean()

    def use(self, was, now):
        before, after = self.states(was, now)
        x = torch.randn(200, DIM, generator=torch.Generator().manual_seed(1))
        outs = [self.result(state, lambda net: net.eval()(x)) for state in (before, after)]
        require_finite(outs[1], "outputs")
        require_near(*outs, "outputs")
        self.judge(before, after)


@animal("critic_{}.pt", lossy=["model.*.original", "model.*.bias", "optimizer.state.*"])
class SpectralNorm(Normed):
    """torch's spectral norm: `_u` and `_v` are unit vectors of a power iteration, with AdamW in the file."""

    wrap = staticmethod(parametrizations.spectral_norm)

    def judge(self, before, after):
        for name in (n for n in before if n.endswith(("_u", "_v"))):
            require_same(before[name], after[name], f"entries of {name}")
        norms = [self.result(s, lambda net: torch.linalg.matrix_norm(net.eval()[0].weight, 2)).item() for s in (before, after)]
        assert norms[1] <= norms[0] * 1.03, f"the spectral norm is {norms[1]:.4g}, and was {norms[0]:.4g}"


@animal("tts_{}.pt", lossy=["model.*.original1", "model.*.original0", "model.*.bias", "optimizer.state.*"])
class WeightNorm(Normed):
    """torch's weight norm: magnitudes and directions, one divides by the directions' norms; with AdamW in the file."""

    wrap = staticmethod(parametrizations.weight_norm)

    def judge(self, before, after):
        for name in (n for n in before if n.endswith("original0")):
            require_no_zero(before[name], after[name], f"magnitudes of {name}")
            ratio = (after[name] / before[name]).log2().abs().max().item()
            assert ratio < 0.1, f"a magnitude is off by a factor of {2**ratio:.3g}"
