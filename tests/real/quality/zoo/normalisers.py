"""Statistics by which networks normalise their inputs: divisors, and most of them are small."""

import importlib.util
import pickle

import gymnasium
import numpy as np
import torch
from torch import nn

from .keeper import animal, fit, load, require_choices, require_finite, require_near, require_no_zero, require_same

# A humanoid of MuJoCo has 376 observations: joints of order 1, and contact forces that are nearly always tiny.
DIM = 376
SCALES = torch.logspace(-5, 1, DIM)[torch.randperm(DIM, generator=torch.Generator().manual_seed(1))]


def observations(step, count=256):
    """The observations of an improving policy: the means move, and the scales grow."""
    return SCALES * (1 + step / 100) * (torch.randn(count, DIM) + torch.sin(torch.arange(DIM) + step / 20))


def actor():
    return nn.Sequential(nn.Linear(DIM, 128), nn.ELU(), nn.Linear(128, 17))


def train(net, normalise, step, optimizer, steps=5):
    """The policy learns to follow a linear rule of its observations."""
    rule = torch.linspace(-1, 1, DIM * 17).view(DIM, 17) / 10

    def loss():
        x = normalise(observations(step))
        return (net(x) - x @ rule).square().mean()

    fit(optimizer, loss, steps)


def rsl_rl_normalization():
    """rsl_rl's class. Importing the whole package needs TensorBoard; this module of it needs torch alone."""
    place = importlib.util.find_spec("rsl_rl").submodule_search_locations[0] + "/modules/normalization.py"
    spec = importlib.util.spec_from_file_location("rsl_rl_normalization", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EmpiricalNormalization(DIM)


def check_scaling(was, now, mean, variance, root=None):
    """Normalises the same observations with both; with `root` the file also keeps the standard deviation."""
    require_no_zero(was[variance], now[variance], "variances")
    if root:
        require_no_zero(was[root], now[root], "standard deviations")
    torch.manual_seed(1)
    x = observations(10)
    scale = lambda state: (x - state[mean]) / state[variance].sqrt()
    require_finite(scale(now), "normalised observations")
    require_same(scale(was), scale(now), "normalised observations")


class Policy(nn.Module):
    """A policy as rsl_rl exports it: normaliser and network in one state dict."""

    def __init__(self):
        super().__init__()
        self.obs_normalizer, self.actor = rsl_rl_normalization(), actor()

    def forward(self, x):
        return self.actor(self.obs_normalizer(x))


@animal("model_{}.pt", lossy=["actor.*.weight"])
class RslRlNormalizer:
    """rsl-rl: EmpiricalNormalization (`_mean`, `_var`, `_std`) and a policy, model-only."""

    def __init__(self):
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.actor.parameters(), 1e-3)

    def make(self, path, step):
        for i in range(5):
            self.policy.obs_normalizer.update(observations(step + i))
        train(self.policy.actor, self.policy.obs_normalizer, step, self.optimizer)
        torch.save(self.policy.state_dict(), path)

    def use(self, was, now):
        before, after = load(was), load(now)
        check_scaling(before, after, "obs_normalizer._mean", "obs_normalizer._var", "obs_normalizer._std")
        acts = []
        for state in (before, after):
            policy = Policy().eval()
            policy.load_state_dict(state)
            acts.append(policy(SCALES * torch.randn(64, DIM, generator=torch.Generator().manual_seed(2))).detach())
        require_near(*acts, "actions")


@animal("agent_{}.pt", lossy=["policy.*", "optimizer.state.*"])
class SkrlPreprocessor:
    """skrl: an agent's checkpoint with policy, optimizer and `state_preprocessor` (RunningStandardScaler, fp64)."""

    def __init__(self):
        from skrl.resources.preprocessors.torch import RunningStandardScaler

        self.policy, self.scaler = actor(), RunningStandardScaler(DIM, device="cpu")
        self.optimizer = torch.optim.Adam(self.policy.parameters(), 1e-3)

    def make(self, path, step):
        for i in range(5):
            self.scaler(observations(step + i).double(), train=True)
        train(self.policy, lambda x: self.scaler(x).float(), step, self.optimizer)
        modules = {"policy": self.policy, "optimizer": self.optimizer, "state_preprocessor": self.scaler}
        torch.save({name: module.state_dict() for name, module in modules.items()}, path)

    def use(self, was, now):
        check_scaling(*(load(path)["state_preprocessor"] for path in (was, now)), "running_mean", "running_variance")


class Walker(gymnasium.Env):
    """A task with a humanoid's observations, and without its physics."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (DIM,), np.float32)
    action_space = gymnasium.spaces.Discrete(5)

    def reset(self, seed=None, options=None):
        self.clock = 0
        return self.look(), {}

    def look(self):
        return observations(self.clock, 1)[0].numpy()

    def step(self, action):
        self.clock += 1
        return self.look(), float(action == self.clock % 5), self.clock >= 50, False, {}


class StableBaselines:
    """A PPO agent of stable-baselines3 on normalised observations."""

    def __init__(self):
        from stable_baselines3 import PPO
        from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

        self.normal = VecNormalize(DummyVecEnv([Walker, Walker]))
        self.agent = PPO("MlpPolicy", self.normal, n_steps=32, batch_size=32, n_epochs=2, seed=1, device="cpu")

    def learn(self):
        self.agent.learn(64, reset_num_timesteps=False)


@animal("ppo_{}_steps.zip", lossy=["policy.pth.*", "policy.optimizer.pth.state.*.exp_avg*"])
class StableBaselinesZip(StableBaselines):
    """stable-baselines3: `PPO.save`, a zip with .pth files in it."""

    def __init__(self):
        super().__init__()
        # A policy that has learned nothing prefers no action: chance decides between its first and second.
        self.agent.learn(64 * 60)

    def make(self, path, step):
        self.learn()
        self.agent.save(path)

    def use(self, was, now):
        exact, read = (type(self.agent).load(path, device="cpu").policy for path in (was, now))
        look = torch.from_numpy(self.normal.normalize_obs(observations(10, 50).numpy()))
        with torch.no_grad():
            require_choices(*(policy.get_distribution(look).distribution.logits for policy in (exact, read)), "actions")
            require_near(exact.predict_values(look), read.predict_values(look), "values")


@animal("vecnormalize_{}_steps.pkl")
class StableBaselinesVecNormalize(StableBaselines):
    """stable-baselines3: `VecNormalize.save`, a pickle, beside it the latest normalised observations."""

    def make(self, path, step):
        self.learn()
        self.normal.save(path)
        # CheckpointCallback keeps this beside it. Here it is in the same file, so that the file is large enough to be released.
        with open(path, "ab") as f:
            pickle.dump(self.normal.normalize_obs(observations(step, 50).numpy()), f)

    def use(self, was, now):
        assert was.read_bytes() == now.read_bytes()
        scaled = type(self.normal).load(now, type(self.normal.venv)([Walker])).normalize_obs(observations(10, 50).numpy())
        assert np.isfinite(scaled).all()


@animal("policy_{}.pt", lossy=["policy.*weight"])
class StableBaselinesPolicy(StableBaselines):
    """stable-baselines3: policy and `obs_rms` in a .pt for deployment, model-only."""

    def make(self, path, step):
        self.learn()
        statistics = self.normal.obs_rms
        torch.save({"policy": self.agent.policy.state_dict(), "obs_rms": {
            "mean": torch.from_numpy(statistics.mean.copy()), "var": torch.from_numpy(statistics.var.copy()),
            "count": statistics.count}}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        check_scaling(before["obs_rms"], after["obs_rms"], "mean", "var")
        acts = []
        for state in (before, after):
            self.agent.policy.load_state_dict(state["policy"])
            acts.append(self.agent.policy.get_distribution(torch.randn(64, DIM, generator=torch.Generator().manual_seed(2))))
        require_near(*(a.distribution.logits.detach() for a in acts), "logits")


@animal("value_norm_{}.pt", lossy=["critic.*.weight"])
class ValueNorm:
    """MAPPO's ValueNorm beside a critic: the variance is `mean_sq` less the square of `mean`."""

    def __init__(self):
        self.critic = actor()
        self.optimizer = torch.optim.Adam(self.critic.parameters(), 1e-3)
        self.mean, self.square, self.debias = torch.zeros(DIM), torch.zeros(DIM), torch.zeros(())

    def make(self, path, step):
        for i in range(5):
            x = observations(step + i) + 3 * SCALES
            self.mean.lerp_(x.mean(0), 0.01)
            self.square.lerp_(x.square().mean(0), 0.01)
            self.debias.lerp_(torch.ones(()), 0.01)
        train(self.critic, lambda x: x, step, self.optimizer)
        torch.save({"critic": self.critic.state_dict(), "normalizer": {
            "running_mean_biased": self.mean, "mean_sq": self.square, "debiasing_term": self.debias}}, path)

    def use(self, was, now):
        variances = []
        for state in (load(was)["normalizer"], load(now)["normalizer"]):
            mean, square = (state[k] / state["debiasing_term"] for k in ("running_mean_biased", "mean_sq"))
            variances.append(square - mean.square())
        negative = ((variances[1] <= 0) & (variances[0] > 0)).sum().item()
        assert not negative, f"{negative} of {DIM} variances are not positive"
        require_same(*variances, "variances")


@animal("rnd_{}.pt", lossy=["predictor.*", "optimizer.state.*"])
class RandomNetworkDistillation:
    """RND: a frozen random network, its predictor with an optimizer, and the normaliser of the observations."""

    def __init__(self):
        self.target, self.predictor, self.normal = actor(), actor(), rsl_rl_normalization()
        self.optimizer = torch.optim.Adam(self.predictor.parameters(), 1e-3)

    def bonus(self, target, predictor, x):
        return (target(x) - predictor(x)).square().mean(1)

    def make(self, path, step):
        self.normal.update(observations(step))
        look = lambda: self.normal(observations(step))
        fit(self.optimizer, lambda: self.bonus(self.target.requires_grad_(False), self.predictor, look()).mean(), 10)
        modules = {"target": self.target, "predictor": self.predictor, "optimizer": self.optimizer, "normalizer": self.normal}
        torch.save({name: module.state_dict() for name, module in modules.items()}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        require_no_zero(before["normalizer"]["_var"], after["normalizer"]["_var"], "variances")
        x = torch.randn(256, DIM, generator=torch.Generator().manual_seed(2))
        bonuses = []
        for state in (before, after):
            nets = actor(), actor()
            nets[0].load_state_dict(state["target"]), nets[1].load_state_dict(state["predictor"])
            bonuses.append(self.bonus(*nets, x).detach())
        require_near(*bonuses, "curiosity bonuses")
