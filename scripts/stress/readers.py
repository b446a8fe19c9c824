"""Programs that read checkpoints in all usual ways, and report to the ledger."""

import errno
import json
import mmap
import os
import time

import torch
from harness import OK, run
from safetensors import safe_open
from tree_model import not_quantized

from .actors import Actor
from .content import digest, find_stamp, stamp_of, tensor_digest, tensors_of

# The size of one `read`, as in cp and cat.
PIECE = 1 << 17
WAYS = ("read", "mmap", "pread", "torch_load", "torch_mmap", "safe_open")


class Reader(Actor):
    """Common to all readers: find a file, read it in some way, judge it."""

    def begin(self):
        torch.set_num_threads(1)

    def listed(self):
        """Regular files, by a walk of the mount. A directory that cannot be listed does not count as empty."""

        def failed(error):
            if not isinstance(error, FileNotFoundError):
                raise error

        found = os.walk(self.root, onerror=failed)
        return [os.path.relpath(f"{folder}/{name}", self.root) for folder, _, names in found for name in names]

    def choose(self):
        """A file; the newest ones more often than by chance, because stepfs promises more of them."""
        found = self.ledger.newest() if self.rng.random() < 0.3 else self.listed()
        return self.rng.choice(found) if found else None

    def look(self, path, way):
        since = time.monotonic()
        try:
            seen = getattr(self, way)(path)
        except FileNotFoundError:
            self.gone(path, since)
        except OSError as error:
            # torch seeks to before the beginning of a file that shrank while it was opened.
            if error.errno != errno.EINVAL:
                raise
            self.ledger.unreadable(path, since, f"{way}: {error}")
        except (RuntimeError, ValueError, EOFError, KeyError, SyntaxError, UnicodeDecodeError) as error:
            # torch's words for the end of a daemon.
            if any(os.strerror(number) in str(error) for number in (errno.ENOTCONN, errno.ECONNABORTED)):
                raise
            # safetensors opens a file twice; these are torch's words for a failure of the second open.
            if os.strerror(errno.ENOENT) in str(error):
                return self.gone(path, since)
            self.ledger.unreadable(path, since, f"{way}: {type(error).__name__}: {error}")
        except Exception as error:
            if type(error).__name__ not in ("SafetensorError", "UnpicklingError"):
                raise
            self.ledger.unreadable(path, since, f"{way}: {type(error).__name__}: {error}")
        else:
            self.judge(path, since, *seen)

    def gone(self, path, since):
        """A program got the answer that the file does not exist."""
        # safetensors says so after any failure to open a file; an end of the daemon is no loss.
        try:
            os.lstat(self.full(path))
        except FileNotFoundError:
            self.ledger.missing(path, since)

    def judge(self, path, since, view, stamp, seen, data):
        size = None if data is None else len(data)
        problem, original = self.ledger.saw(path, since, view, stamp, seen, size)
        self.count("reads")
        self.count("read MB", (size or 0) / 1e6)
        if problem:
            self.count("errors")
        if original:
            self.compare(path, since, original, data)

    def compare(self, path, since, original, data):
        """Once for each final form: is it within the bound that `stepfs ls` states?"""
        listed = run("ls", "--json", self.full(path), check=False)
        rows = json.loads(listed.stdout) if listed.returncode == OK else []  # it may be gone by now
        try:
            with open(original, "rb") as f:
                exact = f.read()
        except FileNotFoundError:
            return
        if len(rows) != 1 or rows[0]["state"] != "released" or not self.ledger.is_at_rest(path, since):
            return
        self.count("compared")
        if problem := not_quantized(os.path.splitext(path)[1], exact, data, rows[0]["max_abs_error"]):
            self.problem(f"{path}: {problem}; stated {rows[0]['max_abs_error']}")

    # --- ways to read; each answers (view, stamp, digest, bytes if it has them)

    def read(self, path):
        data = bytearray()
        with open(self.full(path), "rb", buffering=0) as f:
            while piece := f.read(PIECE):
                data += piece
        return self.of_bytes(bytes(data))

    def of_bytes(self, data):
        found = find_stamp(data)
        return "bytes", found and found[0], digest(data), data

    def pread(self, path):
        """Pieces in any order, some of them twice."""
        with open(self.full(path), "rb", buffering=0) as f:
            size = os.fstat(f.fileno()).st_size
            data, places = bytearray(size), list(range(0, size, PIECE))
            self.rng.shuffle(places)
            for at in places + places[:3]:
                piece = os.pread(f.fileno(), PIECE, at)
                data[at : at + len(piece)] = piece
        return self.of_bytes(bytes(data))

    def mmap(self, path):
        if not self.ledger.may_map(path):
            return self.read(path)
        with open(self.full(path), "rb") as f:
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return self.of_bytes(mapped[:])

    def torch_load(self, path, mapped=False):
        if not path.endswith(".pt"):
            return self.read(path)
        tensors = tensors_of(torch.load(self.full(path), map_location="cpu", mmap=mapped))
        return "tensors", stamp_of(tensors), tensor_digest(tensors), None

    def torch_mmap(self, path):
        return self.torch_load(path, self.ledger.may_map(path))

    def safe_open(self, path):
        if not path.endswith(".safetensors") or not self.ledger.may_map(path):
            return self.read(path)
        with safe_open(self.full(path), framework="pt") as f:
            tensors = {name: f.get_tensor(name).clone() for name in f.keys()}
        return "tensors", stamp_of(tensors), tensor_digest(tensors), None


class Read(Reader):
    """Reads one file after the other; `how` names the ways."""

    def step(self):
        if path := self.choose():
            self.look(path, self.rng.choice(self.options.get("how", WAYS)))


class Hold(Reader):
    """An evaluator: keeps some files open, and one of them mapped, for `seconds`. It must read the same bytes all that time,
    whatever becomes of the name.
    """

    def step(self):
        files, chosen = [], [path for path in (self.choose() for _ in range(self.options.get("files", 3))) if path]
        try:
            for path in chosen:
                since = time.monotonic()
                try:
                    file = open(self.full(path), "rb", buffering=0)
                except FileNotFoundError:
                    self.ledger.missing(path, since)
                    continue
                files.append((path, since, file))
            first = [self.hash_of(path, since, file) for path, since, file in files]
            self.wait(self.options.get("seconds", 5))
            for (path, since, file), before in zip(files, first):
                if before and self.hash_of(path, since, file, False) != before and not self.ledger.written_into(path, since):
                    self.problem(f"{path}: changed under an open handle")
            self.count("held", len(files))
        finally:
            for *_, file in files:
                file.close()

    def hash_of(self, path, since, file, judge=True):
        """Skips a file that is just being written: it may change."""
        writable = not self.ledger.may_map(path) or not self.ledger.is_at_rest(path, since)
        if judge and writable:
            return None
        size = os.fstat(file.fileno()).st_size
        if self.rng.random() < 0.5 and size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                data = mapped[:]
        else:
            data = bytearray()
            # A daemon that dies during a read leaves a short one; the next one fails.
            while len(data) < size and (piece := os.pread(file.fileno(), PIECE, len(data))):
                data += piece
            data = bytes(data)
        if judge:
            self.judge(path, since, *self.of_bytes(data))
        return digest(data)
