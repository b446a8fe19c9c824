"""Constraints as real libraries keep them: geoopt's manifolds, torch's parametrizations, a cosine head."""

import warnings

import pytest
import torch
from series import bits_equal
from sweeps import Saved, whole
from test_limits import apart, distance, off_basis, off_norm, tree
from torch import nn
from torch.nn.functional import linear, normalize
from torch.nn.utils import parametrizations, parametrize

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]

# Beyond what the program wrote.
SLACK = 1e-6
SAVES = (10, 20, 30, 60, 100)


@pytest.fixture
def geoopt():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its old compiler
        return pytest.importorskip("geoopt")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Model(nn.Module):
    """A module that is constrained, and an ordinary layer that is not."""

    def __init__(self, kept):
        super().__init__()
        self.kept, self.free = kept, nn.Linear(64, 96)


class Points(nn.Module):
    """A parameter on a manifold of geoopt."""

    def __init__(self, start, manifold):
        import geoopt

        super().__init__()
        self.weight = geoopt.ManifoldParameter(manifold.projx(start), manifold=manifold)


class UnitRows(nn.Module):
    def forward(self, weight):
        return normalize(weight)


class CosineHead(nn.Linear):
    """Its rows are the directions of the classes."""

    def forward(self, x):
        return linear(normalize(x), self.weight)

    @torch.no_grad()
    def keep(self, *_):
        self.weight.copy_(normalize(self.weight))


def run(mount, model, loss, make):
    """Trains and saves; returns what was written and what is read, by file, and the newest file."""
    free = {"params": model.free.parameters(), "lr": 1e-3}
    optimizer, teacher = make([{"params": [p for p in model.kept.parameters() if p.requires_grad]}, free]), torch.randn(64, 96)
    saved, written = Saved(mount), {}
    for iteration in range(1, SAVES[-1] + 1):
        x = torch.randn(32, 64)
        both = loss(model.kept) + nn.functional.mse_loss(model.free(x), (x @ teacher).sin())
        optimizer.zero_grad()
        both.backward()
        optimizer.step()
        if iteration in SAVES:
            state = whole(model, optimizer, epoch=iteration)
            written[f"epoch_{iteration}.pt"] = state["model"]
            saved.save(f"epoch_{iteration}.pt", state)
    mount.sync()
    *older, newest = written
    saved.require(lossy=older, exact=[newest])
    read = {file: torch.load(mount / file, weights_only=False)["model"] for file in written}
    # Not because all is exact.
    assert not any(bits_equal(read[file]["free.weight"], written[file]["free.weight"]) for file in older)
    return written, read, newest


def restored(model, state):
    model.load_state_dict(state)
    return model.eval()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def riemannian(parameters):
    import geoopt

    return geoopt.optim.RiemannianAdam(parameters, lr=1e-2, stabilize=10)


@pytest.mark.parametrize("kind", ["stiefel", "sphere"])
def test_a_point_on_a_manifold_of_geoopt_stays_on_it(mount, geoopt, kind):
    torch.manual_seed(0)
    if kind == "stiefel":
        start, manifold, beyond, turned = torch.randn(128, 96), geoopt.Stiefel(), off_basis, True
    else:
        start, manifold, beyond, turned = torch.randn(96, 128), geoopt.Sphere(), off_norm(1), False
    model = Model(Points(start, manifold))
    loss = lambda kept: apart(kept.weight.T if turned else kept.weight)
    written, read, _ = run(mount, model, loss, riemannian)
    for file, state in written.items():
        off = beyond(read[file]["kept.weight"])
        assert off <= max(SLACK, beyond(state["kept.weight"])), f"{file}: off by {off}"


def test_points_of_geoopt_stay_inside_the_poincare_ball(mount, geoopt):
    """Leaves of a tree crowd at the edge. A point beyond has no distance to the others."""
    torch.manual_seed(0)
    ball = geoopt.PoincareBall()
    model = Model(Points(0.3 * torch.randn(1023, 12), ball))

    def loss(kept):
        return tree(kept.weight.as_subclass(torch.Tensor))

    written, read, _ = run(mount, model, loss, lambda p: geoopt.optim.RiemannianAdam(p, lr=0.1, stabilize=10))
    assert max(state["kept.weight"].norm(dim=1).max() for state in written.values()) > 0.99, "none is at the edge"
    for file, state in read.items():
        points = state["kept.weight"]
        assert points.norm(dim=1).max() <= written[file]["kept.weight"].norm(dim=1).max() < 1, file
        again = restored(model, state).kept.weight
        assert torch.isfinite(ball.dist(again[1:], again[(torch.arange(1, len(again)) - 1) // 2])).all(), file
        assert torch.isfinite(loss(model.kept)) and torch.isfinite(distance(points[1:], points[:-1])).all(), file


def test_a_parametrized_matrix_is_orthogonal_as_it_was(mount):
    """`parametrizations.orthogonal` saves Householder's reflections. Their diagonal has signs, of which torch takes integers:
    .999 is 0, and a column is gone."""
    torch.manual_seed(0)
    model = Model(parametrizations.orthogonal(nn.Linear(96, 128)))
    written, read, _ = run(mount, model, lambda kept: apart(kept.weight.T), adam)
    for file, state in written.items():
        before = off_basis(restored(model, state).kept.weight.detach())
        after = off_basis(restored(model, read[file]).kept.weight.detach())
        assert after <= max(SLACK, 2 * before), f"{file}: {after}, and {before} as written"


def test_a_spectral_norm_stays_one(mount):
    """`parametrizations.spectral_norm` saves vectors of a power iteration beside the weight, and goes on with it when it trains."""
    torch.manual_seed(0)
    model = Model(parametrizations.spectral_norm(nn.Linear(96, 128), n_power_iterations=4))
    written, read, _ = run(mount, model, lambda kept: apart(kept.weight.T), lambda p: torch.optim.Adam(p, lr=1e-3))
    largest = lambda state: torch.linalg.matrix_norm(restored(model, state).train().kept.weight.detach(), 2).item()
    for file, state in written.items():
        assert abs(largest(read[file]) - 1) <= max(0.02, 1.2 * abs(largest(state) - 1)), file


def cosine_head():
    head = CosineHead(128, 96, bias=False)
    head.keep()
    return head


def unit_rows():
    head = nn.Linear(128, 96, bias=False)
    parametrize.register_parametrization(head, "weight", UnitRows())
    return head


def weight_norm():
    head = parametrizations.weight_norm(nn.Linear(128, 96, bias=False))
    # The lengths are a parameter of their own. Here they stay 1.
    head.parametrizations.weight.original0 = nn.Parameter(torch.ones(96, 1), requires_grad=False)
    return head


@pytest.mark.parametrize("make", [cosine_head, unit_rows, weight_norm])
def test_rows_of_norm_one_come_back_so(mount, make):
    torch.manual_seed(0)
    model = Model(make())

    def optimizer(parameters):
        made = adam(parameters)
        if make is cosine_head:
            made.register_step_post_hook(model.kept.keep)
        return made

    written, read, _ = run(mount, model, lambda head: apart(head.weight), optimizer)
    for file, state in written.items():
        off, before = (off_norm(1)(restored(model, of[file]).kept.weight.detach()) for of in (read, written))
        assert off <= max(SLACK, before), f"{file}: off by {off}"
