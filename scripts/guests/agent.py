"""Runs in a guest: calls Python functions for the host's tests (tests/real/support/guests.py), each connection in a thread.

A request is (name, arguments, keywords, keep). The name is that of a function with its module, or (number, name) for a method or an
attribute of an object that was kept. The answer is ("value", value), ("kept", number) or ("error", exception).
"""

import collections.abc
import importlib
import itertools
import pickle
import sys
import threading
from multiprocessing.connection import Listener
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/real/support"), str(ROOT / "tests/real/frameworks"), str(ROOT / "scripts")]
kept, numbers = {}, itertools.count()


def found(name):
    """The object of a dotted name."""
    if isinstance(name, tuple):
        return getattr(kept[name[0]], name[1])
    words = name.split(".")
    for length in range(len(words), 0, -1):
        try:
            value = importlib.import_module(".".join(words[:length]))
        except ModuleNotFoundError:
            continue
        for word in words[length:]:
            value = getattr(value, word)
        return value
    raise NameError(name)


def answer(name, arguments, keywords, keep):
    try:
        value = found(name)
        if callable(value):
            value = value(*arguments, **keywords)
        if isinstance(value, collections.abc.Iterator) and not hasattr(value, "read"):
            value = list(value)
        try:
            if not keep:
                pickle.dumps(value)
                return "value", value
        except (TypeError, pickle.PicklingError):
            pass
        number = next(numbers)
        kept[number] = value
        return "kept", number
    except BaseException as error:  # noqa: BLE001
        try:
            pickle.loads(pickle.dumps(error))
            return "error", error
        except Exception:
            return "error", RuntimeError(f"{type(error).__name__}: {error}")


def serve(connection):
    try:
        while True:
            connection.send(answer(*connection.recv()))
    except (EOFError, OSError):
        pass


def main():
    listener = Listener(("0.0.0.0", 1), backlog=64, authkey=Path("/run/guest/key").read_bytes())
    while True:
        try:
            connection = listener.accept()
        except Exception:  # noqa: BLE001
            # Somebody else called, or went away.
            continue
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
