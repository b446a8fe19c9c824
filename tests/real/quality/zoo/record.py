"""Prints the table of docs/ZOO.md, with two more columns: the harm that the program in STEPFS_BIN does to each animal.

    STEPFS_BIN=... PYTHONPATH=../support python -m zoo.record [NAME...]      (in tests/real/quality, after scripts/setup.sh)
"""

import shutil
import sys

from harness import make_base, open_mount

from .keeper import ANIMALS, Zoo, breach


def describe(name):
    """The columns of docs/ZOO.md."""
    kind = ANIMALS[name]
    return f"| {name} | `{kind.pattern.replace('{}', 'N')}` | {kind.__doc__.splitlines()[0]} |"


def shorten(paths):
    """Names of tensors, at most three of them."""
    names = [f"`{path}`" for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def harm(zoo, name):
    """The tensors that became lossy without a proof, and the first harm in use; each empty if there is none."""
    changed = zoo.changed(name)
    without = list(dict.fromkeys(path for _, path, _, _ in changed if not zoo.may_change(name, path)))
    try:
        zoo.use(name)
        seen = ""
    except AssertionError as error:
        seen = str(error).splitlines()[0]
    broken = [(path, breach(was, now)) for _, path, was, now in changed]
    broken = [f"`{path}`: {what}" for path, what in broken if what]
    return shorten(without), seen or (broken[0] if broken else "")


def main(names):
    plain, mounts = make_base(), open_mount(True)
    try:
        zoo = Zoo(next(mounts), plain, names or ANIMALS)
        print("| animal | file | what it is | lossy without a proof | seen in use |\n|---|---|---|---|---|")
        for name in zoo.animals:
            without, seen = harm(zoo, name)
            print(f"{describe(name)} {without or 'nothing'} | {seen or 'no harm'} |", flush=True)
    finally:
        mounts.close()
        shutil.rmtree(plain)


if __name__ == "__main__":
    main(sys.argv[1:])
