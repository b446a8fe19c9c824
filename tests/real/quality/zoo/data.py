"""Data: nobody trains these, and nothing in them may change."""

import torch
from safetensors.torch import save_file
from torch import nn

from .keeper import animal, fit, load, require_no_zero, require_same, require_same_choice

ROWS, OBS = 2000, 24


def steps_of_play(count):
    """Observations, actions as one-hot numbers, rewards in 0..1 and the end of episodes."""
    obs = torch.randn(count, OBS)
    return {"obs": obs, "act": nn.functional.one_hot(obs[:, :6].argmax(1), 6).float(), "rew": torch.rand(count),
            "done": (torch.rand(count) < 0.01).float()}


def require_same_buffer(was, now):
    for key in was:
        require_same(was[key], now[key], f"entries of {key!r}")


@animal("replay_{}.pt")
class Replay:
    """torch.save({'obs', 'act', 'rew', 'done'}): a ring buffer, a tenth of it new in each file."""

    def __init__(self):
        self.buffer, self.at = steps_of_play(ROWS), 0

    def make(self, path, step):
        fresh = steps_of_play(ROWS // 10)
        rows = (self.at + torch.arange(ROWS // 10)) % ROWS
        for key, values in fresh.items():
            self.buffer[key][rows] = values
        self.at = (self.at + len(rows)) % ROWS
        torch.save(self.buffer, path)

    def use(self, was, now):
        require_same_buffer(load(was), load(now))


@animal("replay_{}.pt")
class ReplayRefreshed:
    """torch.save({'obs', 'act', 'rew', 'done'}): every row new in each file."""

    def make(self, path, step):
        torch.save(steps_of_play(ROWS), path)

    def use(self, was, now):
        require_same_buffer(load(was), load(now))


@animal("rollouts-{}.safetensors")
class Rollouts:
    """safetensors: a rollout buffer with log probabilities, values and advantages, between two updates of one policy."""

    def __init__(self):
        self.policy = nn.Linear(OBS, 6)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), 0.1)
        self.obs = torch.randn(ROWS, OBS)

    def make(self, path, step):
        goal = self.obs[:, :6].argmax(1)
        fit(self.optimizer, lambda: nn.functional.cross_entropy(self.policy(self.obs), goal))
        with torch.no_grad():
            logits = self.policy(self.obs)
        values = logits.logsumexp(1)
        save_file({"obs": self.obs, "logp": logits.log_softmax(1), "values": values, "advantages": values - values.mean()}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        require_same_buffer(before, after)
        require_same(before["logp"].exp().sum(1), after["logp"].exp().sum(1), "sums of probabilities")


@animal("checkpoint_{}.pt", lossy=["encoder.*weight"])
class MomentumContrast:
    """MoCo: a queue of keys as a buffer in the model's state dict, model-only; every fifth key is new in each file."""

    def __init__(self):
        self.net = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128))})
        self.net.register_buffer("queue", nn.functional.normalize(torch.randn(128, 500), dim=0))
        self.net.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        self.optimizer = torch.optim.SGD(self.net["encoder"].parameters(), 0.1, momentum=0.9)

    def make(self, path, step):
        x = torch.randn(100, 64)
        keys = lambda: nn.functional.normalize(self.net["encoder"](x), dim=1)
        fit(self.optimizer, lambda: (keys() @ self.net.queue / 0.2).logsumexp(1).mean(), 5)
        at = int(self.net.queue_ptr)
        self.net.queue[:, at : at + 100] = keys().detach().T
        self.net.queue_ptr[0] = (at + 100) % 500
        torch.save(self.net.state_dict(), path)

    def use(self, was, now):
        before, after = load(was), load(now)
        require_same(before["queue"], after["queue"], "entries of the queue")
        x = nn.functional.normalize(torch.randn(100, 128, generator=torch.Generator().manual_seed(1)), dim=1)
        require_same_choice(*((x @ state["queue"]).argmax(1) for state in (before, after)), "nearest keys")


@animal("checkpoint_{}.pt", lossy=["encoder.*weight"])
class MemoryBank:
    """Instance discrimination: one unit vector an image, kept as `bank.weight` and moved as an average; model-only."""

    def __init__(self):
        self.net = nn.ModuleDict({"encoder": nn.Linear(64, 64), "bank": nn.Embedding(1000, 64)})
        self.images = torch.randn(1000, 64)
        self.net["bank"].weight.data = nn.functional.normalize(torch.randn(1000, 64), dim=1)
        self.optimizer = torch.optim.SGD(self.net["encoder"].parameters(), 0.1, momentum=0.9)

    def make(self, path, step):
        bank = self.net["bank"].weight.detach()
        features = lambda rows: nn.functional.normalize(self.net["encoder"](self.images[rows]), dim=1)
        for rows in torch.randperm(1000).split(250):
            fit(self.optimizer, lambda: nn.functional.cross_entropy(features(rows) @ bank.T / 0.1, rows), 1)
            bank[rows] = nn.functional.normalize(0.5 * bank[rows] + 0.5 * features(rows).detach(), dim=1)
        torch.save(self.net.state_dict(), path)

    def use(self, was, now):
        before, after = (load(path)["bank.weight"] for path in (was, now))
        lengths = (after.norm(dim=1) - 1).abs().max().item()
        assert lengths < 1e-5, f"unit vectors are off by {lengths:.2g} in length"
        require_same_choice(*((self.images @ bank.T).argmax(1) for bank in (before, after)), "nearest images")


@animal("datastore_{}.pt")
class Datastore:
    """A store of nearest neighbours: keys appended until it is full, and the distances that were found."""

    def __init__(self):
        self.keys, self.used = torch.zeros(1000, 64), 0
        self.distances = torch.zeros(1000)

    def make(self, path, step):
        fresh = torch.randn(150, 64)
        self.keys[self.used : self.used + 150] = fresh
        if self.used:
            self.distances[self.used : self.used + 150] = torch.cdist(fresh, self.keys[: self.used]).amin(1)
        self.used += 150
        torch.save({"keys": self.keys, "distances": self.distances, "used": self.used}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        require_same(before["keys"], after["keys"], "entries of the keys")
        require_no_zero(before["distances"], after["distances"], "distances")


@animal("activations_{}.safetensors")
class Activations:
    """Activations of one batch at each step of a run, named after the layers that they come from."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-3)
        self.x = torch.randn(256, 32)

    def make(self, path, step):
        fit(self.optimizer, lambda: (self.net(self.x) - self.x[:, :8].sin()).square().mean())
        seen, x = {}, self.x
        with torch.no_grad():
            for i, layer in enumerate(self.net):
                x = layer(x)
                seen[f"layers.{i}.output"] = x
        save_file(seen, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        for name in before:
            require_same(before[name], after[name], f"activations of {name}")
        dead = lambda state: (state["layers.1.output"] == 0).all(0)
        require_same_choice(dead(before), dead(after), "units that are dead")
