"""stable-baselines3: PPO on CartPole with `CheckpointCallback`, a zip of torch's files. The loss is that of the value function."""

import points  # noqa: F401
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from job import EVERY, MORE, SAVES
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.monitor import Monitor

# One of our steps is so many of the game's; the network learns after every 10 of them.
MOVES = 25


class Checkpoints(CheckpointCallback):
    def __init__(self, job):
        super().__init__(EVERY * MOVES, str(job.folder), name_prefix="ppo")
        self.job = job

    def _on_step(self):
        super()._on_step()
        if self.n_calls % self.save_freq == 0:
            self.job.rotate("ppo_*_steps.zip")
            self.job.saved()
        return True


def build(job):
    torch.set_num_threads(1)
    env = Monitor(CartPoleEnv())
    return PPO("MlpPolicy", env, n_steps=10 * MOVES, batch_size=50, seed=job.seed, device="cpu", policy_kwargs={"net_arch": [256, 256]})


def train(job):
    build(job).learn(SAVES * EVERY * MOVES, callback=Checkpoints(job))


def resume(job):
    model = PPO.load(job.folder / f"ppo_{job.at * MOVES}_steps.zip", env=build(job).get_env(), device="cpu")
    model.set_random_seed(job.seed)
    model.learn(MORE * MOVES, reset_num_timesteps=False)
    return model.logger.name_to_value["train/value_loss"]
