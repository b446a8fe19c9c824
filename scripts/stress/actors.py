"""An actor: one process that repeats one kind of action until it is told to stop.

The driver may end the daemon during any call. It announces this first (`Control.outage`), and mounts again only when every
actor has left its call and waits. In between, the mount point is an empty directory, in which no actor may write. An error is
forgiven only if there was such an outage since the call began.
"""

import multiprocessing
import os
import random
import signal
import threading
import time
import traceback

# This process's share of descriptors, threads and cores; the others need some, too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

fork = multiprocessing.get_context("fork")
PAUSE = 0.01
# The states of a thread: in a call or between two; waiting for the end of an outage; at its end; before its first step.
WORKS, WAITS, ENDED, BEGINS = 0, 1, 2, 3


class Control:
    """The signals between driver and actors."""

    def __init__(self, slots):
        self.stop = fork.Event()
        self.outage = fork.Value("i", 0)  # odd: the daemon is being ended, or away
        self.parked = fork.Array("i", slots, lock=False)  # for each thread one of the following

    def away(self):
        return self.outage.value % 2 == 1

    def was_away(self, since):
        """Whether there was an outage since `outage` had this value, or just before: the look and the call are two steps."""
        return self.outage.value != since or self.away()


class Actor:
    """`options` is the actor's table of the scenario file. Subclasses have `step`, and count their actions."""

    def __init__(self, scenario, name, options, number, root, ledger, control, slot):
        self.scenario, self.name, self.options, self.number = scenario, name, options, number
        self.root, self.ledger, self.control, self.slot = str(root), ledger, control, slot
        self.threads = options.get("threads", 1)
        self.period = options.get("period", 0.2)
        self.local = threading.local()

    @property
    def rng(self):
        return self.local.rng

    def full(self, path):
        return f"{self.root}/{path}"

    def count(self, what, amount=1):
        self.ledger.count(self.name, what, amount)

    def problem(self, words):
        self.count("errors")
        self.ledger.problem(f"{self.name}: {words}")

    # --- running

    def main(self):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver sets it at the end
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.nice(self.options.get("nice", 0))
        threads = [threading.Thread(target=self.loop, args=(n,)) for n in range(1, self.threads)]
        for thread in threads:
            thread.start()
        self.loop(0)
        for thread in threads:
            thread.join()

    def loop(self, thread):
        self.local.rng = random.Random(f"{self.scenario.seed} {self.name} {self.number} {thread}")
        slot = self.slot + thread
        try:
            self.begin()
            self.control.parked[slot] = WAITS
            while not self.control.stop.is_set():
                if self.control.away():
                    self.control.parked[slot] = WAITS
                    time.sleep(PAUSE)
                    continue
                self.control.parked[slot] = WORKS
                if self.control.away():
                    continue  # the outage began between the two; the driver waits for the flag
                self.one(self.control.outage.value)
                # Spread over time, and out of step with other threads.
                self.wait(self.period * self.rng.uniform(0.5, 1.5))
        except BaseException:  # noqa: BLE001 - whatever it was, the run has failed
            self.problem(f"the actor ended: {traceback.format_exc()}")
        finally:
            self.control.parked[slot] = ENDED

    def one(self, outage):
        try:
            self.step()
        except Exception as error:  # noqa: BLE001 - torch and safetensors have errors of many kinds
            if self.control.was_away(outage):
                self.count("cut off")
            else:
                last = traceback.extract_tb(error.__traceback__)[-1]
                self.problem(f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})")

    def wait(self, seconds):
        end = time.monotonic() + seconds
        while not self.control.stop.is_set() and not self.control.away() and time.monotonic() < end:
            time.sleep(min(0.05, max(0, end - time.monotonic())))

    def begin(self):
        """In each thread, before its first step."""

    def step(self):
        raise NotImplementedError
