"""torchtitan's CheckpointManager with `keep_latest_k`, FSDP2 on two ranks, its own containers of optimizers and schedulers."""

import logging

import text
import torch.distributed as dist
from job import EVERY, KEEP
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

logging.disable(logging.WARNING)


class Progress:
    """The trainer's own state, as torchtitan saves it."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def build(job):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model, _ = text.build()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": text.CONFIG.rate})]
    optimizers = OptimizersContainer(OptimizersContainer.Config(param_groups=groups, implementation="for-loop"), model_parts=[model])
    schedulers = LRSchedulersContainer(optimizers, lambda step: 1.0)
    config = CheckpointManager.Config(enable=True, folder=job.folder.name, interval=EVERY, keep_latest_k=KEEP)
    progress = Progress()
    manager = CheckpointManager(config, dataloader=Progress(), model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
                                states={"train_state": progress}, sd_adapter=None, base_folder=str(job.folder.parent))
    return model, optimizers, schedulers, progress, manager


def run(job, model, optimizers, schedulers, progress, manager):
    for step in job.steps():
        text.update(model, optimizers, step, job.seed, dist.get_rank())
        schedulers.step()
        progress.step = step
        if job.due(step):
            manager.save(step)
            dist.barrier()
            job.saved()
    manager.close()
    return model


def train(job):
    run(job, *build(job))


def resume(job):
    parts = build(job)
    assert parts[-1].load(step=job.at) and parts[-2].step == job.at
    return text.loss(run(job, *parts))
