"""Averages of weights and of other values, and networks that follow others."""

import copy

import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .keeper import animal, fit, load, require_choices, require_near, require_same, require_same_choice, require_same_loss

DIM = 96


def network(out=10):
    return nn.Sequential(nn.Linear(DIM, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, out))


def task(count, seed=None):
    """Inputs and the classes that a fixed rule gives them."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    x = torch.randn(count, DIM, generator=generator)
    return x, (x @ torch.randn(DIM, 10, generator=torch.Generator().manual_seed(9))).argmax(1)


def judge(before, after, net=network):
    """Loss and classes of two state dicts of one network."""
    x, goal = task(500, seed=4)
    logits = []
    for state in (before, after):
        judged = net()
        judged.load_state_dict(state)
        logits.append(judged.eval()(x).detach())
    require_same_loss(*(nn.functional.cross_entropy(each, goal).item() for each in logits))
    require_choices(*logits, "classes")


class Classifier:
    """A network in training, and its average."""

    def __init__(self):
        self.net = network()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-3)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.95))

    def train(self, steps=20):
        for _ in range(steps):
            x, goal = task(128)
            fit(self.optimizer, lambda: nn.functional.cross_entropy(self.net(x), goal), 1)
            self.average.update_parameters(self.net)


@animal("ema_{}.pt", lossy=["module.*.weight"])
class AveragedWeights(Classifier):
    """torch's AveragedModel as an average of weights, model-only."""

    def make(self, path, step):
        self.train()
        torch.save(self.average.state_dict(), path)

    def use(self, was, now):
        before, after = load(was), load(now)
        assert before.pop("n_averaged") == after.pop("n_averaged")
        strip = lambda state: {name.removeprefix("module."): t for name, t in state.items()}
        judge(strip(before), strip(after))


@animal("checkpoint-{}.pth.tar", lossy=["state_dict.*", "state_dict_ema.*", "optimizer.state.*"])
class TimmCheckpoint(Classifier):
    """timm's layout: `state_dict`, `optimizer` and `state_dict_ema` in one file."""

    def make(self, path, step):
        self.train()
        torch.save({"epoch": step, "arch": "mlp", "state_dict": self.net.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "version": 2, "state_dict_ema": self.average.module.state_dict(), "metric": 0.5}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        for key in ("state_dict", "state_dict_ema"):
            judge(before[key], after[key])


@animal("sac_{}.pt", lossy=["q.*", "q_target.*", "q_optimizer.state.*"])
class TargetNetwork:
    """DQN: a target network that follows by Polyak's average, and an optimizer for the other one."""

    def __init__(self):
        self.q, self.target = network(), network()
        self.target.load_state_dict(self.q.state_dict())
        self.optimizer = torch.optim.Adam(self.q.parameters(), 1e-3)

    def make(self, path, step):
        for _ in range(20):
            x, y = torch.randn(2, 128, DIM)
            goal = x[:, :10] + 0.9 * self.target(y).amax(1, keepdim=True).detach()
            fit(self.optimizer, lambda: (self.q(x) - goal).square().mean(), 1)
            with torch.no_grad():
                for slow, fast in zip(self.target.parameters(), self.q.parameters()):
                    slow.lerp_(fast, 0.02)
        torch.save({"q": self.q.state_dict(), "q_target": self.target.state_dict(), "q_optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        values = []
        for path in (was, now):
            net = network()
            net.load_state_dict(load(path)["q_target"])
            values.append(net(task(500, seed=4)[0]).detach())
        require_near(*values, "target values")
        require_choices(*values, "greedy actions")


@animal("checkpoint_{}.pth", lossy=["student.*", "teacher.*", "optimizer.state.*"])
class SelfDistillation:
    """DINO: student with optimizer, teacher as its average, and the centre of the teacher's outputs."""

    OUT = 4096

    def __init__(self):
        head = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, self.OUT))
        self.student, self.teacher = head, copy.deepcopy(head)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), 1e-3)
        self.centre = torch.zeros(1, self.OUT)

    def make(self, path, step):
        for _ in range(8):
            x = torch.randn(64, DIM)
            with torch.no_grad():
                out = self.teacher(x)
                goal = ((out - self.centre) / 0.04).softmax(1)
                self.centre.lerp_(out.mean(0, keepdim=True), 0.1)
            fit(self.optimizer, lambda: -(goal * (self.student(x + 0.1) / 0.1).log_softmax(1)).sum(1).mean(), 1)
            with torch.no_grad():
                for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
                    slow.lerp_(fast, 0.01)
        torch.save({"student": self.student.state_dict(), "teacher": self.teacher.state_dict(), "epoch": step,
                    "optimizer": self.optimizer.state_dict(), "dino_loss": {"center": self.centre}}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        require_same(before["dino_loss"]["center"], after["dino_loss"]["center"], "entries of the centre")
        outs = []
        for state in (before, after):
            self.teacher.load_state_dict(state["teacher"])
            outs.append(((self.teacher(task(300, seed=4)[0]) - state["dino_loss"]["center"]) / 0.04).softmax(1).detach())
        require_choices(*outs, "prototypes")


@animal("prototypes-{}.safetensors")
class Prototypes:
    """Averages of statistics: the mean feature of each class, how often it came, and its share of the loss."""

    def __init__(self):
        self.state = {"prototypes": torch.randn(500, DIM), "frequency": torch.full((500,), 1 / 500), "loss_ema": torch.ones(500)}

    def make(self, path, step):
        shares = torch.logspace(0, -5, 500)
        for _ in range(10):
            kind = torch.multinomial(shares, 500, replacement=True)
            seen = nn.functional.one_hot(kind, 500).float().mean(0)
            self.state["frequency"].lerp_(seen, 0.1)
            self.state["loss_ema"].lerp_(torch.rand(500) ** 4, 0.1)
            self.state["prototypes"][kind] += 0.05 * (torch.randn(500, DIM) - self.state["prototypes"][kind])
        save_file(self.state, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        # Balanced sampling divides by the count of a class.
        require_same(1 / before["frequency"], 1 / after["frequency"], "weights of classes")
        require_same(before["loss_ema"].log(), after["loss_ema"].log(), "averages of losses")
        x = torch.randn(500, DIM, generator=torch.Generator().manual_seed(1))
        require_same_choice(*(torch.cdist(x, s["prototypes"]).argmin(1) for s in (before, after)), "nearest prototypes")
