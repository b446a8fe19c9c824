"""The callback for transformers' Trainer."""

from typing import Any, Optional

import transformers

from .._program import AnyPath
from . import Numbers


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """After each save, logs the numbers of the mount that holds the output directory, or ``directory``.

    ``trainer.add_callback(TrainerCallback(trainer))``: it logs by ``trainer.log``, so every logger of the Trainer has
    them, and ``trainer.state.log_history``.
    """

    def __init__(self, trainer: Any, directory: Optional[AnyPath] = None) -> None:
        self._trainer, self._directory, self._numbers = trainer, directory, Numbers()

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.is_world_process_zero:
            numbers = self._numbers.of(self._directory or args.output_dir)
            if numbers:
                self._trainer.log(numbers)
