"""Parameters that a program keeps within limits come back within them: ranges, norms, sums, orthogonality, a ball."""

from dataclasses import dataclass
from typing import Callable

import pytest
import torch
from series import bits_equal
from sweeps import Saved, whole
from torch import nn
from torch.nn.functional import normalize

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]

# A file has no more trouble with its constraint than the program that wrote it.
SLACK = 1e-6
# Iterations of the saves: short intervals, and long ones.
SAVES = (10, 20, 30, 60, 100, 200)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Model(nn.Module):
    """One parameter that is kept within limits, and an ordinary layer that is not."""

    def __init__(self, kept):
        super().__init__()
        self.kept = nn.Module()
        self.kept.weight = nn.Parameter(kept)
        self.free = nn.Linear(64, 96)


@dataclass
class Kind:
    """How a program trains the kept parameter, keeps it within its limits, and how far one may be beyond them."""

    start: Callable
    loss: Callable
    keep: Callable
    beyond: Callable
    rate: float = 1e-2


def random(*shape):
    return torch.randn(*shape)


def uniform(*shape):
    return torch.rand(*shape)


def chances(*shape):
    return torch.softmax(0.3 * torch.randn(*shape), 1)


def near(goal, noise):
    """A fixed goal that is seen with noise."""
    return lambda weight: (weight - goal - noise * torch.randn_like(goal)).square().mean()


def apart(weight, scale=10.0):
    """A cosine head: each row should be most like inputs of its own class."""
    classes = torch.randint(0, len(weight), (64,))
    inputs = CENTERS[: len(weight), : weight.shape[1]][classes] + 0.5 * torch.randn(64, weight.shape[1])
    return nn.functional.cross_entropy(scale * normalize(inputs) @ weight.T, classes)


def distance(a, b):
    """In the Poincaré ball."""
    inside = (1 - a.square().sum(-1)) * (1 - b.square().sum(-1))
    return torch.acosh(1 + 2 * (a - b).square().sum(-1) / inside.clamp(min=1e-7) + 1e-7)


def tree(points):
    """Nickel and Kiela: a node of a binary tree should be nearer its parent than others. Leaves go to the edge."""
    child = torch.randint(1, len(points), (128,))
    others = torch.randint(0, len(points), (128, 8))
    near = distance(points[child], points[(child - 1) // 2])
    far = distance(points[child][:, None], points[others])
    return (near + torch.logsumexp(-torch.cat([near[:, None], far], 1), 1)).mean()


def into_ball(points):
    """As geoopt projects after each step."""
    norm = points.norm(dim=1, keepdim=True)
    return torch.where(norm > 1 - 1e-5, points / norm * (1 - 1e-5), points)


def onto_simplex(rows):
    """The nearest point of the simplex (Held, Wolfe and Crowder)."""
    falling = rows.sort(dim=1, descending=True).values
    sums = falling.cumsum(1) - 1
    count = torch.arange(1, rows.shape[1] + 1)
    last = (falling - sums / count > 0).sum(1, keepdim=True) - 1
    return (rows - sums.gather(1, last) / (last + 1)).clamp(min=0)


def over_sum(rows):
    return rows.abs() / rows.abs().sum(1, keepdim=True)


def orthonormal(matrix):
    """The nearest basis that QR gives, with signs that do not jump."""
    q, r = torch.linalg.qr(matrix)
    return (q * r.diagonal().sign()).contiguous()


def columns_first(matrix):
    """The same matrix in the layout of LAPACK: `torch.linalg.qr` returns Q like this."""
    return matrix.T.contiguous().T


def off_range(low, high):
    return lambda weight: torch.cat([low - weight.flatten(), weight.flatten() - high]).max().item()


def off_norm(dim, norm=1.0):
    return lambda weight: (weight.double().norm(dim=dim) / norm - 1).abs().max().item()


def off_basis(weight):
    weight = weight.double()
    return (weight.T @ weight - torch.eye(weight.shape[1])).abs().max().item()


def off_simplex(weight):
    return max((weight.double().sum(1) - 1).abs().max().item(), -weight.min().item())


torch.manual_seed(0)
CENTERS = torch.randn(256, 256)
PATCH = uniform(3, 64, 64) * 1.6 - 0.3
POSITIVE = random(96, 128) + 1.6
CHAIN = torch.softmax(0.5 * random(128, 64), 1)
KINDS = {
    # An adversarial patch, a mask, an opacity.
    "a patch in [0, 1]": Kind(
        lambda: uniform(3, 64, 64) * 1.2 - 0.1, near(PATCH, 0.3), lambda w: w.clamp(0, 1), off_range(0, 1), 3e-3
    ),
    # WGAN clips the weights of its critic.
    "clipped to 0.05": Kind(
        lambda: 0.05 * random(96, 128), apart, lambda w: w.clamp(-0.05, 0.05), off_range(-0.05, 0.05)
    ),
    "without negative weights": Kind(
        lambda: POSITIVE + 0.5 * random(96, 128), near(POSITIVE, 0.3), lambda w: w.clamp(min=0), off_range(0, torch.inf)
    ),
    "rows of norm 1": Kind(lambda: random(96, 128), apart, normalize, off_norm(1)),
    "rows of norm 8": Kind(
        lambda: random(96, 128), lambda w: apart(w, 2.0), lambda w: 8 * normalize(w), off_norm(1, 8.0)
    ),
    "columns of norm 1": Kind(
        lambda: random(128, 96), lambda w: apart(w.T), lambda w: normalize(w, dim=0), off_norm(0)
    ),
    "orthonormal columns": Kind(lambda: random(128, 96), lambda w: apart(w.T), orthonormal, off_basis),
    "orthonormal rows": Kind(
        lambda: random(96, 128), apart, lambda w: orthonormal(w.T).T.contiguous(), lambda w: off_basis(w.T)
    ),
    "an orthogonal matrix": Kind(lambda: random(96, 96), apart, orthonormal, off_basis),
    # Columns lie one after the other in the file.
    "orthonormal columns of QR": Kind(
        lambda: random(128, 96), lambda w: apart(w.T), lambda w: columns_first(orthonormal(w)), off_basis
    ),
    "an orthogonal matrix of QR": Kind(
        lambda: random(96, 96), apart, lambda w: columns_first(orthonormal(w)), off_basis
    ),
    "rows of norm 1 of a transposed matrix": Kind(
        lambda: random(96, 128), apart, lambda w: columns_first(normalize(w)), off_norm(1)
    ),
    # Probabilities: projected, or divided by their sum.
    "rows on the simplex": Kind(lambda: chances(128, 64), near(CHAIN, 0.01), onto_simplex, off_simplex, 3e-4),
    "rows that sum to 1": Kind(lambda: chances(128, 64), near(CHAIN, 0.01), over_sum, off_simplex, 1e-4),
    "points in the Poincaré ball": Kind(
        lambda: 0.3 * random(1023, 12), tree, into_ball, lambda w: w.double().norm(dim=1).max().item() - 1 + 1e-5, 3e-2
    ),
}


def train(kind, seed=0):
    """(iteration, state) of a run with Adam."""
    torch.manual_seed(seed)
    model = Model(kind.keep(kind.start()))
    groups = [{"params": [model.kept.weight], "lr": kind.rate}, {"params": model.free.parameters(), "lr": 1e-3}]
    optimizer = torch.optim.Adam(groups)
    teacher = torch.randn(64, 96)
    for iteration in range(1, SAVES[-1] + 1):
        x = torch.randn(32, 64)
        loss = kind.loss(model.kept.weight) + nn.functional.mse_loss(model.free(x), (x @ teacher).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.kept.weight.copy_(kind.keep(model.kept.weight))
        if iteration in SAVES:
            yield iteration, whole(model, optimizer, epoch=iteration)


def within(read, written):
    return written.min() <= read.min() and read.max() <= written.max()


@pytest.mark.parametrize("name", KINDS)
def test_a_parameter_stays_within_the_limits_of_its_program(mount, name):
    kind, saved, written = KINDS[name], Saved(mount), {}
    for iteration, state in train(kind):
        written[f"epoch_{iteration}.pt"] = state["model"]
        saved.save(f"epoch_{iteration}.pt", state)
    # The test means something only if training moved the parameter, and its program had to keep it.
    first, last = (written[f"epoch_{at}.pt"]["kept.weight"] for at in (SAVES[0], SAVES[-1]))
    assert (last - first).square().mean() > 1e-4 * first.square().mean()
    assert all(kind.beyond(model["kept.weight"]) <= SLACK for model in written.values())
    mount.sync()
    *older, newest = written
    saved.require(lossy=older, exact=[newest])
    for file, model in written.items():
        read = torch.load(mount / file)["model"]
        beyond = kind.beyond(read["kept.weight"])
        assert beyond <= SLACK, f"{file}: {beyond} beyond its limits, {kind.beyond(model['kept.weight'])} as written"
        assert bits_equal(read["kept.weight"], model["kept.weight"]), f"{file}: within its limits, but not as written"
        # Not because all is exact.
        assert bits_equal(read["free.weight"], model["free.weight"]) == (file == newest), file
        assert all(within(read[path], tensor) for path, tensor in model.items()), f"{file}: beyond its least or largest"


def test_no_weight_of_an_ordinary_network_leaves_the_range_of_the_written_one(mount):
    """Without any constraint: the least and the largest element of each tensor are its limits."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))
    optimizer, saved, written = torch.optim.Adam(model.parameters(), lr=3e-3), Saved(mount), {}
    for iteration in range(1, SAVES[-1] + 1):
        x = torch.randn(32, 64)
        loss = nn.functional.mse_loss(model(x), x.sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if iteration in SAVES:
            state = whole(model, optimizer, epoch=iteration)
            written[f"epoch_{iteration}.pt"] = state["model"]
            saved.save(f"epoch_{iteration}.pt", state)
    mount.sync()
    *older, newest = written
    saved.require(lossy=older, exact=[newest])
    for file in older:
        read = torch.load(mount / file)["model"]
        for path, tensor in written[file].items():
            assert within(read[path], tensor), f"{file}, {path}: {read[path].aminmax()} is not in {tensor.aminmax()}"
        assert not any(bits_equal(read[path], written[file][path]) for path in ("0.weight", "3.weight")), file
