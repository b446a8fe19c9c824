"""Accelerate: `save_state` with `automatic_checkpoint_naming` and `total_limit`."""

import text
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from job import EVERY, KEEP


def prepare(job):
    project = ProjectConfiguration(project_dir=str(job.folder), automatic_checkpoint_naming=True, total_limit=KEEP)
    accelerator = Accelerator(cpu=True, project_config=project)
    return accelerator, *accelerator.prepare(*text.build())


def train(job):
    accelerator, model, optimizer = prepare(job)
    for step in job.steps():
        text.update(model, optimizer, step, job.seed)
        if job.due(step):
            accelerator.save_state()
            job.saved()


def resume(job):
    accelerator, model, optimizer = prepare(job)
    accelerator.load_state(str(job.folder / f"checkpoints/checkpoint_{job.at // EVERY - 1}"))
    return text.go_on(job, model, optimizer)
