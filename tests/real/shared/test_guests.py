"""Two machines, and a file system with a server: what one machine alone cannot show. See scripts/guests.sh."""

import errno
import sys
import threading
import time

import pytest
from guests import calls_to_ceph, guests, in_guests
from harness import wait_until
from nodes import open_nodes, verify

pytestmark = [pytest.mark.stepfs, pytest.mark.slow, pytest.mark.skipif(not in_guests(), reason="needs guests (scripts/guests.sh)")]

# Looks at a directory of the server without a pause, until a file appears. Prints what no client may leave there for a moment.
WATCH = """
import os, sys
tree, name, end = sys.argv[1:]
looks, missing, others = 0, 0, set()
while not os.path.exists(end):
    names = os.listdir(tree)
    looks += 1
    missing += name not in names
    others |= {one for one in names if one.startswith(".nfs")}
print(looks, missing, sorted(others))
"""


@pytest.fixture
def nodes():
    yield from open_nodes(2)


def watched(nodes, name, work):
    """Does work while the server's directory is watched. Answers the looks, those without the name, and names that NFS made."""
    server = guests()[0]
    if server.engine == "ceph":
        pytest.skip("the server shows no names")
    end, said = "/run/watched", []
    if server.call("os.path.exists", end):
        server.os.unlink(end)
    command = [sys.executable, "-c", WATCH, str(nodes.store.path / "tree"), name, end]
    thread = threading.Thread(target=lambda: said.append(server.run(*command).stdout))
    thread.start()
    try:
        work()
    finally:
        server.path(end).write_text("")
        thread.join(60)
    looks, missing, others = said[0].split(maxsplit=2)
    assert int(looks) > 100
    return int(missing), others.strip()


def test_a_name_is_there_while_stepfs_replaces_its_file(nodes):
    names = nodes[0].save_walk("", 3)
    keeper = nodes.keeper()

    def release_and_recall():
        keeper.sync()
        assert keeper.state(names[0]) == "released"
        with (nodes[1] / names[0]).open("r+b") as file:
            file.write(b"changed")
        # Known to a kernel, and then replaced by both nodes.
        for number in range(10):
            new = nodes[number % 2] / "new"
            new.write_bytes(bytes([number]) * 100_000)
            new.rename(nodes[number % 2] / names[0])
            assert (nodes[1 - number % 2] / names[0]).read_bytes() == bytes([number]) * 100_000

    assert watched(nodes, names[0], release_and_recall) == (0, "[]")
    verify(nodes.store)


def test_an_open_asks_the_server(nodes):
    """As often as docs/MACHINES.md says."""
    node, opens, engine = nodes[0], 200, guests()[0].engine
    (node / "run").mkdir()
    (node / "run/file").write_bytes(b"x" * 100_000)
    nodes.keeper().sync()

    def calls():
        return calls_to_ceph() if engine == "ceph" else node.call("nodes.calls_to_nfs")

    def asked():
        before = calls()
        node.call("nodes.open_often", node / "run/file", opens)
        return (calls() - before) / opens

    # The keeper looks at the tree every two seconds, and asks meanwhile.
    expected = 2 if engine == "ceph" else 11
    assert expected - .1 < min(asked() for _ in range(5)) < expected + .5


def test_a_machine_that_was_cut_off_changes_nothing(nodes):
    keeper, other = nodes
    if other.guest.engine == "ceph":
        pytest.skip("Ceph blocks such a machine until its file system is mounted anew")
    names = keeper.save_walk("", 3)
    assert keeper is nodes.keeper()
    file = (other / names[0]).open("r+b")
    file.seek(1000)
    other.guest.cut()
    try:
        # The server gives its lock to the keeper.
        wait_until(lambda: keeper.state(names[0]) == "released", 120, "the file is released")
        released = (keeper / names[0]).read_bytes()
    finally:
        other.guest.join()
    errors = []
    for _ in range(2):
        try:
            file.write(b"late")
            file.flush()
            other.call("os.fsync", file.fileno())
            errors.append(None)
        except OSError as error:
            errors.append(error.errno)
    try:
        file.close()
    except OSError:
        pass
    assert None not in errors, "the first error stays"
    assert set(errors) <= {errno.EIO, errno.ESTALE, errno.EBADF}, errors
    assert [(node / names[0]).read_bytes() == released for node in nodes] == [True] * 2
    # It goes on, with its locks taken anew: a daemon that joins sees them.
    (other / "after").write_bytes(b"after" * 20_000)
    assert (keeper / "after").stat().st_size == 100_000
    time.sleep(3)
    keeper.umount()
    keeper.mount()
    assert nodes.keeper(60).is_keeper()
    verify(nodes.store)
