"""Models trained in a second: trials of a sweep, and states of one run. And the verdict on their files."""

import copy
import hashlib
import io
import os

import torch
from torch import nn

# A file of weights alone must have more than 64 KiB, below which nothing is released.
IN, HIDDEN, OUT = 64, 136, 64
# Trials of a sweep differ in their learning rate and in the order of their data.
RATES = (3e-4, 1e-3, 3e-3, 2e-3)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, OUT))


def batches(seed, of=None):
    """Endless pairs to learn from. `of` chooses the task: another number is another function."""
    fixed = torch.Generator().manual_seed(1000 + (of or 0))
    teacher = torch.randn(IN, OUT, generator=fixed) / IN**0.5
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(32, IN, generator=generator)
        yield x, (3 * x @ teacher).sin()


def fit(model, optimizer, data, count):
    for _, (x, y) in zip(range(count), data):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def whole(model, optimizer, **more):
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more})


def adamw(model, lr=1e-3, betas=(0.9, 0.999)):
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas)


def trained(counts, lr=1e-3, seed=0, make=adamw, **options):
    """The states of one run after each of these numbers of iterations, oldest first."""
    model = net()
    optimizer, data, states, done = make(model, lr, **options), batches(seed), [], 0
    for count in counts:
        fit(model, optimizer, data, count - done)
        states.append(whole(model, optimizer))
        done = count
    return states


def momentum(model, lr):
    return torch.optim.SGD(model.parameters(), lr=10 * lr, momentum=0.9)


def as_another(state, seed):
    """The same training of a network whose units are numbered anew: as true as the first, and no byte is alike."""
    generator = torch.Generator().manual_seed(seed)
    ins, hidden, outs = (torch.randperm(size, generator=generator) for size in (IN, HIDDEN, OUT))
    # The two matrices and biases in the optimizer's order.
    places = [(hidden, ins), (hidden,), (outs, hidden), (outs,)]

    def moved(tensor, place):
        return tensor[place[0]][:, place[1]] if len(place) == 2 else tensor[place[0]]

    model = {name: moved(tensor, place).clone() for (name, tensor), place in zip(state["model"].items(), places)}
    slots = {
        number: {name: moved(value, places[number]).clone() if value.dim() else value for name, value in slot.items()}
        for number, slot in state["optimizer"]["state"].items()
    }
    return {"model": model, "optimizer": {**state["optimizer"], "state": slots}}


def contradicts_adam(earlier, later):
    """Whether two states of AdamW are not of one run: no step lies between, or second moments fell too fast."""
    earlier, later = earlier["optimizer"], later["optimizer"]
    count = (later["state"][0]["step"] - earlier["state"][0]["step"]).item()
    decay = later["param_groups"][0]["betas"][1] ** count
    then, now = (torch.cat([slot["exp_avg_sq"].flatten() for slot in of["state"].values()]) for of in (earlier, later))
    # So many that no tolerance for rounding hides them.
    return count <= 0 or (now < 0.99 * decay * then).double().mean().item() > 0.01


def bytes_of(state, save=torch.save):
    buffer = io.BytesIO()
    save(state, buffer)
    return buffer.getvalue()


class Saved:
    """Files that programs wrote into a mount, and whether their bytes are still the same."""

    def __init__(self, mount):
        self.mount, self.sums = mount, {}

    def write(self, name, data):
        path = self.mount / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.note(name, data)

    def save(self, name, state, save=torch.save):
        self.write(name, bytes_of(state, save))

    def note(self, name, data):
        self.sums[str(name)] = hashlib.sha256(data).digest()

    def is_exact(self, name):
        return hashlib.sha256((self.mount / name).read_bytes()).digest() == self.sums[str(name)]

    def lossy(self, name):
        return os.getxattr(self.mount / name, "user.stepfs.lossy").decode()

    def verdict(self, name):
        """"exact" or "lossy"; both the bytes and the attribute must say so."""
        exact, said = self.is_exact(name), self.lossy(name)
        assert exact == (said == "0"), f"{name}: exact is {exact}, but lossy is {said!r}"
        return "exact" if exact else "lossy"

    def verdicts(self, names=None):
        return {str(name): self.verdict(name) for name in names or self.sums}

    def require(self, **names):
        """`require(exact=[...], lossy=[...])`; a failure shows the verdict of every file."""
        all_ = self.verdicts()
        expected = {name: verdict for verdict, listed in names.items() for name in listed}
        wrong = {name: all_[name] for name, verdict in expected.items() if all_[name] != verdict}
        table = "\n".join(f"{verdict}  {name}" for name, verdict in all_.items())
        assert not wrong, f"wrong: {wrong}\n{table}\n{self.mount.log_tail()}"
