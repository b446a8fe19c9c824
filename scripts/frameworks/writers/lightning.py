"""PyTorch Lightning: ModelCheckpoint, which keeps the newest by `monitor="step"` and `save_top_k`; also with `save_last`."""

import logging

import pytorch_lightning as pl
import text
import torch
from job import EVERY, KEEP, LAST
from pytorch_lightning.callbacks import ModelCheckpoint

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Module(pl.LightningModule):
    def __init__(self, job):
        super().__init__()
        self.job = job
        self.model, self.optimizer = text.build()

    def configure_optimizers(self):
        return self.optimizer

    def training_step(self, batch, _):
        self.log("step", float(self.global_step + 1))
        return text.gpt.loss_of(self.model, batch["x"], batch["y"])


class Checkpoint(ModelCheckpoint):
    def __init__(self, job):
        super().__init__(job.folder, monitor="step", mode="max", save_top_k=KEEP, every_n_train_steps=EVERY, save_last=job.variant == "last")
        self.job = job

    def on_train_batch_end(self, *rest):
        before = self._last_global_step_saved
        super().on_train_batch_end(*rest)
        if self._last_global_step_saved != before:
            self.job.saved()


def fit(job, checkpoint=None):
    module = Module(job)
    # The data begins at the step that comes next: a fresh loader is not wound forward by Lightning.
    windows = torch.utils.data.Subset(text.Windows(job.seed, LAST + LAST), range(job.at * text.CONFIG.batch, 2 * LAST * text.CONFIG.batch))
    trainer = pl.Trainer(accelerator="cpu", max_steps=job.last, logger=False, enable_progress_bar=False, enable_model_summary=False,
                         callbacks=[] if job.at else [Checkpoint(job)], enable_checkpointing=not job.at, default_root_dir=job.scratch)
    trainer.fit(module, torch.utils.data.DataLoader(windows, batch_size=text.CONFIG.batch), ckpt_path=checkpoint)
    return module


def train(job):
    fit(job)


def resume(job):
    (path,) = job.folder.glob(f"*step={job.at}.ckpt")
    return text.loss(fit(job, str(path)).model)
