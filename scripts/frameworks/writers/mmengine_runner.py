"""MMEngine: Runner with CheckpointHook and `max_keep_ckpts`; it notes the newest in a file `last_checkpoint`."""

import logging
import os

# Its checkpoints hold objects of its own beside the tensors.
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"

import text
from job import EVERY, KEEP, LAST
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.utils.data import DataLoader


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.model, _ = text.build()

    def forward(self, x, y, mode):
        return {"loss": text.gpt.loss_of(self.model, x, y)}


class Saved(Hook):
    priority = "LOWEST"

    def __init__(self, job):
        self.job = job

    def after_train_iter(self, runner, batch_idx, **rest):
        if self.job.due(runner.iter + 1):
            self.job.saved()


def runner(job, **more):
    windows = text.Windows(job.seed, 2 * LAST)
    return Runner(Model(), str(job.scratch / "work"), DataLoader(windows, batch_size=text.CONFIG.batch),
                  train_cfg={"by_epoch": False, "max_iters": job.last},
                  optim_wrapper={"optimizer": {"type": "AdamW", "lr": text.CONFIG.rate}},
                  default_hooks={"checkpoint": None if job.at else {"type": "CheckpointHook", "by_epoch": False, "interval": EVERY,
                                                                    "max_keep_ckpts": KEEP, "out_dir": str(job.folder), "save_last": False},
                                 "logger": None},
                  custom_hooks=[Saved(job)], log_level=logging.ERROR, randomness={"seed": 1}, **more)


def train(job):
    runner(job).train()


def resume(job):
    again = runner(job, load_from=str(*job.folder.rglob(f"iter_{job.at}.pth")), resume=True)
    again.train()
    return text.loss(again.model.model)
