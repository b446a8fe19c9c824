"""Several daemons that serve one shared store, each on a mount of its own."""

import os
import signal
from pathlib import Path

import harness
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

    def die(self):
        """The daemon is killed; the mount that it leaves is taken down by the next `mount`."""
        self.kill(signal.SIGKILL)
        self.pid = None


class Nodes(list):
    """All daemons of a store."""

    def __init__(self, base, count, passthrough=True):
        self.base, self.store = Path(base), Path(base) / "store"
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


def open_nodes(count, passthrough=True):
    """For a fixture."""
    base = harness.make_base()
    nodes = Nodes(base, count, passthrough)
    try:
        yield nodes.mount()
    finally:
        nodes.close()
        harness.remove_base(base)


def verify(store):
    return run("verify", store)
