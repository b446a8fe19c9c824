"""Jobs of Lightning. A test imports this where it uses it, since Lightning takes seconds to import."""

import logging
import shutil
import warnings

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="pytorch_lightning")


class Regression(lightning.LightningModule):
    """A regression with batch normalisation. It logs a loss that is the best in the second epoch."""

    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, width))

    def training_step(self, batch, index):
        return (self.net(batch[0]) - batch[0].roll(1, 1)).square().mean()

    def validation_step(self, batch, index):
        self.log("val_loss", abs(self.current_epoch - 1.0) + 0.5)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)}


class Save(ModelCheckpoint):
    """Keeps each checkpoint's original bytes."""

    plain = None

    def _save_checkpoint(self, trainer, filepath):
        super()._save_checkpoint(trainer, filepath)
        shutil.copy(filepath, self.plain)


def trainer(**options):
    """A Trainer on one processor that says nothing."""
    return lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, **options)
