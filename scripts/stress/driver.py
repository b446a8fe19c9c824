"""A run of a scenario: the mount, the processes, ends and starts of the daemon, and the checks at the end."""

import fnmatch
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from multiprocessing.managers import BaseManager

import harness
import policies
from harness import BIN, Mount, objects, run

from .actors import BEGINS, ENDED, WAITS, WORKS, Control, fork
from .content import digest, find_stamp
from .ledger import Ledger
from .readers import Reader
from .scenario import ACTORS

# The longest time for an actor's last call, or for a call into a dead daemon.
PATIENCE = 180
# Lines of the daemon's log that are counted.
EVENTS = {"sealed": ": sealed, ", "archived": ": archived as ", "released": ": released", "merged": ": now a difference to ", "by policy": ": removed by retention",
          "restores": ": restored, "}  # fmt: skip
# Words that the daemon must never log.
TROUBLE = re.compile(r"panicked|ERROR|should not have|WARNING: ThreadSanitizer|ERROR: AddressSanitizer")
MOST_KEPT = 20


class Manager(BaseManager):
    pass


Manager.register("Ledger", Ledger)


def ignore_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class StressMount(Mount):
    def __init__(self, base, options):
        super().__init__(base, options.get("passthrough", True))
        self.options = options

    def arguments(self):
        more = [word for key in ("memory", "profile") if key in self.options for word in (f"--{key}", self.options[key])]
        return super().arguments() + more


class Failed(Exception):
    """A check at the end failed."""


class Run:
    """One run. `watch(run)` is called about four times a second while actors work."""

    def __init__(self, scenario, base=None, say=lambda line: None, watch=None):
        self.scenario, self.say, self.watch = scenario, say, watch or (lambda run: None)
        self.base = tempfile.mkdtemp(prefix="stepfs-stress-", dir=os.path.abspath(base or os.environ.get("STEPFS_TEST_DIR") or tempfile.gettempdir()))
        self.mount = StressMount(self.base, scenario.daemon)
        scenario.store, scenario.scratch = str(self.mount.store), self.base
        self.rng = random.Random(f"driver {scenario.seed}")
        self.failures, self.counts, self.interrupted = [], {"kills": 0, "remounts": 0, "readers that died of SIGBUS in a kill": 0}, False
        self.processes = []

    # --- life

    def run(self):
        """Answers whether all was well."""
        previous = signal.signal(signal.SIGINT, self.interrupt)
        manager = Manager(ctx=fork)
        manager.start(ignore_interrupts)
        try:
            self.ledger = manager.Ledger(self.scenario.seed)
            self.prepare()
            self.control = Control(self.scenario.slots())
            self.start_actors()
            self.supervise()
            self.stop_actors()
            if not self.interrupted:
                self.finish()
            problems, self.actors = self.ledger.report()
            self.failures += problems
            self.read_log()
        except Exception as error:  # noqa: BLE001 - the report is written in any case
            problems, self.actors = self.ledger.report()
            self.failures += [f"{type(error).__name__}: {error}", *problems]
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self.end_processes()
            self.mount.close()
            manager.shutdown()
            signal.signal(signal.SIGINT, previous)
        return not self.failures and not self.interrupted

    def interrupt(self, *_):
        self.interrupted = True

    def clean_up(self, keep):
        """Removes the leftovers of a run; never through a mount."""
        if not harness.mounts_below(self.base) and not keep:
            shutil.rmtree(self.base)

    def prepare(self):
        """A store with the scenario's settings, mounted."""
        self.mount.mount()
        self.mount.umount()
        top, rules = self.scenario.settings()
        settings = self.mount.store / "stepfs.toml"
        text = settings.read_text()
        for key, value in top.items():
            text, found = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
            assert found == 1, f"{key} is not in stepfs.toml"
        settings.write_text(text + rules)
        os.mkdir(f"{self.base}/originals")
        self.mount.mount()

    def start_actors(self):
        slot = 0
        for options in self.scenario.actors:
            for number in range(options.get("count", 1)):
                actor = ACTORS[options["do"]](self.scenario, options["name"], options, number, self.mount.dir, self.ledger, self.control, slot)
                self.processes.append([actor, None])
                slot += options.get("threads", 1)
        # No actor saves before all are there: with many actors on few cores their start takes a while.
        self.control.outage.value = 1
        for pair in self.processes:
            self.start(pair)
        self.park("beginning")
        self.unpark()
        self.was_away = False

    def start(self, pair):
        actor = pair[0]
        for thread in range(actor.threads):
            self.control.parked[actor.slot + thread] = BEGINS
        pair[1] = fork.Process(target=actor.main, daemon=True)
        pair[1].start()

    def supervise(self):
        daemon, began = self.scenario.daemon, time.monotonic()
        next_at = lambda every: time.monotonic() + self.rng.uniform(0.3, 1.7) * every if every else float("inf")
        kill_at, remount_at = next_at(daemon.get("kill_every")), next_at(daemon.get("remount_every"))
        while time.monotonic() - began < self.scenario.seconds and not self.interrupted:
            time.sleep(0.25)
            self.watch(self)
            self.look_after_processes(False)
            if ENDED in self.control.parked[:]:
                return  # it has said why; continuing is pointless
            if time.monotonic() > kill_at:
                self.kill()
                kill_at = next_at(daemon["kill_every"])
            if time.monotonic() > remount_at:
                self.remount()
                remount_at = next_at(daemon["remount_every"])

    def look_after_processes(self, outage):
        for pair in self.processes:
            actor, process = pair
            if process.is_alive() or process.exitcode == 0:
                continue
            process.join()
            for thread in range(actor.threads):
                self.control.parked[actor.slot + thread] = WAITS
            # Without a daemon the kernel raises SIGBUS for a page of a mapping.
            if process.exitcode == -signal.SIGBUS and (outage or self.was_away):
                self.counts["readers that died of SIGBUS in a kill"] += 1
                self.start(pair)
            else:
                raise Failed(f"actor {actor.name} ended with {process.exitcode}")

    was_away = False

    # --- outages

    def park(self, what):
        end = time.monotonic() + PATIENCE
        out = lambda slots: all(slot in (WAITS, ENDED) for slot in slots)
        while not out(self.control.parked):
            if time.monotonic() > end:
                late = [actor.name for actor, _ in self.processes if not out(self.control.parked[actor.slot : actor.slot + actor.threads])]
                raise Failed(f"{what}: after {PATIENCE} s still in a call: {', '.join(late)}\n{self.mount.log_tail()}")
            self.look_after_processes(True)
            time.sleep(0.02)

    def unpark(self):
        self.was_away = True
        for slot in range(len(self.control.parked)):
            if self.control.parked[slot] == WAITS:
                self.control.parked[slot] = WORKS
        self.control.outage.value += 1

    def kill(self):
        self.control.outage.value += 1
        self.mount.kill()
        self.park("kill")
        self.mount.mount()
        self.counts["kills"] += 1
        self.settle()
        self.check_tree(f"after kill {self.counts['kills']}")
        self.unpark()

    def remount(self):
        """Unlike a kill it waits until every actor has left its call: an open file keeps a mount busy."""
        self.control.outage.value += 1
        self.park("remount")
        self.mount.remount()
        self.counts["remounts"] += 1
        self.check_tree(f"after remount {self.counts['remounts']}")
        self.unpark()

    def settle(self):
        for path in self.ledger.unsettled():
            try:
                data = (self.mount / path).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                self.ledger.settle(path, None, None)
            else:
                found = find_stamp(data)
                self.ledger.settle(path, found and tuple(found[0]), digest(data))

    # --- checks

    def check_tree(self, when):
        """While all actors wait: exactly the expected files exist, and each reads as it may."""
        reader = Reader(self.scenario, "check", {}, 0, self.mount.dir, self.ledger, self.control, 0)
        reader.local.rng = self.rng
        there, known = set(reader.listed()), self.ledger.files()
        # The temporary name of safetensors before its rename.
        cut_off = {path for path in there - known.keys() if os.path.basename(path).startswith(".tmp") and self.counts["kills"]}
        if extra := sorted(there - known.keys() - cut_off):
            self.failures.append(f"{when}: {len(extra)} files that should not be there, as {extra[:5]}")
        for path in sorted(known.keys() - there):
            if known[path]:
                self.ledger.missing(path, time.monotonic())
        for path in sorted(there & known.keys()):
            if known[path]:
                reader.look(path, "read")

    def stop_actors(self):
        self.control.stop.set()
        end = time.monotonic() + PATIENCE
        for actor, process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
            if process.is_alive():
                raise Failed(f"actor {actor.name} is still in a call {PATIENCE} s after the end\n{self.mount.log_tail()}")

    def end_processes(self):
        for _, process in self.processes:
            if process and process.is_alive():
                process.kill()
                process.join(10)

    def require(self, condition, words):
        if not condition:
            self.failures.append(words)

    def finish(self):
        mount, ledger = self.mount, self.ledger
        self.say("everybody has stopped; checking")
        self.settle()
        mount.sync(600)
        if self.scenario.retention:
            run("gc", mount.dir, timeout=600)
            self.check_policy()
        self.check_tree("at the end")
        # The kernel may delay the news of the last closes. A file that was open until then may have waited for that.
        mount.sync(600)
        status = self.status = mount.status()
        self.require(status["queued"] == 0 and status["busy"] == 0, f"at the end {status['queued']} wait and {status['busy']} are busy")
        self.require(not status["failed"] and not status["frozen"] and not status["stalled"],
                     f"at the end failed {status['failed']}, frozen {status['frozen']}, stalled {status['stalled']}")
        mount.umount()
        self.clean("at the end")
        mount.mount()
        self.check_tree("after the last remount")
        # Any name can go: after all have gone, no object is left.
        for name in os.listdir(mount.dir):
            shutil.rmtree(mount / name) if (mount / name).is_dir() else os.unlink(mount / name)
        ledger.empty()
        mount.sync(600)
        run("gc", mount.dir, timeout=600)
        left = mount.status()
        self.counts["objects when everything was removed"] = len(objects(mount.store))
        self.require(left["files"] == 0 and left["object_bytes"] == 0 and not objects(mount.store),
                     f"everything was removed, and left are {left['files']} files, {len(objects(mount.store))} objects")
        mount.umount()
        self.clean("when everything was removed")

    def clean(self, when):
        code, text = harness.verify(self.mount.store)
        self.require(code == harness.OK, f"{when}, verify: exit code {code}\n{text}")
        left = [path.name for path in (self.mount.store / "tmp").iterdir()]
        self.require(not left, f"{when}, left in tmp/: {left}")

    def check_policy(self, at_the_end=True):
        """The checkpoints that the rules keep, counted by a separate implementation. While actors work, it only checks that no
        protected checkpoint has gone. A checkpoint that a rule wants again a moment later must not be gone.
        """
        before = self.ledger.policy_entries()
        gone = {name: {entry for entry in entries if not os.path.lexists(self.mount / entry)} for name, entries in before.items()}
        for name, entries in self.ledger.policy_entries().items():
            rule = next((rule for rule in self.scenario.retention if fnmatch.fnmatch(name, rule["glob"].split("/")[0])), None)
            if not rule or not entries:
                continue
            steps = {int(re.search(r"(\d+)(\.\w+)?$", entry)[1]): entry for entry in entries}
            wanted = {steps[step] for step in policies.survivors(list(steps), rule.get("keep_last"), rule.get("keep_every"), set())}
            # A checkpoint that a kill left half written counts among the last, or is kept beside them.
            cut = self.counts["kills"] > 0
            self.require(not wanted & gone[name] or cut, f"retention removed {sorted(wanted & gone[name])}")
            if at_the_end:
                more = [entry for entry in entries if entry not in wanted | gone[name] and not self.is_pinned(entry)]
                self.require(not more or cut, f"retention kept {more}")
            for entry in gone[name]:
                self.ledger.gone_by_policy(entry)

    def is_pinned(self, entry):
        def pin(path):
            try:
                return os.getxattr(path, "user.stepfs.pin")
            except OSError:
                return None

        return any(map(pin, [self.mount / entry, *(self.mount / entry).rglob("*")]))

    def read_log(self):
        text = self.mount.log.read_text(errors="replace") if self.mount.log.exists() else ""
        lines = text.splitlines()
        self.counts |= {what: sum(words in line for line in lines) for what, words in EVENTS.items()}
        said = [line for line in lines if TROUBLE.search(line)]
        self.failures += [f"the daemon's log: {line}" for line in said[:MOST_KEPT]]
