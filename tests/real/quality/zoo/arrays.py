"""Files of numpy's own formats, and torch.save's format before zips."""

import numpy as np
import torch

from .keeper import animal, load, require_same, require_same_choice
from .normalisers import DIM, actor, check_scaling, observations, train
from .traps import Observed


@animal("embeddings_{}.npy")
class EmbeddingsArray(Observed):
    """numpy: embeddings of a data set as one `.npy`, computed by a model at each of its checkpoints."""

    def make(self, path, step):
        self.train()
        np.save(path, self.net(self.x).detach().numpy())

    def use(self, was, now):
        before, after = (load(path)["array"] for path in (was, now))
        require_same(before, after, "entries of the embeddings")
        near = lambda table: (torch.cdist(table, table) + 1e9 * torch.eye(1000)).argmin(1)
        require_same_choice(near(before), near(after), "nearest neighbours")


class Agent:
    """A policy, its Adam, and the statistics that normalise its observations."""

    def __init__(self):
        from skrl.resources.preprocessors.torch import RunningStandardScaler

        self.policy, self.scaler = actor(), RunningStandardScaler(DIM, device="cpu")
        self.optimizer = torch.optim.Adam(self.policy.parameters(), 1e-3)

    def learn(self, step):
        for i in range(5):
            self.scaler(observations(step + i).double(), train=True)
        train(self.policy, lambda x: self.scaler(x).float(), step, self.optimizer)


@animal("agent_{}.npz", lossy=["policy.*"])
class AgentArrays(Agent):
    """numpy: a policy with Adam's moments under its names, and a normaliser, as one `.npz`."""

    def make(self, path, step):
        self.learn(step)
        arrays = {f"policy.{name}": t.detach() for name, t in self.policy.named_parameters()}
        for name, parameter in self.policy.named_parameters():
            state = self.optimizer.state[parameter]
            arrays |= {f"policy.{name}.{slot}": state[slot] for slot in ("exp_avg", "exp_avg_sq")}
        arrays |= {f"obs_rms.{name}": t for name, t in self.scaler.state_dict().items()}
        np.savez(path, **{name: t.numpy() for name, t in arrays.items()})

    def use(self, was, now):
        check_scaling(load(was), load(now), "obs_rms.running_mean", "obs_rms.running_variance")


@animal("agent_{}.pt", lossy=["policy.*", "optimizer.state.*"])
class AgentLegacy(Agent):
    """torch before 1.6: policy, optimizer and normaliser in a legacy file."""

    def make(self, path, step):
        self.learn(step)
        modules = {"policy": self.policy, "optimizer": self.optimizer, "scaler": self.scaler}
        torch.save({name: module.state_dict() for name, module in modules.items()}, path, _use_new_zipfile_serialization=False)

    def use(self, was, now):
        check_scaling(*(load(path)["scaler"] for path in (was, now)), "running_mean", "running_variance")
