"""Other users: rm, mv, cp, writing into a file, and the stepfs commands."""

import os
import shutil
import subprocess

import harness
import safetensors.torch

from .actors import Actor
from .content import Stamp, digest, find_stamp, tensor_digest
from .readers import Reader
from .savers import remove


class Remove(Actor):
    """rm -r of checkpoints of `runs`, never of the newest `spare` of a series."""

    def step(self):
        if found := self.ledger.claim(self.options.get("runs", ["*"]), self.options.get("spare", 2)):
            remove(self, *found)


class Move(Actor):
    """mv of a checkpoint into another directory, under the same name; the oldest moved ones are removed."""

    def begin(self):
        self.moved = []

    def step(self):
        if not (found := self.ledger.claim(self.options.get("runs", ["*"]), self.options.get("spare", 2))):
            return
        run, entry, files = found
        target = f"moved-{os.path.dirname(entry)}/{os.path.basename(entry)}"
        names = [target + path[len(entry) :] for path in files]
        self.ledger.begin(*files, *names)
        self.ledger.forget(run, entry)
        try:
            os.makedirs(self.full(os.path.dirname(target)), exist_ok=True)
            os.rename(self.full(entry), self.full(target))
        except BaseException:
            self.ledger.cut_off(*files, *names)
            raise
        finally:
            self.ledger.unclaim(entry)
        for path, name in zip(files, names):
            self.ledger.moved(path, name)
        self.count("moved")
        self.moved.append((run, target, names))
        if len(self.moved) > self.options.get("keep", 8):
            remove(self, *self.moved.pop(0))


class Copy(Reader):
    """cp of a file of `runs` into a directory of its own, in several ways; the oldest copies are removed."""

    def begin(self):
        super().begin()
        self.copies = []
        self.family = f"{'abcdefghij'[self.number]}"

    def step(self):
        found = [path for path in self.listed() if ".copy-" not in path and path.endswith((".pt", ".safetensors"))]
        path = self.rng.choice(found) if found else None
        stamp = path and self.ledger.may_copy(path, self.family)
        if not stamp:
            return
        kind = os.path.splitext(path)[1]
        target = f"copies-{self.name}/{stamp[0]}-{stamp[1]}/step_{stamp[2]}.copy-{self.family}{kind}"
        self.ledger.begin(target, torn=True)
        self.ledger.copying(Stamp(*stamp), self.family)
        how = self.rng.choice([["cp"], ["cp", "--reflink=auto"], ["cp", "--sparse=always"], ["copyfile"]])
        try:
            os.makedirs(os.path.dirname(self.full(target)), exist_ok=True)
            if how == ["copyfile"]:
                shutil.copyfile(self.full(path), self.full(target))
            else:
                done = subprocess.run([*how, self.full(path), self.full(target)], capture_output=True, text=True, timeout=120)
                if done.returncode:
                    raise FileNotFoundError(done.stderr) if "No such file" in done.stderr else OSError(done.stderr)
            with open(self.full(target), "rb") as f:
                found = find_stamp(f.read())
        except FileNotFoundError:
            self.ledger.end(target)  # the source went before it was opened
            return
        except BaseException:
            self.ledger.cut_off(target)
            raise
        if not found or found[0] != Stamp(*stamp):
            # Overwritten or replaced meanwhile: another state than the requested one, or a part of it.
            self.ledger.cut_off(target)
            self.drop(target)
            return
        self.ledger.written(target, Stamp(*stamp), self.family)
        self.count("copied")
        self.copies.append(target)
        if len(self.copies) > self.options.get("keep", 8):
            self.drop(self.copies.pop(0))

    def drop(self, path):
        self.ledger.begin(path)
        try:
            os.unlink(self.full(path))
        except FileNotFoundError:
            self.ledger.cut_off(path)
        except BaseException:
            self.ledger.cut_off(path)
            raise
        else:
            self.ledger.unlinked(path)


class Rewrite(Reader):
    """Opens an old .safetensors for writing, which recalls a released file, and changes its stamp: a new state of its run."""

    def step(self):
        if not (found := self.ledger.claim(self.options.get("runs", ["*"]), self.options.get("spare", 2), ".safetensors")):
            return
        run, entry, files = found
        path = next(path for path in files if path.endswith(".safetensors"))
        self.ledger.begin(path, torn=True)
        stamp = None
        try:
            with open(self.full(path), "r+b", buffering=0) as f:
                data = bytearray(f.readall())
                self.judge(path, 0.0, *self.of_bytes(bytes(data)))
                old, at = find_stamp(data)
                stamp = Stamp(old.run, old.part, self.ledger.number(run))
                words = b"".join(number.to_bytes(8, "little") for number in stamp)
                data[at : at + len(words)] = words
                tensors = tensor_digest(safetensors.torch.load(bytes(data)))
                self.ledger.closing(stamp, "", {"bytes": digest(bytes(data)), "tensors": tensors}, len(data), None)
                os.pwrite(f.fileno(), words, at)
        except BaseException:
            self.ledger.cut_off(path, of=stamp)
            raise
        finally:
            self.ledger.unclaim(entry)
        self.ledger.written(path, stamp)
        self.count("rewritten")


class Command(Reader):
    """stepfs commands; `which` names them. Each must end with an exit code that it may have."""

    def begin(self):
        super().begin()
        self.pins = []

    def step(self):
        getattr(self, self.rng.choice(self.options.get("which", ["ls", "status", "release", "recall", "pin", "sync", "gc", "verify"])))()

    def run(self, *args, allowed=(harness.OK,), gone=None, timeout=300):
        """`gone`: a path that may have been removed meanwhile, so failure is allowed."""
        outage = self.control.outage.value
        done = harness.run(*args, check=False, timeout=timeout)
        self.count(args[0])
        if self.control.was_away(outage):
            self.count("cut off")
        elif done.returncode not in allowed and not (gone and not os.path.lexists(gone)):
            self.problem(f"stepfs {' '.join(map(str, args))}: exit code {done.returncode}: {done.stdout[-600:]}{done.stderr[-600:]}")
        return done.returncode

    def ls(self):
        self.run("ls", "--json", self.root)

    def status(self):
        self.run("status", "--json", self.root)

    def verify(self):
        self.run("verify", self.scenario.store)

    def gc(self):
        self.run("gc", self.root)

    def sync(self):
        """It waits for files that were saved before it, whatever is saved meanwhile."""
        self.run("sync", self.root)

    def a_path(self):
        found = self.listed()
        return self.full(self.rng.choice(found)) if found else None

    def release(self):
        """Exit code 1: it must stay."""
        if path := self.a_path():
            self.run("release", path, allowed=(harness.OK, harness.FAILURE), gone=path)

    def recall(self):
        if path := self.a_path():
            self.ledger.recalling(os.path.relpath(path, self.root))
            self.run("recall", path, gone=path)

    def pin(self):
        """One more, or one less."""
        if self.pins and (len(self.pins) > 5 or self.rng.random() < 0.4):
            path = self.pins.pop(self.rng.randrange(len(self.pins)))
            self.ledger.unpinning(os.path.relpath(path, self.root))
            self.run("unpin", path, gone=path)
        elif path := self.a_path():
            if self.run("pin", path, gone=path) == harness.OK:
                self.pins.append(path)
                self.note_pinned(path)

    def note_pinned(self, path):
        try:
            state = os.getxattr(path, "user.stepfs.state").decode()
        except OSError:
            return
        if state != "released":
            self.ledger.pinned(os.path.relpath(path, self.root))
