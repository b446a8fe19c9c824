"""Several daemons that serve one shared store, each on a mount of its own: on this machine, or in guests (guests.py)."""

import errno
import fcntl
import importlib
import os
import re
import shutil
import signal
import struct
from pathlib import Path

import harness
from guests import There, guests, in_guests
from harness import Mount, run, wait_until


class Node(Mount):
    """One daemon of a shared store."""

    def __init__(self, base, store, **options):
        super().__init__(base, store=store, **options)

    def arguments(self):
        return ["mount", "--shared", *super().arguments()[1:]]

    def role(self):
        return os.getxattr(self.dir, "user.stepfs.role").decode()

    def is_keeper(self):
        return self.role() == "keeper"

    def signal(self, number):
        os.kill(self.pid, number)

    def die(self):
        """The daemon is killed; the mount that it leaves is taken down by the next `mount`."""
        self.kill(signal.SIGKILL)
        self.pid = None

    def call(self, name, *arguments, **keywords):
        """Calls a function where this node is."""
        module, _, function = name.rpartition(".")
        return getattr(importlib.import_module(module), function)(*arguments, **keywords)

    def save_walk(self, below, *arguments, **keywords):
        return self.call("series.save_walk", self.dir / below, *arguments, **keywords)

    def name_of_place(self):
        return "here"

    def log_text(self):
        return self.log.read_text(errors="replace")


class FarNode:
    """A `Node` in a guest."""

    def __init__(self, guest, base, store, **options):
        self.guest = guest
        guest.call("os.environ.update", {"STEPFS_BIN": str(harness.BIN), **{k: v for k, v in os.environ.items() if k == "STEPFS_GRACE_MS"}})
        self.far = guest.call("nodes.Node", base, store, keep=True, **options)
        self.base, self.dir = guest.path(base), guest.path(base) / "mnt"

    def __truediv__(self, name):
        return self.dir / name

    def __getattr__(self, name):
        return getattr(self.far, name)

    @property
    def pid(self):
        return self.far.get("pid")

    def mount(self):
        self.far.mount()
        return self

    def call(self, name, *arguments, **keywords):
        return self.guest.call(name, *arguments, **keywords)

    def save_walk(self, below, *arguments, **keywords):
        return self.call("series.save_walk", self.dir / below, *arguments, **keywords)

    def name_of_place(self):
        return self.guest.name


class Nodes(list):
    """All daemons of a store."""

    def __init__(self, base, count, passthrough=True):
        self.base = Path(base)
        if in_guests():
            _, *clients = guests()
            self.store = clients[0].path("/shared") / self.base.name / "store"
            self.store.parent.mkdir(parents=True, exist_ok=True)
            places = [clients[number % len(clients)] for number in range(count)]
            super().__init__(FarNode(place, self.base / f"node{number}", self.store.path, passthrough=passthrough)
                             for number, place in enumerate(places))
        else:
            self.store = self.base / "store"
            super().__init__(Node(self.base / f"node{number}", self.store, passthrough=passthrough) for number in range(count))

    def mount(self):
        for node in self:
            node.mount()
        return self

    def keeper(self, timeout=20):
        """The daemon that is the keeper, once there is one."""
        found = []

        def look():
            found[:] = [node for node in self if node.pid and node.is_keeper()]
            return len(found) == 1

        wait_until(look, timeout, f"one keeper: {[node.pid and node.role() for node in self]}")
        return found[0]

    def close(self):
        for node in self:
            node.close()

    def remove(self):
        if in_guests():
            # NFS keeps a removed file under another name until the kernel has closed it.
            wait_until(self.is_removed, 60, "the store's files are closed")
        harness.remove_base(self.base)

    def is_removed(self):
        try:
            self.store.guest.shutil.rmtree(self.store.parent)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EBUSY, errno.ENOENT):
                raise
        return not self.store.parent.exists()


def open_nodes(count, passthrough=True):
    """For a fixture."""
    nodes = Nodes(harness.make_base(), count, passthrough)
    try:
        yield nodes.mount()
    finally:
        nodes.close()
        nodes.remove()


def verify(store):
    return store.guest.call("nodes.verify", store) if isinstance(store, There) else run("verify", store)


def alone(path):
    """The lock of whoever replaces a file, on the file in the store."""
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(handle, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 1 << 62, 2, 0))
    except OSError:
        # NFS keeps a removed file as long as it is open here.
        os.close(handle)
        raise
    return handle


def step_of(path):
    """The step in a checkpoint of torch."""
    import torch

    return torch.load(path)["step"]


def calls_to_nfs():
    """How many calls this machine has sent to NFS servers, without reads and writes of bytes."""
    counts = re.findall(r"^\s+([A-Z_]+): (\d+) ", Path("/proc/self/mountstats").read_text(), re.MULTILINE)
    return sum(int(count) for name, count in counts if name not in ("READ", "WRITE"))


def open_often(path, count):
    for _ in range(count):
        os.close(os.open(path, os.O_RDONLY))
