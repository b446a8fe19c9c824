"""Guests: kernels of their own on this host (User-Mode Linux), which share a file system (scripts/guests.sh boots them).

The host's tests call functions in a guest: `guest.call("os.listdir", "/shared")`. An object that cannot travel stays there, and
a `Far` stands for it here.
"""

import json
import os
import signal
import subprocess
import threading
import time
from multiprocessing.connection import Client
from pathlib import Path, PurePath

# Longer than any call that waits for a lost lock.
LONGEST = 600


class Far:
    """An object in a guest."""

    def __init__(self, guest, number):
        self.__dict__.update(guest=guest, number=number)

    def get(self, name):
        """The value of an attribute."""
        return self.guest.call((self.number, name))

    def __getattr__(self, name):
        return lambda *arguments, **keywords: self.guest.call((self.number, name), *arguments, **keywords)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.guest.call((self.number, "close"))


class There:
    """A path in a guest, with the methods of `Path`. Another path that is given to one is in the same guest."""

    def __init__(self, guest, path):
        self.guest, self.path = guest, Path(path)

    def __truediv__(self, name):
        return There(self.guest, self.path / name)

    def __str__(self):
        return str(self.path)

    def __fspath__(self):
        raise TypeError(f"{self.path} is in {self.guest.name}")

    def __getattr__(self, name):
        if name in ("name", "parent", "parts", "suffix", "stem"):
            value = getattr(self.path, name)
            return There(self.guest, value) if isinstance(value, PurePath) else value
        return lambda *arguments, **keywords: self.guest.call(f"pathlib.Path.{name}", self.path, *arguments, **keywords)


class Module:
    """A module in a guest: `guest.os.listdir(path)`."""

    def __init__(self, guest, name):
        self.guest, self.name = guest, name

    def __getattr__(self, name):
        return lambda *arguments, **keywords: self.guest.call(f"{self.name}.{name}", *arguments, **keywords)


class Guest:
    def __init__(self, name, engine, address, key, link, pid):
        self.name, self.engine, self.address, self.key, self.link, self.pid = name, engine, address, bytes.fromhex(key), link, pid
        self.shared_address = f"10.78.0.{int(name.removeprefix('guest')) + 1}"
        self.mine = threading.local()
        self.os, self.shutil = Module(self, "os"), Module(self, "shutil")

    def connect(self):
        return Client((self.address, 1), authkey=self.key)

    def call(self, name, *arguments, keep=False, patience=LONGEST, **keywords):
        """Calls a function. An exception is raised here."""
        plain = lambda value: value.path if isinstance(value, There) else value
        arguments = [plain(value) for value in arguments]
        keywords = {key: plain(value) for key, value in keywords.items()}
        if getattr(self.mine, "connection", None) is None:
            self.mine.connection = self.connect()
        connection = self.mine.connection
        connection.send((name, arguments, keywords, keep))
        if not connection.poll(patience):
            self.mine.connection = None
            raise TimeoutError(f"{self.name}: {name}{arguments!r} did not return within {patience} s")
        kind, value = connection.recv()
        if kind == "error":
            raise value
        return Far(self, value) if kind == "kept" else value

    def run(self, *argv, check=True, patience=LONGEST, **options):
        """Runs a command."""
        done = self.call("subprocess.run", [str(word) for word in argv], patience=patience,
                         **{"capture_output": True, "text": True, "stdin": -3, **options})
        if check and done.returncode:
            raise AssertionError(f"{self.name}: {' '.join(map(str, argv))}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def path(self, path):
        return There(self, path)

    # --- the machine

    def cut(self):
        """Cuts the network between the guests; the host still reaches this one."""
        subprocess.run(["ip", "link", "set", self.link, "nomaster"], check=True)

    def join(self):
        subprocess.run(["ip", "link", "set", self.link, "master", "shared"], check=True)

    def suspend(self):
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self):
        os.kill(self.pid, signal.SIGCONT)

    def await_agent(self, seconds):
        end = time.monotonic() + seconds
        while True:
            try:
                return self.call("os.getpid", patience=5)
            except (OSError, EOFError, TimeoutError):
                self.mine.connection = None
                if time.monotonic() > end:
                    raise AssertionError(f"{self.name} does not answer") from None
                time.sleep(.2)


def in_guests():
    return "STEPFS_GUESTS" in os.environ


def calls_to_ceph():
    """How many requests Ceph's server of names and locks has had."""
    [socket] = (Path(os.environ["STEPFS_GUESTS"]).parent / "ceph/run").glob("mds.*.asok")
    said = subprocess.run(["ceph", "--admin-daemon", socket, "perf", "dump", "mds_server"], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)["mds_server"]["handle_client_request"]


def guests():
    """All guests, the server first. `STEPFS_GUESTS` names the file that scripts/guests.sh writes."""
    return [Guest(**one) for one in json.loads(Path(os.environ["STEPFS_GUESTS"]).read_text())]
