"""PyTorch-Ignite: `Checkpoint` with `DiskSaver` and `n_saved`."""

import text
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from job import EVERY, KEEP


def engine(job, model, optimizer):
    def update(trainer, _):
        text.update(model, optimizer, trainer.state.iteration, job.seed)

    return Engine(update)


def train(job):
    model, optimizer = text.build()
    trainer = engine(job, model, optimizer)
    handler = Checkpoint({"model": model, "optimizer": optimizer, "trainer": trainer}, DiskSaver(str(job.folder), require_empty=False),
                         n_saved=KEEP, global_step_transform=lambda engine, event: engine.state.iteration)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=EVERY), handler)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=EVERY), lambda: job.saved())
    trainer.run([0] * job.last, max_epochs=1)


def resume(job):
    model, optimizer = text.build()
    Checkpoint.load_objects({"model": model, "optimizer": optimizer}, checkpoint=str(job.folder / f"checkpoint_{job.at}.pt"))
    return text.go_on(job, model, optimizer)
