"""Finds and calls the program ``stepfs``."""

import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence, TypeVar, Union

AnyPath = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
T = TypeVar("T")

# The program's notes, such as "newer, but not whole". Without a handler Python prints them to standard error.
notes = logging.getLogger("stepfs")


class Error(RuntimeError):
    """A command of stepfs failed. The text is the program's message, with its next step.

    ``code`` is the program's exit code: 1 failed, 2 wrong usage, 3 damage found. It is minus the number of the signal
    that ended the program. It is None if the program was not found, could not start, or is of another version. ``output``
    is the text that the program printed to standard output, as bytes.
    """

    def __init__(self, message: str, code: Optional[int] = None, output: bytes = b"") -> None:
        super().__init__(message)
        self.code = code
        self.output = output


def program() -> str:
    """The path of the program: beside the interpreter, where pip puts scripts, or on ``PATH``.

    Raises Error, which names the places, if it is at none of them.
    """
    places = [
        os.path.dirname(sys.executable or ""),
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", f"{os.name}_user"),
        # Of `pip install --target`.
        os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bin"),
    ]
    places = list(dict.fromkeys(place for place in places if place))
    found = shutil.which("stepfs", path=os.pathsep.join(places)) or shutil.which("stepfs")
    if found is None:
        looked = ", ".join(places)
        raise Error(f"no program stepfs in {looked}, nor on PATH ({os.environ.get('PATH', '')}); `pip install` its wheel")
    return found


def run(command: str, options: Sequence[str], paths: Sequence[AnyPath]) -> bytes:
    """The output of ``stepfs COMMAND OPTIONS -- PATHS``. The program's notes go to the logger ``stepfs``."""
    path = program()
    # After `--` no path is taken for an option.
    words: List[AnyPath] = [path, command, *options, "--", *paths]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as why:
        raise Error(f"{path} cannot be run: {why}") from why
    said = done.stderr.decode("utf-8", "backslashreplace").strip()
    lines = [line[len("stepfs: ") :] if line.startswith("stepfs: ") else line for line in said.splitlines()]
    if done.returncode != 0:
        message = "\n".join(lines) or f"`stepfs {command}` ended with code {done.returncode}"
        raise Error(message, done.returncode, done.stdout)
    for line in lines:
        notes.warning("%s", line)
    return done.stdout


def ask(command: str, options: Sequence[str], paths: Sequence[AnyPath], read: Callable[[Any], T]) -> T:
    """The answer of ``stepfs COMMAND --json``, as ``read`` makes it of the JSON."""
    return understand(command, run(command, [*options, "--json"], paths), read)


def ask_for_one(command: str, directory: AnyPath) -> Optional[Path]:
    """The path that ``latest`` or ``best`` answers. None if there is none: then the program says null, and fails."""
    try:
        return ask(command, [], [directory], path_of)
    except Error as error:
        if error.code == 1 and error.output.strip() == b"null":
            notes.info("%s", error)
            return None
        raise


def understand(command: str, answer: bytes, read: Callable[[Any], T]) -> T:
    try:
        return read(json.loads(answer))
    except (AttributeError, KeyError, TypeError, ValueError) as why:
        message = f"{program()} answers `stepfs {command} --json` in another form than this package reads"
        raise Error(f"{message} ({why!r}); install the wheel again, which has both") from why


def path_of(row: Any, name: str = "path") -> Path:
    """A path of a JSON answer. Beside a name that is not UTF-8 stand its bytes, in hexadecimal."""
    other = row.get(f"{name}_bytes")
    return Path(os.fsdecode(bytes.fromhex(other) if other else row[name].encode()))


def given(**options: Any) -> List[str]:
    """The options of a command line: ``name=value`` of each that is given. True stands for an option without value."""
    words: List[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words.append(f"{flag}={value}")
    return words
