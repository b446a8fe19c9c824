"""Daemons of one machine serve one store: three kernels' worth of caches, one file system."""

import errno
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import harness
import pytest
from guests import in_guests
from harness import FAILURE, run, wait_until
from nodes import Nodes, alone, open_nodes, verify
from series import save_walk

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]


of_one_machine = pytest.mark.skipif(in_guests(), reason="needs no other machine")


@pytest.fixture(params=[True, False], ids=["passthrough", "daemon"])
def nodes(request):
    if request.param and in_guests():
        pytest.skip("the guests' kernel has no passthrough")
    yield from open_nodes(3, request.param)


def names_in(node, below=""):
    return sorted(node.call("os.listdir", node.dir / below))


def test_a_file_of_one_is_a_file_of_all(nodes):
    a, b, c = nodes
    (a / "run").mkdir()
    (a / "run/x").write_bytes(b"1" * 100_000)
    assert [(n / "run/x").read_bytes() for n in nodes] == [b"1" * 100_000] * 3
    # In place, shorter and longer, with names that others know.
    (b / "run/latest").write_text("9")
    for step in range(10, 2000, 97):
        node, others = nodes[step % 3], [nodes[(step + 1) % 3], nodes[(step + 2) % 3]]
        (node / "run/latest").write_text(str(step) if step % 2 else "s")
        assert [(n / "run/latest").read_text() for n in others] == [str(step) if step % 2 else "s"] * 2
    (c / "run").rename(c / "done")
    assert [names_in(n) for n in nodes] == [["done"]] * 3
    assert not (a / "run/x").exists() and (b / "done/x").stat().st_size == 100_000
    # A new directory under the name that others knew.
    (a / "run").mkdir()
    assert [names_in(n, "run") for n in nodes] == [[]] * 3
    (b / "done/x").unlink()
    for n in nodes:
        with pytest.raises(FileNotFoundError):
            (n / "done/x").read_bytes()
    (a / "done/latest").unlink()
    (c / "done").rmdir()
    assert names_in(a) == ["run"]
    # Names that all have just missed.
    for step in range(30):
        assert not any((n / f"run/{step}").exists() for n in nodes)
        (nodes[step % 3] / f"run/{step}").touch()
        assert all((n / f"run/{step}").exists() for n in nodes)


def test_a_directory_gets_its_former_name_back(nodes):
    a, b = nodes[:2]
    (a / "run").mkdir()
    for round in range(3):
        (a / "run/new").mkdir()
        assert names_in(b, "run/new") == []
        (a / "run/new").rename(a / "run/best")
        assert names_in(b, "run/best") == []
        # The next one may get its number.
        (a / "run/best").rmdir()
        assert not (b / "run/best").exists()
        (a / "run/new").mkdir()
        (b / "run/new/x").write_text(str(round))
        assert (a / "run/new/x").read_text() == str(round)
        (b / "run/new/x").unlink()
        (b / "run/new").rmdir()


@pytest.mark.parametrize("mode", ["ab", "a+b"])
@of_one_machine
def test_lines_that_two_daemons_append_stay(nodes, mode):
    """NFS itself promises that only to those who open the file for each line."""
    a, b = nodes[:2]
    (a / "log").write_bytes(b"first\n")
    expected = [b"first\n"]
    with (a / "log").open(mode, buffering=0) as one, (b / "log").open(mode, buffering=0) as other:
        for number in range(6):
            for name, log in (("one", one), ("other", other)):
                # The kernel of the other one knows of a shorter file.
                line = f"{number} of {name} {'x' * (number * 3000)}\n".encode()
                assert log.write(line) == len(line)
                expected.append(line)
                if mode == "a+b":
                    log.seek(0)
                    assert log.read() == b"".join(expected)
    assert [(node / "log").read_bytes() == b"".join(expected) for node in nodes] == [True] * 3


@of_one_machine
def test_daemons_that_make_a_store_at_the_same_moment(tmp_path):
    for round in range(4):
        nodes = Nodes(tmp_path / str(round), 3)
        try:
            starting = [subprocess.Popen([harness.BIN, *map(str, node.arguments())], stdin=subprocess.DEVNULL) for node in nodes]
            assert [start.wait(60) for start in starting] == [0, 0, 0]
            for node in nodes:
                node.pid = node.find_daemon()
            (nodes[0] / "x").write_text("x")
            assert [(node / "x").read_text() for node in nodes] == ["x"] * 3
        finally:
            nodes.close()


def test_the_keeper_releases_files_of_all_and_each_reads_them(nodes):
    names = []
    for number, node in enumerate(nodes):
        (node / f"run{number}").mkdir()
        names += [f"run{number}/{name}" for name in node.save_walk(f"run{number}", 4, seed=number)]
    keeper = nodes.keeper()
    keeper.sync()
    states = keeper.states()
    assert [states[name] for name in names] == (["released"] * 3 + ["sealed"]) * 3, states
    for name in names:
        read = [(node / name).read_bytes() for node in nodes]
        assert read[0] == read[1] == read[2] and len(read[0]) > 1_000_000
        nodes[1].call("nodes.step_of", nodes[1] / name)
    # Others read the store without the keeper.
    other = next(node for node in nodes if node is not keeper)
    assert {row["path"].removeprefix(str(other.dir)).strip("/") for row in other.ls()} == set(names)
    status = other.status()
    assert status["shared"].startswith("serving, keeper on ") and status["released"] == 9
    assert "keeper" in keeper.call("harness.run", "status", keeper.dir).stdout
    assert "keeper's mount" in other.call("harness.run", "release", other / names[0], check=False).stderr
    verify(nodes.store)


def test_a_released_file_is_written_through_any_mount(nodes):
    names = nodes[0].save_walk("", 4)
    keeper = nodes.keeper()
    keeper.sync()
    assert keeper.state(names[0]) == "released"
    for number, node in enumerate(nodes):
        name = names[number]
        whole = (nodes[number - 1] / name).read_bytes()
        with (node / name).open("r+b") as file:
            file.seek(1000)
            file.write(b"changed")
            file.flush()
            node.call("os.fsync", file.fileno())
            expected = whole[:1000] + b"changed" + whole[1007:]
            assert [(n / name).read_bytes() == expected for n in nodes] == [True] * 3
    # A link to a released file, and an overwrite of it.
    nodes[1].save_walk("", 4, seed=5)
    keeper.sync()
    assert keeper.state(names[0]) == "released"
    whole = (nodes[1] / names[0]).read_bytes()
    nodes[2].call("os.link", nodes[2] / names[0], nodes[2] / "linked")
    assert (nodes[0] / "linked").read_bytes() == whole and (nodes[1] / names[0]).stat().st_nlink == 2
    with (nodes[1] / names[1]).open("wb") as file:
        file.write(b"short")
    assert (nodes[0] / names[1]).read_bytes() == b"short"
    verify(nodes.store)


def test_a_reader_goes_on_while_another_daemon_brings_the_file_back(nodes):
    a, b = nodes[:2]
    names = a.save_walk("", 3)
    nodes.keeper().sync()
    assert nodes.keeper().state(names[0]) == "released"
    size, whole = (a / names[0]).stat().st_size, (a / names[0]).read_bytes()
    with (a / names[0]).open("rb") as file:
        first = file.read(1000)
        with (b / names[0]).open("r+b") as other:
            other.seek(size - 1)
            other.write(b"!")
        # The kernel does not believe its attributes any longer.
        time.sleep(1.2)
        assert a.call("os.fstat", file.fileno()).st_size == size
        assert first + file.read() == whole


@of_one_machine
def test_no_daemon_keeps_the_room_of_files_that_went(nodes):
    """The kernels know the files: all of them were looked at."""
    keeper = nodes.keeper()
    names = nodes[0].save_walk("", 3)
    (nodes[0] / "large").write_bytes(b"x" * (4 << 20))
    for node in nodes:
        assert sum(path.stat().st_size > 0 for path in node.dir.iterdir()) == 4

    def kept():
        links = [link for node in nodes for link in harness.open_files(node.pid)]
        return [link for link in links if link.endswith("(deleted)") and "/tree/" in link]

    (nodes[1] / "large").unlink()
    # Nobody looks a name up from here on.
    os.setxattr(keeper.dir, "user.stepfs.sync", b"1")
    is_stub = lambda name: (nodes.store / "tree" / name).stat().st_blocks < 100
    wait_until(lambda: is_stub(names[0]) and is_stub(names[1]), 60, "older states are released")
    wait_until(lambda: not kept(), 10, "their room is free")


@of_one_machine
def test_a_full_disk_is_told_once_the_keeper_had_time(tmp_path):
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with open(image, "wb") as f:
        f.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-J", "size=4", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    nodes = Nodes(tmp_path, 2, passthrough=False)
    for node in nodes:
        node.store = disk / "store"
    try:
        nodes.mount()
        began = time.monotonic()
        with pytest.raises(OSError) as error, open(nodes[1] / "large", "wb") as f:
            f.write(bytes(48 << 20))
        assert error.value.errno == errno.ENOSPC and time.monotonic() - began < 120
    finally:
        nodes.close()
        subprocess.run(["umount", disk], check=True)


def test_a_file_that_is_open_anywhere_stays(nodes):
    keeper = nodes.keeper()
    other = next(node for node in nodes if node is not keeper)
    names = nodes[0].save_walk("", 3)
    with (other / names[0]).open("rb") as file:
        keeper.sync()
        assert keeper.state(names[0]) != "released" and keeper.state(names[1]) == "released"
        assert len(file.read()) > 1_000_000
    keeper.sync()
    wait_until(lambda: keeper.state(names[0]) == "released", 20, "the file is released once it is closed")


def test_an_older_state_stays_while_the_newest_is_written_elsewhere(nodes):
    keeper = nodes.keeper()
    other = next(node for node in nodes if node is not keeper)
    names = nodes[0].save_walk("", 2)
    with (other / names[1]).open("r+b") as file:
        time.sleep(9)
        assert keeper.state(names[0]) != "released"
        file.write(b"x")
    with (other / names[1]).open("r+b") as file:
        time.sleep(9)
        assert keeper.state(names[0]) != "released"


def test_another_daemon_becomes_the_keeper(nodes):
    names = nodes[0].save_walk("", 3)
    nodes.keeper().sync()
    for round in range(2):
        keeper = nodes.keeper()
        keeper.die()
        left = [node for node in nodes if node.pid]
        # Files are read and written meanwhile.
        assert (left[0] / names[0]).stat().st_size > 1_000_000 and (left[0] / names[0]).read_bytes()
        (left[0] / f"run{round}").mkdir()
        new = [f"run{round}/{name}" for name in left[0].save_walk(f"run{round}", 3, seed=round)]
        nodes.keeper().sync()
        assert [nodes.keeper().state(name) for name in new] == ["released", "released", "sealed"]
    for node in nodes:
        if not node.pid:
            node.mount()
    assert [names_in(node) for node in nodes] == [sorted([*names, "run0", "run1"])] * 3
    verify(nodes.store)


def test_a_keeper_that_wakes_up_late_does_nothing(nodes):
    """The lock of a suspended machine ends: here its file is moved away."""
    old = nodes.keeper()
    # A daemon that sleeps keeps what it has open: here nothing of the programs'.
    names = next(node for node in nodes if node is not old).save_walk("", 4)
    wait_until(lambda: any(old.state(name) != "staged" for name in names), 20, "it works")
    old.signal(signal.SIGSTOP)
    try:
        (nodes.store / "keeper/lock").rename(nodes.store.parent / "lock")
        left = [node for node in nodes if node is not old]
        wait_until(lambda: any(node.is_keeper() for node in left), 20, "another daemon is the keeper")
        new = next(node for node in left if node.is_keeper())
        new.sync()
        # It may also sleep while it replaces a file; the new keeper releases that one later.
        before = {name: (new / name).read_bytes() for name in names if new.state(name) == "released"}
        assert before
    finally:
        old.signal(signal.SIGCONT)
    assert not old.is_keeper()
    time.sleep(3)
    assert {name: (old / name).read_bytes() for name in before} == before
    assert new.is_keeper() and len(list((nodes.store / "keeper").iterdir())) == 2
    verify(nodes.store)


NAMES = ["open", "unlink", "rename", "rename over", "truncate"]


# The keeper removes small files, too, but gives none up.
@pytest.mark.parametrize("call,size", [(call, size) for size in (100_000, 10) for call in NAMES + ["link", "chmod"] * (size > 10)])
def test_a_program_waits_while_a_file_is_replaced(call, size):
    for nodes in open_nodes(1):
        file, other = nodes[0] / "file", nodes[0] / "other"
        file.write_bytes(b"x" * size)
        other.write_bytes(b"y" * 100_000)
        # An election takes down all fences, also the one below.
        nodes.keeper()
        lock = lambda: nodes[0].call("nodes.alone", nodes.store / "tree/file")
        wait_until(lambda: not isinstance(attempt(lock, nodes[0]), OSError), 10, "the file is closed")
        held = lock()
        fence = nodes.store / f"replacing/{nodes[0].call('os.fstat', held).st_ino:x}/0/stub"
        fence.parent.mkdir(parents=True)
        fence.write_text("")
        calls = {"open": lambda: file.open("r+b").close(), "unlink": file.unlink, "rename": lambda: file.rename(nodes[0] / "new") and None,
                 "rename over": lambda: other.rename(file) and None, "link": lambda: nodes[0].call("os.link", file, nodes[0] / "new"),
                 "chmod": lambda: file.chmod(0o600), "truncate": lambda: nodes[0].call("os.truncate", file, 90_000)}
        done = []
        thread = threading.Thread(target=lambda: done.append(calls[call]()))
        thread.start()
        time.sleep(1)
        assert not done and fence.exists(), "it waits for the lock"
        nodes[0].call("os.close", held)
        thread.join(20)
        assert done == [None] and not fence.exists(), "it takes down the fences of whoever had the lock"


@of_one_machine
def test_links_that_wait_hold_nobody_up():
    for nodes in open_nodes(1):
        node, below = nodes[0], nodes.store / "tree"
        # More than threads answer the kernel. It keeps their directories for itself meanwhile.
        for number in range(4):
            (node / f"dir{number}").mkdir()
            (node / f"file{number}").write_bytes(b"x" * 100_000)
        wait_until(lambda: not any(isinstance(attempt(lambda: alone(below / f"file{n}")), OSError) for n in range(4)), 10, "all are closed")
        held = [alone(below / f"file{number}") for number in range(4)]
        links = [(node / f"file{number}", node / f"dir{number}/link") for number in range(4)]
        threads = [threading.Thread(target=os.link, args=link) for link in links]
        for thread in threads:
            thread.start()
        time.sleep(.5)
        other = threading.Thread(target=lambda: (node / "other").write_text("x"))
        other.start()
        other.join(10)
        answered = not other.is_alive()
        for handle in held:
            os.close(handle)
        for thread in [*threads, other]:
            thread.join(20)
        assert answered and all(link.stat().st_nlink == 2 for _, link in links)


def attempt(call, node=None):
    """The error of a lock that another one has; one that is free is given back."""
    try:
        held = call()
        node.call("os.close", held) if node else os.close(held)
    except OSError as error:
        return error


@pytest.mark.parametrize("call", ["open", "unlink", "rename", "rename over", "chmod"])
@of_one_machine
def test_whoever_waited_means_the_file_that_is_there_then(call):
    """The name leads to another file once the lock is free."""
    for nodes in open_nodes(1):
        file, other, below = nodes[0] / "file", nodes[0] / "other", nodes.store / "tree/file"
        file.write_bytes(b"x" * 100_000)
        other.write_bytes(b"y" * 100_000)
        wait_until(lambda: not isinstance(attempt(lambda: alone(below)), OSError), 10, "the file is closed")
        held = alone(below)
        done = []

        def write():
            with open(file, "r+b") as opened:
                opened.write(b"new")

        calls = {"open": write, "unlink": lambda: os.unlink(file), "rename": lambda: os.rename(file, nodes[0] / "new"),
                 "rename over": lambda: os.rename(other, file), "chmod": lambda: os.chmod(file, 0o600)}
        thread = threading.Thread(target=lambda: done.append(calls[call]()))
        thread.start()
        time.sleep(.5)
        (nodes.base / "replacement").write_bytes(b"z" * 100_000)
        # Another daemon replaces that one, too: it has the lock before the name leads there.
        second = alone(nodes.base / "replacement")
        os.rename(nodes.base / "replacement", below)
        os.close(held)
        time.sleep(.5)
        assert not done and thread.is_alive(), "it waits for the file that is there"
        os.close(second)
        thread.join(20)
        assert done == [None]
        if call == "open":
            assert below.read_bytes() == b"new" + b"z" * 99_997
        elif call == "chmod":
            assert below.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", ["rb", "r+b"])
@of_one_machine
def test_the_lock_lies_on_what_reads_and_writes(nodes, mode):
    """On NFS only the handle that has the lock is fenced."""
    (nodes[0] / "file").write_bytes(b"x" * 100_000)
    below = (nodes.store / "tree/file").stat().st_ino

    def described():
        found = []
        for fd in Path(f"/proc/{nodes[0].pid}/fd").iterdir():
            try:
                about = Path(f"/proc/{nodes[0].pid}/fdinfo/{fd.name}").read_text()
            except FileNotFoundError:
                continue
            access = int(about.split("flags:\t")[1].split()[0], 8) & os.O_ACCMODE
            is_locked = "OFDLCK" in about and str(1 << 62) in about
            # The keeper reads with handles of its own.
            if f"ino:\t{below}\n" in about and (is_locked or access != os.O_RDONLY):
                found.append((access, is_locked))
        return found

    wait_until(lambda: not described(), 10, "the daemon closes the file")
    with open(nodes[0] / "file", mode):
        # The kernel asks for one file for readers and writers.
        access = os.O_RDWR if mode == "r+b" or nodes[0].passthrough else os.O_RDONLY
        assert described() == [(access, True)]


# Prints which bytes of a file are locked, before a program writes it and meanwhile.
WRITE_ONLY = """
import os, re
from pathlib import Path
def locked():
    ino = os.stat("store/tree/file").st_ino
    return re.findall(rf"READ .*:{ino} {1 << 62} (\\d+)", Path("/proc/locks").read_text())
reader = open("mnt/file", "rb")
before = locked()
os.chmod("mnt/file", 0o200)
writer = os.open("mnt/file", os.O_WRONLY)
print(*before, *locked())
"""


@of_one_machine
def test_a_file_that_may_only_be_written_is_locked_by_its_readers(plain):
    """A daemon that is not root cannot lock what it may not read."""
    shutil.copy(harness.BIN, plain / "stepfs")
    (plain / "program.py").write_text(WRITE_ONLY)
    said = harness.as_ordinary_user(plain, "mkdir mnt; ./stepfs mount --shared --no-passthrough store mnt; head -c 200000 /dev/urandom > mnt/file; "
                                           "/usr/bin/python3 program.py; ./stepfs umount mnt").stdout  # fmt: skip
    assert said.split()[-2:] == [str(1 << 62), str((1 << 62) + 1)], said


@of_one_machine
def test_a_program_waits_while_a_daemon_asks_for_a_lease():
    """Whoever replaces a file asks so whether a program without a daemon has it."""
    set_signal, set_lease = 10, 1024
    for nodes in open_nodes(1):
        (nodes[0] / "file").write_bytes(b"x" * 100_000)
        held = -1

        def is_leased():
            nonlocal held
            held = os.open(nodes.store / "tree/file", os.O_RDWR)
            fcntl.fcntl(held, set_signal, signal.SIGURG)
            try:
                fcntl.fcntl(held, set_lease, fcntl.F_WRLCK)
            except OSError:
                os.close(held)
                return False
            return True

        wait_until(is_leased, 10, "the daemon closes the file")
        done = []
        thread = threading.Thread(target=lambda: done.append(open(nodes[0] / "file", "r+b").close()))
        thread.start()
        time.sleep(.5)
        assert not done and thread.is_alive()
        os.close(held)
        thread.join(20)
        assert done == [None]


def test_two_daemons_bring_back_one_file(nodes):
    names = nodes[0].save_walk("", 3)

    def is_released():
        # A daemon may still make a closed file durable, and others see it open meanwhile.
        nodes.keeper().sync()
        return nodes.keeper().state(names[0]) == "released"

    wait_until(is_released, 20, "the first file is released")
    whole, written = (nodes[0] / names[0]).read_bytes(), []
    # MACHINES asks for one daemon per machine on NFS.
    writers = list({node.name_of_place(): node for node in nodes}.values()) if in_guests() else nodes

    def write(node, at):
        with (node / names[0]).open("r+b") as file:
            file.seek(at)
            file.write(b"new")
            time.sleep(5)
        written.append(at)

    began = time.monotonic()
    threads = [threading.Thread(target=write, args=(node, 1000 * number)) for number, node in enumerate(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(written) == [0, 1000, 2000][: len(writers)] and time.monotonic() - began < 25, "nobody waits for the others to close it"
    for at in written:
        whole = whole[:at] + b"new" + whole[at + 3:]
    assert [(node / names[0]).read_bytes() == whole for node in nodes] == [True] * 3


@of_one_machine
def test_files_are_brought_back_while_a_keeper_is_elected(nodes):
    """A new keeper takes down the fences of all daemons."""
    names = save_walk(nodes[0].dir, 5)
    nodes.keeper().sync()
    taken, ends = [], False

    def take_down():
        while not ends:
            for above in os.listdir(nodes.store / "replacing"):
                if len(taken) < 4 and above not in taken:
                    try:
                        for fence in os.listdir(nodes.store / "replacing" / above):
                            shutil.rmtree(nodes.store / "replacing" / above / fence)
                            taken.append(above)
                    except FileNotFoundError:
                        continue

    thread = threading.Thread(target=take_down)
    thread.start()
    try:
        for name in names[:4]:
            with open(nodes[1] / name, "r+b") as file:
                file.write(b"new")
    finally:
        ends = True
        thread.join()
    assert all((node / name).read_bytes().startswith(b"new") for node in nodes for name in names[:4])
    if not taken:
        pytest.skip("no fence stood long enough to be met")


@of_one_machine
def test_an_election_that_fails_is_not_tried_again_at_once():
    for nodes in open_nodes(2):
        keeper = nodes.keeper()
        other = next(node for node in nodes if node is not keeper)
        os.rename(nodes.store / "objects", nodes.base / "objects")
        (nodes.store / "objects").write_text("not a directory")
        keeper.die()
        log = lambda: (other.base / "stepfs.log").read_text().count("cannot become the keeper")
        wait_until(lambda: log() > 0, 20, "it tries")
        time.sleep(5)
        assert log() == 1
        os.unlink(nodes.store / "objects")
        os.rename(nodes.base / "objects", nodes.store / "objects")
        wait_until(other.is_keeper, 30, "it tries again")


@pytest.mark.parametrize("told", [False, True], ids=["close", "fsync"])
@of_one_machine
def test_the_first_error_of_a_file_stays(told, tmp_path):
    """A later fsync of such a file answers that all is well."""
    below, store = tmp_path / "below", tmp_path / "store"
    below.mkdir(), store.mkdir()
    harness.shell(f"mount -t tmpfs -o size=40m tmpfs {below}; truncate -s 300m {below}/image; "
                  f"mkfs.ext4 -q -F -E nodiscard -O ^has_journal {below}/image; mount -o loop {below}/image {store}; rmdir {store}/lost+found")
    nodes = Nodes(tmp_path, 2)
    try:
        nodes.mount()
        keeper = nodes.keeper()
        names = save_walk(keeper.dir, 2)
        # More than the device takes, although the file system has room for it.
        with open(nodes[1] / names[1], "r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(os.urandom(60 << 20))
            if told:
                with pytest.raises(OSError):
                    os.fsync(file.fileno())
        log = lambda: (nodes[1].base / "stepfs.log").read_text()
        wait_until(lambda: "could not be made durable" in log(), 60, "the daemon says so")
        time.sleep(8)
        assert isinstance(attempt(lambda: alone(store / "tree" / names[1])), OSError), "nobody takes it for a newer state"
        assert keeper.state(names[0]) == "sealed" and keeper.state(names[1]) == "staged"
        # It waits for files that become durable, and this one never does.
        keeper.sync(timeout=60)
    finally:
        nodes.close()
        harness.shell(f"umount -l {store}; umount -l {below}", check=False)


@of_one_machine
def test_locks_of_programs_are_not_those_of_daemons(nodes):
    (nodes[0] / "file").write_bytes(b"x" * 100_000)
    with open(nodes[1] / "file", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with open(nodes.store / "tree/file", "r+b") as below:
            fcntl.flock(below, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_file_that_changes_again_and_again_is_not_archived():
    for nodes in open_nodes(1):
        names = nodes[0].save_walk("", 2)
        began = time.monotonic()
        while time.monotonic() - began < 9:
            nodes[0].call("os.utime", nodes[0] / names[0])
            nodes[0].call("os.utime", nodes[0] / names[1])
            time.sleep(.5)
            # It may have been quiet for a moment before.
            assert time.monotonic() - began < 5 or nodes[0].state(names[0]) == "staged"
        nodes[0].sync()
        assert nodes[0].state(names[0]) == "released"


@of_one_machine
def test_more_names_than_descriptors():
    for nodes in open_nodes(1):
        node = nodes[0]
        node.umount()
        command = shlex.join(map(str, [harness.BIN, *node.arguments()]))
        subprocess.run(["bash", "-c", f"ulimit -n 400; exec {command}"], check=True, stdin=subprocess.DEVNULL)
        node.pid = node.find_daemon()
        for number in range(1500):
            (node / f"file{number}").write_text(str(number))
        for _ in range(2):
            assert len(list(os.scandir(node.dir))) == 1500
            for number in range(1500):
                assert (node / f"file{number}").read_text() == str(number)


def test_objects_go_after_two_looks(monkeypatch):
    monkeypatch.setenv("STEPFS_GRACE_MS", "6000")
    for nodes in open_nodes(2):
        names = nodes[0].save_walk("", 5)
        keeper = nodes.keeper()
        keeper.sync()
        objects = lambda: sorted(path.name for path in (nodes.store / "objects").glob("*/*"))
        had = objects()
        assert len(had) == 4
        other = next(node for node in nodes if node is not keeper)
        # The name moves from look to look: its object stays.
        (other / "a").mkdir()
        for name in names[1:4]:
            (other / name).unlink()
        began = time.monotonic()
        while time.monotonic() - began < 5:
            (other / names[0]).rename(other / "a/x")
            (other / "a/x").rename(other / names[0])
        assert len(objects()) == 4, "nothing goes before the grace is over"
        wait_until(lambda: len(objects()) < 4, 30, "unneeded objects go")
        assert other.call("nodes.step_of", other / names[0]) == 1
        verify(nodes.store)


@of_one_machine
def test_what_cannot_be_shared_is_refused(tmp_path):
    run("mount", tmp_path / "alone", tmp_path / "m1")
    run("umount", tmp_path / "m1")
    refused = run("mount", "--shared", tmp_path / "alone", tmp_path / "m2", check=False)
    assert refused.returncode == FAILURE and "--shared makes a new store" in refused.stderr
    refused = run("mount", "--shared", "/dev/shm/stepfs-shared-test", tmp_path / "m2", check=False)
    assert refused.returncode == FAILURE and "tmpfs" in refused.stderr
    assert not os.path.exists("/dev/shm/stepfs-shared-test")
    for nodes in open_nodes(1):
        refused = run("mount", "--mirror", f"file://{tmp_path}/mirror", nodes.store, tmp_path / "m2", check=False)
        assert refused.returncode == FAILURE and "mirror" in refused.stderr
        refused = run("import", nodes.store, __file__, check=False)
        assert refused.returncode == FAILURE and "in use" in refused.stderr
        assert "several daemons" in run("doctor", nodes.store, check=False).stdout
