"""Callbacks that log, after each save, how far stepfs is behind and how much room the checkpoints take.

``TrainerCallback`` is for transformers, ``LightningCallback`` for Lightning. Each imports its library when it is named
here first. Both log ``stepfs/queued`` (steps of archiving that wait), ``stepfs/logical_bytes`` (bytes that programs see)
and ``stepfs/stored_bytes`` (bytes that the store takes). A call of stepfs that fails never fails a training run: the
logger ``stepfs`` warns once.
"""

import importlib
from typing import TYPE_CHECKING, Any, Dict, Optional

from .._program import AnyPath, notes

if TYPE_CHECKING:
    from ._lightning import LightningCallback as LightningCallback
    from ._transformers import TrainerCallback as TrainerCallback

_MODULES = {"LightningCallback": "._lightning", "TrainerCallback": "._transformers"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


class Numbers:
    """Asks for the numbers to log."""

    def __init__(self) -> None:
        self._has_warned = False

    def of(self, directory: AnyPath) -> Optional[Dict[str, float]]:
        """The numbers of the mount that holds a directory. None if they cannot be had; never raises."""
        from .. import status

        try:
            now = status(directory)
        except Exception as why:
            if not self._has_warned:
                self._has_warned = True
                notes.warning("the training run logs no numbers of stepfs: %s", why)
            return None
        return {
            "stepfs/queued": now.queued,
            "stepfs/logical_bytes": now.logical_bytes,
            "stepfs/stored_bytes": now.stored_bytes,
        }
