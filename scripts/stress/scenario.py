"""The contents of a scenario file:

    seconds = 60             duration
    seed = 1                 for the choices of actors; their timing is the machine's
    originals = 0.5          the share of files with a plain copy, to compare with once they are quantized

    [daemon]                 all optional
    passthrough = true       false: reads and writes go through the daemon
    memory = "64M"           --memory
    profile = "balanced"     --profile
    cache_mib, settle_seconds    as in stepfs.toml
    kill_every = 10          mean seconds between SIGKILLs
    remount_every = 20       umount and mount again

    [[retention]]            as in stepfs.toml
    glob = "gamma-*/step_*.pt"
    keep_last = 3

    [[actor]]
    do = "save"              save, read, hold, remove, move, copy, rewrite, command
    name = "alpha"           in tables; of a saver, also its directories: alpha-a, alpha-b, ...
    count = 2                processes; readers also have `threads` in each
    period = 0.5             seconds between two steps, times a random factor of 0.5 to 1.5

The other keys of an actor belong to its class (savers.py, readers.py, users.py).
"""

import os
from dataclasses import dataclass, field

from . import readers, savers, users

try:
    import tomllib
except ImportError:  # Python 3.10; pytest brings it there
    import tomli as tomllib

ACTORS = {"save": savers.Save, "read": readers.Read, "hold": readers.Hold, "remove": users.Remove, "move": users.Move, "copy": users.Copy,
          "rewrite": users.Rewrite, "command": users.Command}  # fmt: skip
COMMON = {"do", "name", "count", "threads", "period", "nice"}
KEYS = {
    "save": {"folder", "model", "size", "dtype", "form", "how", "ranks", "iterations", "keep", "exact", "policy"},
    "read": {"how"}, "hold": {"files", "seconds"}, "remove": {"runs", "spare"}, "move": {"runs", "spare", "keep"}, "copy": {"keep"},
    "rewrite": {"runs", "spare"}, "command": {"which"},
}  # fmt: skip
DAEMON = {"passthrough", "memory", "profile", "cache_mib", "settle_seconds", "kill_every", "remount_every"}
TOP = {"seconds", "seed", "originals", "daemon", "retention", "actor"}


class Wrong(ValueError):
    """The scenario file is invalid."""


@dataclass
class Scenario:
    name: str
    seconds: float
    seed: int
    originals: float
    daemon: dict
    retention: list
    actors: list
    # The directory of a run; set by the driver.
    store: str = ""
    scratch: str = ""
    text: str = field(default="", repr=False)

    def slots(self):
        """One for each thread of each process."""
        return sum(a.get("count", 1) * a.get("threads", 1) for a in self.actors)

    def settings(self):
        """Lines for stepfs.toml: (those of the top level, by key; the rest)."""
        top = {key: self.daemon[key] for key in ("cache_mib", "settle_seconds") if key in self.daemon}
        words = lambda value: f'"{value}"' if isinstance(value, str) else str(value)
        rules = ["\n[[retention]]\n" + "".join(f"{key} = {words(value)}\n" for key, value in rule.items()) for rule in self.retention]
        return top, "".join(rules)


def require(condition, words):
    if not condition:
        raise Wrong(words)


def unknown(table, known, where):
    require(not (left := table.keys() - known), f"{where}: unknown {', '.join(sorted(left))}; there are {', '.join(sorted(known))}")


def load(path, seconds=None, seed=None):
    with open(path, "rb") as f:
        text = f.read()
    said = tomllib.loads(text.decode())
    unknown(said, TOP, path)
    unknown(said.get("daemon", {}), DAEMON, f"{path}, [daemon]")
    actors = said.get("actor", [])
    require(actors, f"{path}: no [[actor]]")
    for actor in actors:
        kind = actor.get("do")
        require(kind in ACTORS, f"{path}: do = {kind!r}; there are {', '.join(ACTORS)}")
        actor.setdefault("name", kind)
        unknown(actor, COMMON | KEYS[kind], f"{path}, {actor['name']}")
        require(actor.get("count", 1) <= 10, f"{path}, {actor['name']}: at most 10 of a kind")
        require(actor.get("threads", 1) == 1 or kind == "read", f"{path}, {actor['name']}: threads are for readers")
    names = [actor["name"] for actor in actors]
    require(len(set(names)) == len(names), f"{path}: two actors have one name")
    return Scenario(os.path.splitext(os.path.basename(path))[0], seconds or said.get("seconds", 60), seed or said.get("seed", 1),
                    said.get("originals", 0.5), said.get("daemon", {}), said.get("retention", []), actors, text=text.decode())  # fmt: skip
