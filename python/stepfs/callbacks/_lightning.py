"""The callback for Lightning, under either of its names."""

import sys
from typing import TYPE_CHECKING, Any, Optional

from .._program import AnyPath
from . import Numbers

if TYPE_CHECKING:
    from pytorch_lightning import Callback
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class LightningCallback(Callback):  # type: ignore[misc, unused-ignore]
    """After each save, logs the numbers of the mount that holds the checkpoints, or ``directory``, to all loggers.

    Lightning tells callbacks when a save begins, and of whole checkpoints only. So the numbers come before the next
    batch, or at the end.
    """

    def __init__(self, directory: Optional[AnyPath] = None) -> None:
        self._directory, self._numbers, self._has_saved = directory, Numbers(), False

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._has_saved = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._log(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._log(trainer)

    def _log(self, trainer: Any) -> None:
        if not self._has_saved or not trainer.is_global_zero:
            return
        self._has_saved = False
        saver = trainer.checkpoint_callback
        numbers = self._numbers.of(self._directory or getattr(saver, "dirpath", None) or trainer.default_root_dir)
        for logger in trainer.loggers if numbers else ():
            logger.log_metrics(numbers, step=trainer.global_step)
