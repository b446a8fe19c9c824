"""timm: CheckpointSaver with `max_history`; `last.pth.tar` and `model_best.pth.tar` are hard links to the newest."""

import text
from job import KEEP
from timm.models import resume_checkpoint
from timm.utils import CheckpointSaver


def train(job):
    model, optimizer = text.build()
    saver = CheckpointSaver(model, optimizer, checkpoint_dir=str(job.folder), recovery_dir=str(job.scratch), max_history=KEEP)
    for step in job.steps():
        text.update(model, optimizer, step, job.seed)
        if job.due(step):
            saver.save_checkpoint(step, metric=step)
            job.saved()


def resume(job):
    model, optimizer = text.build()
    resume_checkpoint(model, str(job.folder / f"checkpoint-{job.at}.pth.tar"), optimizer, log_info=False)
    return text.go_on(job, model, optimizer)
