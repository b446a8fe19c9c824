"""The ledger: which bytes each file may show. One process keeps it for all actors, and judges every answer of a reader.

It has two tables. *Paths*: the content of each path, and whether an actor is changing it now. "Now" begins before the call
that changes it and ends after its return. So if a path was at rest during a whole read, the reader must find exactly the
ledger's content. *Versions*: the content of each write, by stamp and family (a copy is a family of its own). Its bytes may
change once, to the final form. The first reader of that form decides it for every later reader.

Times are from the monotonic clock, which all processes of a machine share.
"""

import fnmatch
import os
import random
import shutil
import threading
import time
from dataclasses import dataclass, field

from .content import Stamp

# Nobody reads more problems than that.
MOST_PROBLEMS = 50


@dataclass
class Path:
    changing: int = 0  # calls under way that change this path
    since: float = 0.0  # when the last one began or ended
    torn: bool = False  # during a change, a part of the new content may be seen
    torn_since: float = 0.0  # when an actor last began to write into this content
    torn_until: float = 0.0  # when that ended
    there: bool = False
    unknown: bool = False  # the end of the daemon cut a call off: the content is unknown
    stamp: Stamp | None = None
    family: str = ""


@dataclass
class Version:
    exact: dict  # digest by view: "bytes", "tensors"
    size: int
    original: str | None  # a plain copy of the written bytes
    order: int  # among all writes, at a moment before its bytes were written
    final: dict = field(default_factory=dict)
    final_since: float = 0.0
    pinned_since: float = 0.0  # pinned while it was exact
    recalled: bool = False  # an actor asked for a recall: a resident file may have the final form


@dataclass
class Series:
    """The ledger's knowledge of one run of a saver."""

    name: str
    exact: bool = False  # its name asks for exact files
    policy: bool = False  # retention removes its checkpoints
    in_place: bool = False  # files are truncated while others may have them mapped
    entries: dict = field(default_factory=dict)  # {path of a checkpoint: its files}, complete ones, oldest first
    newest_order: dict = field(default_factory=dict)  # by part


class Ledger:
    def __init__(self, seed=0):
        self.lock = threading.RLock()  # each call is one step
        self.rng = random.Random(seed)
        self.paths, self.versions, self.series = {}, {}, {}
        self.claimed = set()  # checkpoints that an actor moves, removes or rewrites
        self.copied = set()
        self.orders = 0
        self.numbers = {}
        self.problems, self.counts = [], {}

    # --- counting

    def count(self, actor, what, amount=1):
        with self.lock:
            row = self.counts.setdefault(actor, {})
            row[what] = row.get(what, 0) + amount

    def problem(self, words):
        with self.lock:
            if len(self.problems) < MOST_PROBLEMS:
                self.problems.append(words)
            return words

    def report(self):
        with self.lock:
            return list(self.problems), {actor: dict(row) for actor, row in self.counts.items()}

    # --- writing

    def begin_series(self, run, name, exact, policy, in_place):
        with self.lock:
            self.series[run] = Series(name, exact, policy, in_place)

    def number(self, run):
        """The number of the next write of a series."""
        with self.lock:
            self.numbers[run] = self.numbers.get(run, 0) + 1
            return self.numbers[run]

    def begin(self, *paths, torn=False):
        """Calls begin that change these paths."""
        with self.lock:
            for path in paths:
                record = self.paths.setdefault(path, Path())
                record.changing += 1
                record.torn = record.torn or torn
                record.since = time.monotonic()
                record.torn_since = record.since if torn else record.torn_since

    def closing(self, stamp, family, exact, size, original):
        """The file is written and closed next, and may count as newer than others from then on."""
        with self.lock:
            self.orders += 1
            self.versions[stamp, family] = Version(dict(exact), size, original, self.orders)
            if not family:
                self.series[stamp.run].newest_order[stamp.part] = self.orders

    def end(self, *paths):
        """The calls have returned."""
        with self.lock:
            for path in paths:
                record = self.paths[path]
                record.changing -= 1
                record.since = time.monotonic()
                if record.torn and record.changing == 0:
                    record.torn, record.torn_until = False, record.since

    def written(self, path, stamp, family=""):
        with self.lock:
            record = self.paths[path]
            if record.there and not record.family:
                self.drop_original(path)
            record.there, record.unknown, record.stamp, record.family = True, False, stamp, family
            if not family:
                self.closed(stamp)
            self.end(path)

    def closed(self, stamp):
        """If another actor of its series has begun to write meanwhile, nobody knows which of the two is newer."""
        version, newest = self.versions[stamp, ""], self.series[stamp.run].newest_order
        self.orders += 1
        if newest[stamp.part] == version.order:
            version.order = self.orders
        newest[stamp.part] = self.orders

    def cut_off(self, *paths, of=None):
        """The daemon ended during a call, so the outcome is unknown. `of` is the stamp of a state that was being written. Enough
        of it may exist to count as the newest of its series; states that were closed before need not be exact then.
        """
        with self.lock:
            if of:
                self.orders += 1
                self.series[of.run].newest_order[of.part] = self.orders
            for path in paths:
                record = self.paths[path]
                record.unknown = True
                self.end(path)

    def saved(self, run, entry, files):
        """A checkpoint is complete."""
        with self.lock:
            self.series[run].entries.pop(entry, None)
            self.series[run].entries[entry] = list(files)

    # --- checkpoints that others work on

    def claim(self, runs, spare, suffix=""):
        """(run, checkpoint, its files) that is none of the newest `spare` of its series, and free of other actors."""
        with self.lock:
            found = []
            for run, series in self.series.items():
                if any(fnmatch.fnmatch(series.name, glob) for glob in runs):
                    entries = list(series.entries.items())
                    found += [(run, entry, files) for entry, files in entries[: len(entries) - spare]
                              if entry not in self.claimed and any(f.endswith(suffix) for f in files)]
            if not found:
                return None
            run, entry, files = self.rng.choice(sorted(found))
            self.claimed.add(entry)
            return run, entry, list(files)

    def unclaim(self, entry):
        with self.lock:
            self.claimed.discard(entry)

    def removed(self, run, entry, files):
        with self.lock:
            for path in files:
                self.drop_original(path)
                record = self.paths[path]
                record.there, record.unknown, record.stamp = False, False, None
                self.end(path)
            self.series[run].entries.pop(entry, None)

    def drop_original(self, path):
        """No reader will compare with it any more. A reader that tries finds it gone, and skips it."""
        if (version := self.version_at(path)) and version.original:
            shutil.rmtree(os.path.dirname(version.original), ignore_errors=True)
            version.original = None

    def has_policy(self, run):
        return self.series[run].policy

    def forget(self, run, entry):
        """A checkpoint that no actor may work on any more."""
        with self.lock:
            self.series[run].entries.pop(entry, None)

    def moved(self, source, target):
        with self.lock:
            old, new = self.paths[source], self.paths[target]
            new.there, new.unknown, new.stamp, new.family = True, False, old.stamp, old.family
            old.there, old.unknown, old.stamp = False, False, None
            self.end(source, target)

    def unlinked(self, path):
        with self.lock:
            record = self.paths[path]
            record.there, record.unknown, record.stamp = False, False, None
            self.end(path)

    def may_copy(self, path, family):
        """The stamp behind a path, if there is no copy of it in this family yet."""
        with self.lock:
            record = self.paths.get(path)
            if not record or not record.there or record.unknown or record.changing or (record.stamp, family) in self.copied:
                return None
            if self.series[record.stamp.run].in_place:
                return None  # another actor may overwrite it during the copy
            self.copied.add((record.stamp, family))
            return record.stamp

    def copying(self, stamp, family):
        with self.lock:
            origin = self.versions[stamp, ""]
            self.orders += 1
            self.versions[stamp, family] = Version(dict(origin.exact), origin.size, origin.original, self.orders)

    def recalling(self, path):
        with self.lock:
            if version := self.version_at(path):
                version.recalled = True

    def pinned(self, path):
        """A pin was set, and the file was resident after that."""
        with self.lock:
            if (version := self.version_at(path)) and not version.recalled:
                version.pinned_since = version.pinned_since or time.monotonic()

    def unpinning(self, path):
        """Before a pin is taken off."""
        with self.lock:
            if version := self.version_at(path):
                version.pinned_since = 0.0

    def version_at(self, path):
        record = self.paths.get(path)
        return self.versions.get((record.stamp, record.family)) if record and record.there and record.stamp else None

    # --- reading

    def may_map(self, path):
        """A process that maps a file dies of SIGBUS if another truncates it, on any file system."""
        with self.lock:
            record = self.paths.get(path)
            run = record and record.stamp and self.series.get(record.stamp.run)
            return bool(run) and not run.in_place and not record.torn

    def newest(self):
        """Paths of the files of the newest complete checkpoint of each series."""
        with self.lock:
            return [path for series in self.series.values() if series.entries for path in list(series.entries.values())[-1]]

    def at_rest(self, path, since):
        record = self.paths.get(path)
        return record is not None and record.changing == 0 and record.since < since

    def is_at_rest(self, path, since):
        with self.lock:
            return self.at_rest(path, since)

    def written_into(self, path, since):
        """An actor has begun to write into it since then, so an open file may change."""
        with self.lock:
            record = self.paths.get(path)
            return record is None or record.torn_since > since

    def missing(self, path, since):
        """A reader did not find a file that a directory had listed."""
        with self.lock:
            record = self.paths.get(path)
            if not record or record.unknown or not record.there or not self.at_rest(path, since):
                return None
            series = self.series[record.stamp.run]
            if series.policy and not self.is_newest(series, path):
                self.drop_original(path)
                # The policy removed it; a process that opened it before may still read it.
                record.there, record.since = False, time.monotonic()
                return None
            return self.problem(f"{path}: is lost")

    def is_newest(self, series, path):
        return bool(series.entries) and path in list(series.entries.values())[-1]

    def unreadable(self, path, since, why):
        """A reader could not parse a file."""
        with self.lock:
            record = self.paths.get(path)
            if record and (record.unknown or self.may_be_torn(record, since)):
                return None
            return self.problem(f"{path}: {why}")

    def unsettled(self):
        with self.lock:
            return [path for path, record in self.paths.items() if record.unknown]

    def settle(self, path, stamp, digest):
        """After a kill: the content found at a path whose call was cut off. None and None: nothing."""
        with self.lock:
            record = self.paths[path]
            version = self.versions.get((Stamp(*stamp), self.family_of(path))) if stamp else None
            record.there = digest is not None
            if digest is None or (version and digest in (version.exact["bytes"], version.final.get("bytes"))):
                record.unknown, record.stamp = False, Stamp(*stamp) if stamp else None
                record.family = self.family_of(path)

    @staticmethod
    def may_be_torn(record, since):
        """An actor was writing into it at some time since then."""
        return record.torn or record.torn_until > since

    def saw(self, path, since, view, stamp, digest, size=None):
        """Judge the bytes of a file that was opened after `since`. Answers (problem or None, original to compare with or None)."""
        with self.lock:
            record = self.paths.get(path)
            steady = self.at_rest(path, since) and not record.unknown
            version = None
            if stamp is not None:
                version = self.versions.get((Stamp(*stamp), self.family_of(path)))
            if version is None:
                return (self.problem(f"{path}: holds {stamp}, which nobody has written") if steady else None), None
            stamp = Stamp(*stamp)
            if steady and not record.there:
                return self.problem(f"{path}: was removed, and can be opened"), None
            if steady and record.stamp != stamp:
                return self.problem(f"{path}: holds {stamp}, the last that was written is {record.stamp}"), None
            whole = digest == version.exact[view] or digest == version.final.get(view)
            if not whole and not steady and (record is None or record.unknown or self.may_be_torn(record, since)):
                return None, None
            return self.judge(path, since, view, stamp, version, digest, size)

    @staticmethod
    def family_of(path):
        """Names of copies contain their owner: `step_12.copy-a.pt`."""
        return path.rsplit(".copy-", 1)[1].split(".")[0] if ".copy-" in path else ""

    def judge(self, path, since, view, stamp, version, digest, size):
        if size is not None and size != version.size:
            return self.problem(f"{path}: {size} bytes, {version.size} were written"), None
        final = version.final.get(view)
        if digest == final:
            return None, None
        if digest == version.exact[view]:
            if version.final_since and version.final_since < since and final != digest and not self.family_of(path):
                return self.problem(f"{path}: WAS FINAL, and is {stamp} as it was written again"), None
            return None, None
        family = self.family_of(path)
        if final is not None and not (family and self.is_copied_form(stamp, view, final)):
            return self.problem(f"{path}: WAS FINAL, AND CHANGED: {stamp}, {digest[:12]} instead of {final[:12]}"), None
        if not family:
            series = self.series[stamp.run]
            if series.exact:
                return self.problem(f"{path}: its name asks for an exact file, and it is not"), None
            if version.order >= series.newest_order[stamp.part]:
                return self.problem(f"{path}: is the newest of its series, and not exact"), None
            if version.pinned_since and version.pinned_since < since:
                return self.problem(f"{path}: is pinned, and not exact any more"), None
        version.final[view] = digest
        version.final_since = version.final_since or time.monotonic()
        self.count("all", "final forms")
        # If a copy lost again, no bound against the first is stated.
        return None, (version.original if view == "bytes" and not family else None)

    def is_copied_form(self, stamp, view, digest):
        """A copy of a released file has the final form of another family, and may lose once more of its own."""
        return any(v.final.get(view) == digest for (s, family), v in self.versions.items() if s == stamp and not family)

    # --- the end

    def files(self):
        """{path: known} of the files that should exist now."""
        with self.lock:
            return {path: not r.unknown for path, r in self.paths.items() if r.there or r.unknown}

    def policy_entries(self):
        """{name of a series with a policy: its complete checkpoints, oldest first}."""
        with self.lock:
            return {s.name: list(s.entries) for s in self.series.values() if s.policy}

    def gone_by_policy(self, entry):
        with self.lock:
            for series in self.series.values():
                for path in series.entries.pop(entry, ()) if series.policy else ():
                    self.drop_original(path)
                    self.paths[path].there, self.paths[path].since = False, time.monotonic()

    def empty(self):
        """Everything was removed."""
        with self.lock:
            for record in self.paths.values():
                record.there = record.unknown = False
