"""What it costs to go on from one checkpoint on another machine: iterations behind the run that nothing interrupted.

The task is one that chose no steps, with measurements at each checkpoint. Each restore is the first one of its run.
"""

from dataclasses import replace
from pathlib import Path

from . import gaps, protocol, tasks
from .chains import PROMISES
from .training import digest

OF = tasks.TASKS["second_gpt_w112_i24"]
LAST = max(tasks.LATE)  # iterations that a restored run goes on
PLACES = (OF.length - LAST) // OF.every  # checkpoints that have as many iterations behind them
TASK = replace(OF, name="resumed", starts=tuple(range(PLACES)), chain=1, apart=-(-LAST // OF.every), count=PLACES + 1)
PROMISE = PROMISES["balanced"]


class Series:
    """Runs of several seeds that nothing interrupts, and their checkpoints."""

    def __init__(self, raw, seeds, say):
        self.raw, self.seeds = Path(raw), seeds
        self.bases = {seed: protocol.uninterrupted(TASK, seed, raw, say=say) for seed in seeds}

    def file(self, seed, place):
        return protocol.folder(self.raw, TASK, seed) / TASK.file(place)

    def go_on(self, seed, path):
        """Trains on from the file `path`, in its directory, as far as a restore is judged. Returns the iterations that the
        restore costs. If the file is equal to what was saved, nothing is lost and nothing is trained: None.
        """
        state = protocol.load(path)
        place = (state["step"] - TASK.start) // TASK.every
        if digest(state) == digest(protocol.load(self.file(seed, place))):
            return None
        run, log = TASK.make(seed), protocol.Log()
        run.load(state)
        at = run.iteration
        log.measure(run)
        wanted = {at + offset for offset in TASK.offsets}
        average = protocol.Average(*TASK.window(at))
        protocol.advance(TASK, run, at + LAST, log, wanted, path.parent, {place + 1}, [average])
        assert protocol.load(path.parent / TASK.file(place + 1))["step"] == at + TASK.every
        chain = gaps.of_chain(TASK, [{"at": at, **log.data()}], self.bases[seed], list(self.bases.values()))
        return chain["both"]
