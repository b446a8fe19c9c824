"""Programs that train and save. They write each file into a plain directory first: a reader of the mount must find these bytes."""

import json
import os
import random
import shutil
import threading
import time
from contextlib import contextmanager

import torch

from .actors import Actor
from .content import Stamp, digest, save, stamp_tensor, stamp_words, tensor_digest, tensors_of
from .training import Training


class Save(Actor):
    """A training run: `form` is the layout of a checkpoint, `how` the calls that write it.

    - `form`: pt or safetensors, one file each; directory, with model, optimizer and a small state.json, as transformers'
      Trainer; ranks, a directory into which several threads write at once
    - `how`: path or object, to its name; rename, beside it, fsync, renamed; in_place, always one name; fsync, as object,
      fsynced
    """

    def begin(self):
        torch.set_num_threads(1)
        o = self.options
        self.form, self.how = o.get("form", "pt"), o.get("how", "path")
        self.run, self.folder = self.slot, f"{o.get('folder', self.name)}-{'abcdefghij'[self.number]}"
        self.training = Training(o.get("model", "gpt"), o.get("size", "small"), o.get("dtype", "fp32"), self.scenario.seed * 100 + self.slot)
        self.keep, self.save_number = o.get("keep", 0), 0
        self.originals = f"{self.scenario.scratch}/originals"
        self.ledger.begin_series(self.run, self.folder, o.get("exact", False), o.get("policy", False), self.how == "in_place")

    def step(self):
        self.training.go_on(self.options.get("iterations", 2))
        began = time.monotonic()
        self.save_number = self.ledger.number(self.run)
        self.save()
        self.count("saves")
        self.count("save ms", int(1000 * (time.monotonic() - began)))
        if self.keep:
            self.rotate()

    # --- one checkpoint

    def save(self):
        n, folder = self.save_number, self.folder
        whole = lambda part: {**self.training.whole(), "stamp": stamp_tensor(Stamp(self.run, part, n))}
        weights = lambda part: {**self.training.model(), "stamp": stamp_tensor(Stamp(self.run, part, n))}
        if self.form in ("pt", "safetensors"):
            name = f"last.{self.form}" if self.how == "in_place" else f"step_{n:06d}.{self.form}"
            entry, files = f"{folder}/{name}", {f"{folder}/{name}": whole(0) if self.form == "pt" else weights(0)}
        elif self.form == "directory":
            entry = f"{folder}/checkpoint-{n}"
            optimizer = {**self.training.optimizer(), "stamp": stamp_tensor(Stamp(self.run, 1, n))}
            state = json.dumps({"step": self.training.iterations, "stamp": stamp_words(Stamp(self.run, 2, n)) + " "}, indent=1)
            files = {f"{entry}/model.safetensors": weights(0), f"{entry}/optimizer.pt": optimizer, f"{entry}/state.json": state}
        else:
            entry = f"{folder}/step_{n}"
            files = {f"{entry}/rank_{rank}/model_and_optimizer.pt": whole(rank) for rank in range(self.options.get("ranks", 3))}
        for path in files:
            os.makedirs(os.path.dirname(self.full(path)), exist_ok=True)
        parts = list(enumerate(files.items()))
        if self.form == "ranks":
            self.all_at_once(parts)
        else:
            for part, (path, state) in parts:
                self.write(path, state, Stamp(self.run, part, n))
        self.ledger.saved(self.run, entry, list(files))

    def all_at_once(self, parts):
        failures = []

        def rank(part, path, state):
            try:
                self.write(path, state, Stamp(self.run, part, self.save_number))
            except Exception as error:  # noqa: BLE001 - told to the thread that waits
                failures.append(error)

        threads = [threading.Thread(target=rank, args=(part, path, state)) for part, (path, state) in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def write(self, path, state, stamp):
        how = self.how
        temporary = path + ".part" if how == "rename" else path
        plain = Original(self, path, state, stamp)
        with self.changing(path, temporary, stamp):
            if how in ("path", "in_place"):
                plain.tell(path)
                save(state, self.full(path), "path")
            else:
                self.write_as_object(path, temporary, state, plain)
            self.count("written MB", plain.size / 1e6)
        if not plain.kept:
            os.unlink(plain.place)

    def write_as_object(self, path, temporary, state, plain):
        if isinstance(state, str) or path.endswith(".safetensors"):
            plain.tell(path)
            save(state, self.full(temporary), "object")
        else:
            with open(self.full(temporary), "wb") as f:
                torch.save(state, f)
                if self.how != "object":
                    f.flush()
                    os.fsync(f.fileno())
                plain.tell(path)
        if temporary != path:
            os.replace(self.full(temporary), self.full(path))

    @contextmanager
    def changing(self, path, temporary, stamp):
        self.ledger.begin(path, torn=temporary == path)
        if temporary != path:
            self.ledger.begin(temporary, torn=True)
        try:
            yield
        except BaseException:
            self.ledger.cut_off(*{path, temporary}, of=stamp)
            raise
        self.ledger.written(path, stamp)
        if temporary != path:
            self.ledger.end(temporary)

    def rotate(self):
        """Keeps the newest few, as `save_total_limit` does."""
        while found := self.ledger.claim([self.folder], self.keep):
            remove(self, *found)


class Original:
    """The same checkpoint in a plain directory: the bytes that the mount must show, and for some checkpoints an original for
    later.
    """

    def __init__(self, saver, path, state, stamp):
        self.ledger, self.stamp = saver.ledger, stamp
        folder = f"{saver.originals}/{stamp.run}-{stamp.part}-{stamp.number}"
        os.makedirs(folder, exist_ok=True)
        self.place = f"{folder}/{os.path.basename(path)}"
        how = "path" if saver.how in ("path", "in_place") else "object"
        save(state, self.place, how)
        with open(self.place, "rb") as f:
            data = f.read()
        self.size, self.kept = len(data), random.Random(str(stamp)).random() < saver.scenario.originals
        self.exact = {"bytes": digest(data)}
        if not isinstance(state, str):
            self.exact["tensors"] = tensor_digest(tensors_of(state))

    def tell(self, path):
        """Just before the file in the mount is closed."""
        self.ledger.closing(self.stamp, "", self.exact, self.size, self.place if self.kept else None)


def remove(actor, run, entry, files):
    """rm -r of a claimed checkpoint."""
    actor.ledger.begin(*files)
    try:
        whole = actor.full(entry)
        if os.path.isdir(whole):
            shutil.rmtree(whole)
        else:
            os.unlink(whole)
    except BaseException as error:
        actor.ledger.cut_off(*files)
        actor.ledger.forget(run, entry)
        if not isinstance(error, FileNotFoundError) or not actor.ledger.has_policy(run):
            raise
    else:
        actor.ledger.removed(run, entry, files)
        actor.count("removed")
    finally:
        actor.ledger.unclaim(entry)
