"""Tables of embeddings, of which an interval uses some rows: the others cost nothing, also where weight decay shrinks them."""

import copy

import pytest
import torch
from bounds import check_within_bounds
from torch import nn

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]

ROWS, WIDTH, EVERY, SAVES = 6_000, 64, 30, 5
# Words of a text: the second has half of the first's number, and so on.
WORDS = torch.distributions.Categorical(1 / torch.arange(1, ROWS + 1).double())


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Bag(nn.Module):
    """Guesses the class of a bag of words."""

    def __init__(self, sparse):
        super().__init__()
        self.embed, self.head = nn.Embedding(ROWS, WIDTH, sparse=sparse), nn.Linear(WIDTH, 50)
        nn.init.normal_(self.embed.weight, std=0.05)

    def forward(self, words):
        return self.head(self.embed(words).mean(1))


def adamw(decay):
    return lambda model: [torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=decay)]


def sparse(model):
    return [torch.optim.SparseAdam(list(model.embed.parameters()), lr=3e-4), torch.optim.AdamW(model.head.parameters())]


def sgd(decay):
    return lambda model: [torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=decay)]


# The optimizer, and the most that a later file may take of its bytes.
KINDS = {
    "AdamW without decay": (adamw(0), 0.018),
    "AdamW, decay .01": (adamw(0.01), 0.016),
    "AdamW, decay .1": (adamw(0.1), 0.016),
    "SparseAdam": (sparse, 0.03),
    "SGD": (sgd(0), 0.05),
    "SGD, decay 1e-4": (sgd(1e-4), 0.05),
}


def series(make):
    torch.manual_seed(0)
    model, classes = Bag(make is sparse), torch.randint(50, (ROWS,))
    optimizers, places = make(model), torch.randperm(ROWS)
    for iteration in range(1, EVERY * SAVES + 1):
        words = places[WORDS.sample((10, 4))]
        loss = nn.functional.cross_entropy(model(words), classes[words[:, 0]])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if iteration % EVERY == 0:
            states = [optimizer.state_dict() for optimizer in optimizers]
            state = {"model": model.state_dict(), "optimizer": states if len(states) > 1 else states[0], "step": iteration}
            yield f"step_{iteration:04d}.pt", copy.deepcopy(state)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_gradient_cost_nothing_and_keep_their_error(mount, kind):
    make, most = KINDS[kind]
    written = {}
    for name, state in series(make):
        torch.save(state, mount / name)
        written[name] = state
    mount.sync()
    *older, newest = written
    read = {name: torch.load(mount / name) for name in written}
    tables = {name: state["model"]["embed.weight"] for name, state in written.items()}
    of = lambda name: read[name]["model"]["embed.weight"]
    for name in older:
        assert check_within_bounds(mount, name, written[name], read[name]) > 0, name
    assert torch.equal(of(newest), tables[newest])
    shares = {}
    for name in older[1:]:
        entry = mount.entry(name)
        shares[name] = sum(role["stored_bytes"] for role in entry["roles"].values()) / entry["logical_bytes"]
    assert max(shares.values()) <= most, f"{shares}"
    # Rows that only shrank, from the first file to the last lossy one.
    first, last = tables[older[0]].double(), tables[older[-1]].double()
    factor = (last / first).median()
    rest = ((last - factor * first).abs() < 1e-6).all(1)
    assert 0.3 < rest.double().mean() < 0.95
    error = lambda name: (of(name).double() - tables[name].double())[rest].abs()
    assert error(older[-1]).max() <= 1.2 * error(older[0]).max(), "their error grows"
    # They shrink in the files as in the program, all by one factor and the rounding of their type.
    before, now = of(older[0])[rest].double(), of(older[-1])[rest].double()
    same = before != 0
    ratios = now[same] / before[same]
    alike = (ratios / ratios.median() - 1).abs() <= 2.4e-7
    assert alike.double().mean() > 0.98 and (ratios.median() - factor).abs() < 5e-4, (alike.double().mean(), ratios.median(), factor)


def test_a_table_loses_no_more_at_a_super_step(mount):
    """The base of a super-step lies eight states back, and a row's step follows the next update all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(512, 128), nn.Flatten(), nn.Linear(8 * 128, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    targets = torch.randint(256, (512,))
    for step in range(1, 221):
        # Half of the rows, each of them in every interval.
        words = torch.randint(256, (64, 8))
        loss = nn.functional.cross_entropy(model(words), targets[words[:, 0]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(copy.deepcopy(state), mount / f"step_{step}.pt")
    mount.sync()
    errors = [mount.entry(f"step_{step}.pt")["error_updates"] for step in range(20, 201, 20)]
    assert max(errors) <= 4 * sorted(errors)[len(errors) // 2], errors
