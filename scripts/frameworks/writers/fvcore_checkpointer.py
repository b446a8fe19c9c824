"""fvcore, as Detectron2 uses it: PeriodicCheckpointer with `max_to_keep`; it notes the newest in a file `last_checkpoint`."""

import text
from fvcore.common.checkpoint import Checkpointer, PeriodicCheckpointer
from job import EVERY, KEEP


def train(job):
    model, optimizer = text.build()
    periodic = PeriodicCheckpointer(Checkpointer(model, str(job.folder), optimizer=optimizer), EVERY, max_to_keep=KEEP)
    for step in job.steps():
        text.update(model, optimizer, step, job.seed)
        periodic.step(step - 1)
        if job.due(step):
            job.saved()


def resume(job):
    model, optimizer = text.build()
    Checkpointer(model, optimizer=optimizer).load(str(job.folder / f"model_{job.at - 1:07d}.pth"))
    return text.go_on(job, model, optimizer)
