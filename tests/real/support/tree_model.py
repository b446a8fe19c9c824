"""The expected state of a mounted tree: a model in memory that is compared with it after every operation.

For each file it keeps the exact bytes that were written. Once the file is seen released, it keeps the SHA-256 of the bytes
that it read then: nothing may change them from then on. The effect of a release is checked once per file against the exact
bytes.
"""

import hashlib
import io
import os
import re
import stat

import safetensors.torch
import torch
from harness import run_json
from series import archive_name, bits_equal, difference, flatten, torch_bytes

# A smaller tensor is never quantized.
MIN_QUANTIZED_BYTES = 128
# For a file without a known bound (recalled before `ls` could be asked). The walk moves a weight by about 1e-3 a step, by a few
# steps at most between two states. A larger error is not rounding.
LOOSE_BOUND = 5e-2
EXACT_NAMES = re.compile(r"best|final", re.I)  # the profile rules of a new store


class Mismatch(AssertionError):
    """The tree differs from the model."""


def require(condition, words):
    if not condition:
        raise Mismatch(words() if callable(words) else words)


def sha(data):
    return hashlib.sha256(data).hexdigest()


class Inode:
    """A file: its names are the paths in `Tree.files` that refer to it."""

    def __init__(self, data, kind, mode=0o644, mtime=0):
        self.mode, self.mtime, self.xattrs = mode, mtime, {}
        self.pinned = False
        self.stays = False  # it was resident when it was pinned
        self.rewrite(data, kind, False)

    def rewrite(self, data, kind, exact, carried=None):
        self.data = data  # the bytes that were written last
        self.kind = kind  # ".pt", ".safetensors", or None: not a checkpoint, never to be quantized
        self.final = None  # SHA-256 since it was seen released
        self.superseded = False  # a newer state of its lineage has existed
        self.exact = exact  # its name has asked for an exact file ever since it was written
        self.carried = carried  # SHA-256 of the released file that it is a copy of


class Tree:
    """Directories and files below the mount, by relative path; the root is ""."""

    def __init__(self, root):
        self.root = str(root)
        self.files, self.dirs, self.dir_times = {}, {""}, {}
        self.counts = {"released": 0, "quantized": 0, "second losses": 0}

    def full(self, path):
        return f"{self.root}/{path}" if path else self.root

    def names_of(self, inode):
        return [path for path, other in self.files.items() if other is inode]

    def children(self, directory):
        below = directory + "/" if directory else ""
        return {path[len(below) :].split("/")[0] for path in [*self.files, *self.dirs] if path != directory and path.startswith(below)}

    def below(self, directory):
        return [path for path in self.files if path.startswith(directory + "/")]

    def move(self, source, target):
        """A rename, as POSIX defines it."""
        if source in self.files:
            if self.files.get(target) is self.files[source]:
                return  # two names of one file: nothing happens
            inode = self.files[target] = self.files.pop(source)
            # It is surely unreleased only if nothing newer has ever been there.
            inode.exact = wants_exact(target) and (inode.exact or not inode.superseded)
            return
        for table in (self.files, self.dir_times):
            for path in [p for p in table if p == source or p.startswith(source + "/")]:
                table[target + path[len(source) :]] = table.pop(path)
        self.dirs = {target + d[len(source) :] if d == source or d.startswith(source + "/") else d for d in self.dirs}
        for path in self.below(target):
            inode = self.files[path]
            inode.exact = wants_exact(path) and (inode.exact or not inode.superseded)

    def remove_tree(self, directory):
        for path in self.below(directory):
            del self.files[path]
        self.dirs = {d for d in self.dirs if d != directory and not d.startswith(directory + "/")}
        self.dir_times = {d: t for d, t in self.dir_times.items() if d in self.dirs}

    def note_superseded(self):
        """Call after every operation: computes which files may have been released from now on."""
        lineages = {}
        for path, inode in self.files.items():
            lineages.setdefault(lineage(path), []).append(inode)
        for members in lineages.values():
            for inode in members:
                if not inode.superseded:
                    inode.superseded = any(o.mtime >= inode.mtime and o.data != inode.data for o in members if o is not inode)

    # --- comparing

    def note_dir_times(self, dirs):
        for path in dirs:
            if path in self.dirs:
                self.dir_times[path] = os.stat(self.full(path)).st_mtime_ns

    def check_path(self, path):
        """Metadata of one path, or its absence; and the content of its directory."""
        parent = os.path.dirname(path)
        if parent in self.dirs:
            there = set(os.listdir(self.full(parent)))
            require(there == self.children(parent), lambda: f"{parent or '.'}: lists {there ^ self.children(parent)} too many or too few")
        if path in self.files:
            self.check_metadata(path)
        else:
            require(os.path.lexists(self.full(path)) == (path in self.dirs), f"{path}: {'is not' if path in self.dirs else 'is still'} there")

    def check_metadata(self, path):
        inode, found = self.files[path], os.lstat(self.full(path))
        names = sum(other is inode for other in self.files.values())
        expected = (stat.S_IFREG | inode.mode, len(inode.data), inode.mtime, names)
        actual = (found.st_mode, found.st_size, found.st_mtime_ns, found.st_nlink)
        require(actual == expected, f"{path}: (mode, size, mtime, nlink) is {actual}, expected {expected}; {self.describe(path)}")
        names = os.listxattr(self.full(path))
        xattrs = {name: os.getxattr(self.full(path), name) for name in names}
        require(xattrs == inode.xattrs, lambda: f"{path}: extended attributes {xattrs}, expected {inode.xattrs}")

    def check_content(self, path):
        released = self.attribute(path, "state") == "released"
        with open(self.full(path), "rb", buffering=0) as f:
            data = f.readall()
        self.settle(path, data, released)

    def check_all(self):
        """The whole tree: names, metadata, and every byte."""
        files, dirs = set(), {""}
        for folder, names, leaves in os.walk(self.root, onerror=raise_it):
            at = os.path.relpath(folder, self.root)
            join = lambda name: name if at == "." else f"{at}/{name}"
            dirs.update(map(join, names))
            files.update(map(join, leaves))
        require(files == set(self.files), lambda: f"files too many {files - set(self.files)}, too few {set(self.files) - files}")
        require(dirs == self.dirs, lambda: f"directories too many {dirs - self.dirs}, too few {self.dirs - dirs}")
        for path in sorted(self.files):
            self.check_metadata(path)
            self.check_content(path)
        for path in sorted(self.dirs & self.dir_times.keys()):
            now = os.stat(self.full(path)).st_mtime_ns
            require(now == self.dir_times[path], f"{path or '.'}: the directory's mtime is {now}, was {self.dir_times[path]}")

    def attribute(self, path, name):
        try:
            return os.getxattr(self.full(path), f"user.stepfs.{name}").decode()
        except OSError:
            return None

    def describe(self, path):
        inode = self.files[path]
        return (f"state {self.attribute(path, 'state')}, object {self.attribute(path, 'object')}, kind {inode.kind}, "
                f"{'final' if inode.final else 'not final'}, {'superseded' if inode.superseded else 'the newest'}")

    def settle(self, path, data, released=False):
        """Judge the bytes of a file. `released`: it was released before the read, so `ls` tells its bound. A file that is open
        for writing, or was recalled, has no bound.
        """
        inode = self.files[path]
        if inode.final:
            require(sha(data) == inode.final, lambda: f"{path}: WAS FINAL, AND CHANGED: {first_difference(data, inode.data)}; {self.describe(path)}")
            return
        if data == inode.data:
            if not released:
                return
        else:
            self.judge_loss(path, inode, data, released)
            self.counts["quantized"] += 1
        require(inode.superseded, lambda: f"{path}: released although it is the newest; {self.describe(path)}")
        require(not (released and inode.stays), lambda: f"{path}: released although it is pinned; {self.describe(path)}")
        self.counts["released"] += 1
        inode.final, inode.data = sha(data), data

    def judge_loss(self, path, inode, data, released):
        words = lambda why: f"{path}: {why}; {first_difference(data, inode.data)}; {self.describe(path)}"
        require(inode.superseded, lambda: words("the newest is not exact"))
        require(not inode.exact, lambda: words("its name asks for an exact file"))
        if inode.carried:
            # A copy loses nothing while its source, or another copy, is there to share an object with.
            alive = [p for p, other in self.files.items() if other.final == inode.carried]
            require(not alive, lambda: words(f"a copy of the released {alive[:1]} lost a second time"))
            self.counts["second losses"] += 1
        limit = LOOSE_BOUND
        if released:
            rows = run_json("ls", "--json", self.full(path))
            require(len(rows) == 1, lambda: words(f"`ls` shows {len(rows)} files"))
            limit = rows[0]["max_abs_error"]
            require(limit <= LOOSE_BOUND, lambda: words(f"`ls` states an error of {limit}"))
        if problem := not_quantized(inode.kind, inode.data, data, limit):
            raise Mismatch(words(problem))


def raise_it(error):
    raise error


def wants_exact(path):
    return bool(EXACT_NAMES.search(path))


def lineage(path):
    """Files with different keys are in different lineages; the reverse need not hold."""
    return re.sub(r"\d+", "#", path.lower())


def first_difference(data, expected):
    at = next((i for i, (a, b) in enumerate(zip(data, expected)) if a != b), min(len(data), len(expected)))
    return f"{len(data)} bytes, expected {len(expected)}, first difference at {at}"


def load(kind, data):
    """The content of a checkpoint as nested dicts."""
    return {"model": safetensors.torch.load(data)} if kind == ".safetensors" else torch.load(io.BytesIO(data))


def not_quantized(kind, exact, data, limit):
    """Why `data` cannot be the released form of `exact` with this bound; None if it can."""
    if kind is None:
        return "not a checkpoint, and not bit-exact"
    if len(data) != len(exact):
        return "the size changed"
    try:
        a, b = flatten(load(kind, exact)), flatten(load(kind, data))
    except Exception as error:  # in any case the file is not a checkpoint any more
        return f"does not load: {error}"
    if a.keys() != b.keys():
        return f"keys differ: {a.keys() ^ b.keys()}"
    for name, leaf in a.items():
        if not isinstance(leaf, torch.Tensor):
            if leaf != b[name]:
                return f"{name} is {b[name]!r}, was {leaf!r}"
        elif not bits_equal(leaf, b[name]):
            lossy = name.startswith("model.") or name.endswith((".exp_avg", ".exp_avg_sq", ".momentum_buffer"))
            lossy = lossy and leaf.is_floating_point() and leaf.dim() >= 1
            if not lossy or leaf.numel() * leaf.element_size() < MIN_QUANTIZED_BYTES:
                return f"{name} must be bit-exact"
            if name.endswith(".exp_avg_sq") and not torch.equal(b[name] > 0, leaf > 0):
                return f"{name} is 0 or negative where it was not"
            if not (worst := difference(leaf, b[name])) <= limit:
                return f"{name} is off by {worst}, stated {limit}"
    return not_as_written(kind, exact, data)


def not_as_written(kind, exact, data):
    """Bytes outside the tensors: those of a .pt equal torch.save's output for the present tensors."""
    if kind == ".pt":
        return None if torch_bytes(torch.load(io.BytesIO(data)), archive_name(exact)) == data else "not the bytes of torch.save for these tensors"
    header = 8 + int.from_bytes(exact[:8], "little")
    return None if exact[:header] == data[:header] else "the header differs"
