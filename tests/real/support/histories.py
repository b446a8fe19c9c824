"""Random histories of a checkpoint directory: operations of people and programs on files, in an order that a seed decides.

Nothing depends on the clock, or on the files that stepfs has released by then, so a history is the same each time.
Modification times are set before a file is closed, because they decide which state is the newest.
"""

import os
import random
import shutil
import subprocess

import harness
import policies
import safetensors.torch
from series import torch_bytes, walk
from tree_model import Inode, Tree, require, wants_exact

# A quarter of a megabyte as .pt with two moments, above the 64 KiB below which nothing is released.
SHAPES = {"wte.weight": (96, 64), "block.attn.weight": (128, 64), "block.attn.bias": (128,), "block.up.weight": (64, 96), "ln.weight": (64,)}
# Modification times begin here, in 2036. That is after the clock's times that `cp` gives, so that a copy never counts as the
# newest state before its time is set. It is before 2038, for file systems that end there.
FIRST_SECOND = 2_100_000_000
# With more files than this, removing is tried first: a history should go deep, not wide.
MANY_FILES = 45
CHECK_EVERY = 50
WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay"]  # names without numbers: no lineage but their own


class Source:
    """A training run in memory."""

    def __init__(self, seed):
        self.states, self.step = walk(1 << 30, seed=seed, shapes=SHAPES), 0

    def next(self):
        self.step += 1
        return next(self.states)


def supports(*words):
    """Whether the program has this command."""
    return harness.run(*words, "--help", check=False).returncode == harness.OK


class History:
    """One history on one mount."""

    def __init__(self, mount, seed, say=lambda line: None):
        self.mount, self.seed, self.say = mount, seed, say
        self.rng = random.Random(seed)
        self.tree = Tree(mount.dir)
        self.sources = {name: Source(seed * 10 + n) for n, name in enumerate(("alpha", "beta", "gamma", "best"))}
        self.clock, self.number, self.done, self.touched = 0, 0, [], []
        os.umask(0o022)
        self.operations = {
            self.save_file: 14, self.save_directory: 9, self.save_last: 5, self.save_best: 4, self.delete: 9, self.delete_tree: 2,
            self.rename: 8, self.rename_directory: 3, self.copy: 9, self.link: 4, self.overwrite: 4, self.truncate: 3, self.append: 3,
            self.chmod: 3, self.utime: 3, self.setxattr: 3, self.sync: 6, self.remount: 1.2, self.kill: 1.5,
        }
        if supports("gc"):
            self.operations |= {self.gc: 3, self.gc_at_rest: 0.7}
        if supports("pin"):
            self.operations |= {self.pin: 2, self.unpin: 1.5}
        if supports("recall"):
            self.operations |= {self.recall: 2, self.release: 1.5}
        if policies.supported(self.mount.base):
            self.operations[self.policy] = 1

    # --- running

    def run(self, count):
        try:
            self.mount.mount()
            for self.number in range(1, count + 1):
                self.step()
                if self.number % CHECK_EVERY == 0:
                    self.tree.check_all()
            self.number = count
            self.finish()
        except Exception as error:
            last = "\n".join(self.done[-30:])
            path = str(error).split(":")[0]
            before = "\n".join(line for line in self.done[:-30] if path in line.replace(",", " ").split())
            last = f"{before}\n...\n{last}" if before else last
            raise AssertionError(f"seed {self.seed}, operation {self.number}: {type(error).__name__}: {error}\n"
                                 f"the last operations:\n{last}\nthe daemon's log:\n{self.mount.log_tail(25)}") from error
        return self.tree.counts

    def step(self):
        names, weights = zip(*self.operations.items())
        operation = self.rng.choices(names, weights)[0]
        if len(self.tree.files) > MANY_FILES and self.rng.random() < 0.6:
            operation = self.rng.choice([self.delete, self.delete, self.delete_tree])
        self.touched = []
        self.done.append(f"{self.number:5d} {operation.__name__}")
        operation()
        self.say(self.done[-1])
        self.tree.note_superseded()
        self.tree.note_dir_times({os.path.dirname(path) for path in self.touched} | set(self.touched))
        for path in self.touched:
            self.tree.check_path(path)
        for path in self.touched + ([self.any_file()] if self.tree.files else []):
            if path in self.tree.files:
                self.tree.check_content(path)

    def finish(self):
        self.mount.sync()
        self.tree.check_all()
        self.mount.umount()
        harness.require_clean(self.mount.store)
        self.mount.mount()
        self.tree.check_all()
        self.mount.umount()

    def note(self, words, *paths):
        self.done[-1] += f" {words}"
        self.touched += paths

    # --- choosing; only by the model's knowledge

    def tick(self):
        self.clock += 1
        return (FIRST_SECOND + self.clock) * 1_000_000_000 + 123_456_789

    def any_file(self):
        return self.rng.choice(sorted(self.tree.files))

    def any_directory(self):
        return self.rng.choice(sorted(self.tree.dirs - {""}) or [None])

    def new_name(self, directory, suffix):
        """A name that nobody has, with a training step in it or without."""
        while True:
            word = self.rng.choice(["step_", "iter-", "checkpoint-"])
            stem = f"{word}{self.rng.randrange(1, 400)}" if self.rng.random() < 0.5 else "_".join(self.rng.sample(WORDS, 2))
            path = f"{directory}/{stem}{suffix}" if directory else stem + suffix
            if path not in self.tree.files and path not in self.tree.dirs:
                return path

    def target_for(self, source):
        """The target of a file: a new name in some directory, now and then the name of another file."""
        if self.rng.random() < 0.2 and len(self.tree.files) > 1:
            return self.rng.choice(sorted(path for path in self.tree.files if path != source))
        directory = self.rng.choice([os.path.dirname(source), os.path.dirname(source), self.any_directory() or "", "keep", "best"])
        self.make_directory(directory)
        return self.new_name(directory, os.path.splitext(source)[1])

    def make_directory(self, path):
        if path and path not in self.tree.dirs:
            self.make_directory(os.path.dirname(path))
            os.mkdir(self.tree.full(path))
            self.tree.dirs.add(path)
            self.touched.append(path)

    # --- saving

    def write(self, path, data, kind, replace=False):
        """Write a file as programs do, in place or beside it. The model takes the bytes when close returns."""
        self.make_directory(os.path.dirname(path))
        mtime = self.tick()
        target = path + ".tmp" if replace else path
        with open(self.tree.full(target), "wb", buffering=0) as f:
            for at in range(0, len(data), 1 << 16):
                f.write(data[at : at + (1 << 16)])
            os.fsync(f.fileno())
            os.utime(f.fileno(), ns=(mtime, mtime))
        if replace:
            os.replace(self.tree.full(target), self.tree.full(path))
            self.touched.append(target)
        if replace or path not in self.tree.files:
            self.tree.files[path] = Inode(data, kind)
        self.rewritten(self.tree.files[path], data, kind, mtime)
        self.note(f"{path} {len(data)} bytes{', renamed over' if replace else ''}", path)

    def rewritten(self, inode, data, kind, mtime, carried=None):
        inode.rewrite(data, kind, all(map(wants_exact, self.tree.names_of(inode))), carried)
        inode.mtime = mtime

    def save_file(self):
        source = self.sources["alpha"]
        state = source.next()
        self.write(f"alpha/step_{source.step}.pt", torch_bytes(state), ".pt", self.rng.random() < 0.3)

    def save_directory(self):
        source = self.sources["beta"]
        state = source.next()
        folder = f"beta/checkpoint-{source.step}"
        self.write(f"{folder}/model.safetensors", safetensors.torch.save(state.pop("model")), ".safetensors")
        self.write(f"{folder}/optimizer.pt", torch_bytes(state), ".pt")

    def save_last(self):
        self.write("gamma/last.pt", torch_bytes(self.sources["gamma"].next()), ".pt", self.rng.random() < 0.5)

    def save_best(self):
        source = self.sources["best"]
        state = source.next()
        self.write(f"best/step_{source.step}.safetensors", safetensors.torch.save(state["model"]), ".safetensors")

    def overwrite(self):
        """Another state of a run under an existing name."""
        if self.tree.files:
            path = self.any_file()
            state = self.sources["gamma"].next()
            data, kind = (safetensors.torch.save(state["model"]), ".safetensors") if path.endswith(".safetensors") else (torch_bytes(state), ".pt")
            self.write(path, data, kind, self.rng.random() < 0.3)

    # --- names

    def delete(self):
        if self.tree.files:
            path = self.any_file()
            os.unlink(self.tree.full(path))
            del self.tree.files[path]
            self.note(path, path)

    def delete_tree(self):
        if path := self.any_directory():
            shutil.rmtree(self.tree.full(path))
            self.tree.remove_tree(path)
            self.note(path, path)

    def rename(self):
        if self.tree.files:
            source = self.any_file()
            target = self.target_for(source)
            os.rename(self.tree.full(source), self.tree.full(target))
            self.tree.move(source, target)
            self.note(f"{source} -> {target}", source, target)

    def rename_directory(self):
        if source := self.any_directory():
            homes = [d for d in sorted(self.tree.dirs) if d != source and not d.startswith(source + "/") and d.count("/") < 2]
            target = self.new_name(self.rng.choice([os.path.dirname(source), self.rng.choice(homes)]), "")
            os.rename(self.tree.full(source), self.tree.full(target))
            self.tree.move(source, target)
            self.note(f"{source} -> {target}", source, target)

    def link(self):
        if self.tree.files:
            source = self.any_file()
            directory = self.rng.choice([os.path.dirname(source), "keep"])
            self.make_directory(directory)
            target = self.new_name(directory, os.path.splitext(source)[1])
            os.link(self.tree.full(source), self.tree.full(target))
            inode = self.tree.files[target] = self.tree.files[source]
            inode.exact = inode.exact and wants_exact(target)
            self.note(f"{source} = {target}", source, target)

    def copy(self):
        """With an open handle on the source, so that it cannot be released between our read and the copy."""
        if not self.tree.files:
            return
        source, how = self.any_file(), self.rng.choice(["cp", "cp --reflink=auto", "cp -p", "copyfile", "copy"])
        target = self.target_for(source)
        mtime = self.tick()
        origin, there = self.tree.files[source], self.tree.files.get(target)
        self.note(f"{how} {source} {target}", source, target)
        if there is origin:
            return
        with open(self.tree.full(source), "rb", buffering=0) as f:
            data = f.readall()
            self.tree.settle(source, data, self.tree.attribute(source, "state") == "released")
            paths = (self.tree.full(source), self.tree.full(target))
            if how.startswith("cp"):
                subprocess.run([*how.split(), *paths], check=True, capture_output=True, timeout=60)
            else:
                getattr(shutil, how)(*paths)
        inode = there or Inode(data, origin.kind)
        if how == "cp -p" or how == "copy":
            inode.mode = origin.mode
        elif not there:
            inode.mode = 0o644 if how == "copyfile" else origin.mode & ~0o022
        self.tree.files[target] = inode
        self.rewritten(inode, data, origin.kind, origin.mtime if how == "cp -p" else mtime, origin.final or origin.carried)
        # Until its time is set, it is older than all others of any lineage that it may be in.
        inode.superseded = True if len(self.tree.files) > 1 else False
        if how != "cp -p":
            os.utime(self.tree.full(target), ns=(mtime, mtime))

    # --- content and metadata

    def truncate(self):
        if not self.tree.files:
            return
        path, to_nothing = self.any_file(), self.rng.random() < 0.4
        inode = self.tree.files[path]
        mtime, size = self.tick(), 0 if to_nothing else len(inode.data) // 2
        coin = self.rng.random() < 0.5  # drawn in any case: the next operations must not depend on released files
        by_path = to_nothing or (coin and bool(inode.final))
        if by_path:
            os.truncate(self.tree.full(path), size)
            data = inode.data
            os.utime(self.tree.full(path), ns=(mtime, mtime))
        else:
            with open(self.tree.full(path), "r+b", buffering=0) as f:
                data = f.readall()
                self.tree.settle(path, data)
                f.truncate(size)
                os.fsync(f.fileno())
                os.utime(f.fileno(), ns=(mtime, mtime))
        self.rewritten(inode, data[:size], None, mtime)
        inode.superseded = by_path and size > 0  # until its time is set it is older than all others
        self.note(f"{path} to {size}", path)

    def append(self):
        if not self.tree.files:
            return
        path, extra, mtime = self.any_file(), self.rng.randbytes(self.rng.randrange(1, 5000)), self.tick()
        inode = self.tree.files[path]
        with open(self.tree.full(path), "a+b", buffering=0) as f:
            f.seek(0)
            data = f.readall()
            self.tree.settle(path, data)
            f.write(extra)
            os.fsync(f.fileno())
            os.utime(f.fileno(), ns=(mtime, mtime))
        self.rewritten(inode, data + extra, None, mtime)
        self.note(f"{path} {len(extra)} bytes", path)

    def chmod(self):
        if self.tree.files:
            path, mode = self.any_file(), self.rng.choice([0o600, 0o640, 0o644, 0o664, 0o755])
            os.chmod(self.tree.full(path), mode)
            self.tree.files[path].mode = mode
            self.note(f"{path} {mode:o}", path)

    def utime(self):
        """To now, or back among the older ones: the newest may change."""
        if self.tree.files:
            path, mtime = self.any_file(), self.tick()
            if self.rng.random() < 0.5:
                mtime = FIRST_SECOND * 1_000_000_000 + self.rng.randrange(1, self.clock + 1) * 1_000_000_000 + self.rng.randrange(1000)
            os.utime(self.tree.full(path), ns=(mtime, mtime))
            self.tree.files[path].mtime = mtime
            self.note(f"{path} {mtime}", path)

    def setxattr(self):
        if self.tree.files:
            path, value = self.any_file(), self.rng.randbytes(20)
            os.setxattr(self.tree.full(path), "user.note", value)
            self.tree.files[path].xattrs["user.note"] = value
            self.note(path, path)

    # --- stepfs

    def sync(self):
        self.mount.sync()

    def gc(self):
        harness.run("gc", self.mount.dir)

    def pin(self):
        """From now on a resident file stays resident."""
        if self.tree.files:
            path = self.any_file()
            harness.run("pin", self.tree.full(path))
            inode = self.tree.files[path]
            inode.pinned = True
            inode.stays = inode.stays or self.tree.attribute(path, "state") != "released"
            self.note(path, path)

    def unpin(self):
        pinned = sorted(path for path, inode in self.tree.files.items() if inode.pinned)
        if pinned:
            path = self.rng.choice(pinned)
            harness.run("unpin", self.tree.full(path))
            self.tree.files[path].pinned = self.tree.files[path].stays = False
            self.note(path, path)

    def recall(self):
        """Back to a plain file: its bytes stay the same, now and after another release."""
        if self.tree.files:
            path = self.any_file()
            harness.run("recall", self.tree.full(path))
            self.note(path, path)

    def release(self):
        """Exit code 1 says that it must stay."""
        if self.tree.files:
            path = self.any_file()
            code = harness.run("release", self.tree.full(path), check=False).returncode
            require(code in (harness.OK, harness.FAILURE), f"release: exit code {code}")
            self.note(path, path)

    def gc_at_rest(self):
        self.mount.umount()
        harness.run("gc", self.mount.store)
        self.mount.mount()

    def policy(self):
        policies.policy(self)

    def remount(self):
        self.mount.umount()
        self.mount.passthrough = self.rng.random() < 0.7
        self.mount.mount()

    def kill(self):
        """SIGKILL at any point of the daemon's work."""
        self.mount.kill()
        self.mount.passthrough = self.rng.random() < 0.7
        self.mount.mount()
        self.tree.note_dir_times(set(self.tree.dirs))
