"""The job of every writer: so many steps, so many saves, so many of them kept."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

EVERY = 10  # steps from one save to the next
SAVES = 8
KEEP = 5  # checkpoints that the library's own rotation leaves
MORE = 10  # steps after a resume
LAST = EVERY * SAVES
NEWEST = LAST
OLD = EVERY * (SAVES - KEEP + 2)  # the second of those that are left: not the first of its chain


@dataclass
class Job:
    """One training or one resume. A writer saves into `folder`, and puts all else into `scratch`."""

    folder: Path
    scratch: Path
    variant: str = ""
    seed: int = 1
    at: int = 0  # the step of the checkpoint to resume from; 0: train from the beginning
    after_save: list = field(default_factory=list)  # a command: in a mount it waits until older checkpoints are released

    @property
    def last(self):
        return self.at + MORE if self.at else LAST

    def steps(self):
        return range(self.at + 1, self.last + 1)

    def due(self, step):
        return not self.at and step % EVERY == 0

    def saved(self):
        """After each save, so that the next save and the rotation meet released files."""
        if self.after_save and int(os.environ.get("RANK", 0)) == 0:
            subprocess.run(self.after_save, check=True, stdout=subprocess.DEVNULL)

    def rotate(self, pattern):
        """Rotates as a training script does for a library without rotation."""
        number = lambda path: int(re.findall(r"\d+", path.name)[0])
        for path in sorted(self.folder.glob(pattern), key=number)[:-KEEP]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
