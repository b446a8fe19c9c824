"""Python's view of stepfs, the filesystem for training checkpoints.

Each function calls one command of the program ``stepfs`` and reads its ``--json`` answer; docs/PYTHON.md shows them in
use. Sizes are bytes, times are seconds since 1970. A path may be text, bytes or os.PathLike. It is a path in a mount
unless the function says otherwise. Each function raises :class:`Error` if its command fails. The program's notes go to
the logger ``stepfs``, as warnings.

    with stepfs.mount("ckpts.store", "ckpts") as directory:
        train(directory, resume=stepfs.latest(directory))
"""

import os
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Dict, Generator, List, Optional, Sequence, Tuple, Union, overload

from . import callbacks as callbacks
from ._program import AnyPath, Error, ask, ask_for_one, given, notes, path_of, run

__all__ = [
    "Change", "Checkpoint", "Diff", "Error", "Problem", "Status", "best", "callbacks", "convert", "diff", "latest", "ls",
    "merge", "mount", "pin", "status", "sync", "unpin", "why",
]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, or another file: a line of ``stepfs ls``."""

    path: Path
    """Absolute in a mount. Inside the store's tree if a store was named. Of a file in shards the numbers are ``*``."""
    files: Tuple[Path, ...]
    """Its files, one or more; as ``path``."""
    step: Optional[int]
    """The number in its path that counts training."""
    time: float
    """When it was modified, in seconds since 1970."""
    size: int
    """Bytes that programs read."""
    stored: int
    """Bytes that it takes in the store."""
    faithful: str
    """How faithful its worst file is, in the words of ``stepfs ls``: ``exact``, ``0.6 update``, ``CUT SHORT``..."""
    error_updates: Optional[float]
    """The largest error of a weight; 1 is as far as training moved that weight's tensor to the next checkpoint. 0 if all
    bytes are as written, None if it is unknown."""
    whole: bool
    """It is closed and readable, and has no less than the one before it."""
    best: bool
    """Its run states that it is the best one."""
    pinned: bool
    """A pin keeps it, or a part of it, as it is."""
    cut_short: Optional[str]
    """The reason if a file ends before its format says: its writer died."""
    damage: Optional[str]
    """The reason if a file cannot be read."""


@dataclass(frozen=True)
class Problem:
    """A problem of a store: its kind as in docs/COMMANDS.md, a sentence, and the next step or nothing."""

    kind: str
    says: str
    mend: str


@dataclass(frozen=True)
class Status:
    """The health of a store, its size, and the work left to do. Sizes are bytes."""

    store: Path
    mount: Optional[Path]
    """None if a store was named."""
    problems: Tuple[Problem, ...]
    """The worst first. Empty: nothing is wrong."""
    files: int
    released: int
    """Files that are decoded when they are read."""
    logical_bytes: int
    """Bytes that programs see."""
    stored_bytes: int
    """Bytes that the store takes."""
    free_bytes: int
    """Room on the store's disk; 0 if it is unknown."""
    queued: int
    """Steps of archiving that wait: the backlog."""
    busy: int
    """Files that wait for a handle to be closed."""
    settling: int
    """Files that wait for the rest of their checkpoint."""
    answer: Dict[str, Any] = field(repr=False)
    """All that the program said, such as ``answer["mirror"]``."""


@dataclass(frozen=True)
class Change:
    """How one tensor changed from A to B. The numbers are None for types that are no floats of 16 to 64 bits."""

    tensor: str
    dtype: str
    shape: Tuple[int, ...]
    role: str
    elements: int
    changed: int
    """Elements with other bits."""
    not_finite: Tuple[int, int]
    """Elements of A and of B that are not finite; they count in no number below."""
    rms: Optional[float]
    """Root mean square in A."""
    rms_of_change: Optional[float]
    relative: Optional[float]
    """The norm of the change divided by the norm in A."""
    cosine: Optional[float]
    largest_change: Optional[float]


@dataclass(frozen=True)
class Diff:
    """The difference of two checkpoints."""

    tensors: Tuple[Change, ...]
    """In both, with one type and shape: those with new values that are not finite, then the largest change first."""
    different: Tuple[str, ...]
    """Of another type or shape, in words."""
    only_in_a: Tuple[str, ...]
    only_in_b: Tuple[str, ...]


@contextmanager
def mount(
    store: AnyPath, directory: AnyPath, *, profile: Optional[str] = None, mirror: Optional[str] = None,
    memory: Union[int, str, None] = None, allow_other: bool = False, passthrough: bool = True,
    log: Union[str, "os.PathLike[str]", None] = None, options: Optional[str] = None,
) -> Generator[Path, None, None]:
    """Mounts a store, which it makes if there is none, and unmounts it at the end. Gives the directory's absolute path.

    A store that is mounted there already keeps its options, and stays mounted at the end; another profile raises Error. A
    mount stays, too, if a signal kills the process; closed files are safe. ``stepfs help mount`` explains the options;
    ``memory`` is bytes or a text such as ``"2G"``, ``options`` a list as in fstab. Let one process of a machine mount, and
    the others wait for it.

    Raises Error if it cannot be mounted, or if a program still uses it at the end: an open file, a mapping such as that
    of ``torch.load(mmap=True)``, a working directory. If the body raises, that exception goes on, and the logger
    ``stepfs`` tells of a failed unmount.
    """
    point = os.path.realpath(os.fsencode(directory))
    was_mounted, process = _is_mounted(store, point), os.getpid()
    chosen = given(profile=profile, mirror=mirror, memory=memory, allow_other=allow_other, no_passthrough=not passthrough,
                   log=log, options=options)
    run("mount", chosen, [store, directory])
    try:
        yield Path(os.path.abspath(os.fsdecode(directory)))
    except BaseException:
        try:
            _unmount(point, was_mounted, process)
        except Error as error:
            notes.warning("%s", error)
        raise
    _unmount(point, was_mounted, process)


def _is_mounted(store: AnyPath, point: bytes) -> bool:
    try:
        # A dead mount raises, and the next mount replaces it.
        return os.path.samefile(os.getxattr(point, "user.stepfs.store"), store)
    except OSError:
        return False


def _unmount(point: bytes, was_mounted: bool, process: int) -> None:
    # A forked process that leaves the body is not the one that mounted.
    if not was_mounted and os.getpid() == process:
        run("umount", [], [point])


def ls(path: AnyPath) -> List[Checkpoint]:
    """The checkpoints and other files at and below a path in a mount, or of a store. A path in a checkpoint has its files."""
    return ask("ls", [], [_local(path)], _checkpoints)


def _checkpoints(rows: Any) -> List[Checkpoint]:
    of: Dict[Path, List[Any]] = {}
    for row in rows:
        root = path_of(row, "mount") if "mount" in row else Path()
        of.setdefault(root / path_of(row["checkpoint"]), []).append({**row, "path": root / path_of(row)})
    return [_checkpoint(path, files[0]["checkpoint"], files) for path, files in of.items()]


def _checkpoint(path: Path, whole: Any, files: List[Any]) -> Checkpoint:
    errors = [0.0 if file["lossy"] == "0" else file["error_updates"] for file in files]
    return Checkpoint(
        path=path,
        files=tuple(file["path"] for file in files),
        step=whole["step"],
        time=whole["modified_ns"] / 1e9,
        size=sum(file["logical_bytes"] for file in files),
        stored=sum(file["stored_bytes"] for file in files),
        faithful=whole["faithful"],
        error_updates=None if None in errors else max(errors),
        whole=whole["is_whole"],
        best=any("best" in file or file["has_best_result"] for file in files),
        pinned=any(file["pinned"] for file in files),
        cut_short=next((file["cut_short"] for file in files if "cut_short" in file), None),
        damage=next((file["damage"] for file in files if "damage" in file), None),
    )


@overload
def status(path: AnyPath) -> Status: ...
@overload
def status(path: None = None) -> List[Status]: ...
def status(path: Optional[AnyPath] = None) -> Union[Status, List[Status]]:
    """The status of a store, or of the mount that a path leads through. Without a path: of all mounts that this user may ask.

    Of all mounts, one whose daemon does not answer within 10 seconds has a problem of the kind ``silent``.
    """
    if path is None:
        return ask("status", [], [], lambda rows: [_status(row) for row in rows])
    return ask("status", [], [_local(path)], _status)


def _local(path: AnyPath) -> AnyPath:
    if b"://" in os.fsencode(path):
        raise Error(f"{os.fsdecode(path)} is a mirror; name a path in a mount, or a store")
    return path


def _status(row: Any) -> Status:
    plain = ("files", "released", "logical_bytes", "stored_bytes", "free_bytes", "queued", "busy", "settling")
    return Status(
        store=path_of(row, "store"),
        mount=path_of(row, "mount") if row["mount"] else None,
        problems=tuple(Problem(problem["kind"], problem["says"], problem["mend"]) for problem in row["problems"]),
        answer=row,
        **{name: row[name] for name in plain},
    )


def latest(directory: AnyPath) -> Optional[Path]:
    """The newest whole checkpoint to go on from, at or below a directory in a mount, below the path as given, or None.

    So ``None`` means that a run begins anew. A directory that does not exist, or is in no mount, raises Error: a mount
    that is missing must not look like a new run.
    """
    return ask_for_one("latest", directory)


def best(directory: AnyPath) -> Optional[Path]:
    """The best checkpoint as the run's own files, links or names state it, like :func:`latest`. None if nothing states it.

    Raises Error if several runs state one, or if the best one is not whole.
    """
    return ask_for_one("best", directory)


def pin(path: AnyPath) -> None:
    """Keeps a file, or all files below a directory, exactly as they are; no rule of retention removes them."""
    run("pin", [], [path])


def unpin(path: AnyPath) -> None:
    """Removes a pin. Raises Error if the path has none of its own."""
    run("unpin", [], [path])


def sync(path: AnyPath, *, mirror: bool = False) -> None:
    """Waits until every file of the mount is archived that may be; with ``mirror``, until the mirror has everything, too."""
    run("sync", given(mirror=mirror), [path])


def why(path: AnyPath) -> Dict[Path, str]:
    """Of each file at and below a path: why it is exact, lossy, or as it was written, and the next step."""
    return ask("why", [], [path], lambda rows: {path_of(row): str(row["why"]) for row in rows})


def diff(a: AnyPath, b: AnyPath) -> Diff:
    """The change of each tensor from checkpoint A to B. Each is a path anywhere, ``STORE:PATH`` or ``URL:PATH``."""
    return ask("diff", [], [a, b], _diff)


def _change(tensor: Any) -> Change:
    row: Dict[str, Any] = {**tensor, "shape": tuple(tensor["shape"]), "not_finite": tuple(tensor["not_finite"])}
    return Change(**{each.name: row[each.name] for each in fields(Change)})


def _diff(row: Any) -> Diff:
    tensors = tuple(_change(tensor) for tensor in row["tensors"])
    return Diff(tensors, tuple(row["different"]), tuple(row["only_in_a"]), tuple(row["only_in_b"]))


def merge(
    paths: Sequence[AnyPath], out: AnyPath, *, weights: Optional[Sequence[float]] = None, ema: Optional[float] = None,
    decay: bool = False,
) -> Path:
    """Writes one checkpoint with the averaged weights of several, oldest first, and gives its path.

    They count alike, or by ``weights``; with ``ema`` each counts that share of the next; ``decay`` stands for a learning
    rate that decays. Each is a path anywhere, ``STORE:PATH`` or ``URL:PATH``. ``out`` must not exist. It appears when it
    is complete and durable, or not at all.
    """
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise TypeError("paths is a list of checkpoints, not one path")
    shares = None if weights is None else ",".join(str(float(weight)) for weight in weights)
    run("merge", [_out(out), *given(weights=shares, ema=ema, decay=decay)], paths)
    return Path(os.fsdecode(out))


def convert(
    source: AnyPath, out: AnyPath, *, to: Optional[str] = None, only: Optional[str] = None, dtype: Optional[str] = None,
    prefix: Optional[str] = None, strip_prefix: Optional[str] = None, shard: Union[int, str, None] = None,
) -> Path:
    """Writes the tensors of a checkpoint in another format, and gives the new path, which must not exist.

    ``to`` is ``torch``, ``safetensors`` or ``dcp``, by default as the name of ``out`` tells. ``only="weights"`` leaves
    the optimizer out. ``dtype`` is ``bf16``, ``f16`` or ``f32``. ``shard`` is the most bytes of a file, or a text such as
    ``"5G"``. Nothing in ``source`` is executed, so values that are no tensors stay behind.
    """
    chosen = given(to=to, only=only, dtype=dtype, prefix=prefix, strip_prefix=strip_prefix, shard=shard)
    run("convert", [_out(out), *chosen], [source])
    return Path(os.fsdecode(out))


def _out(out: AnyPath) -> str:
    # Not as the next word: the path may begin with `-`.
    return f"--out={os.fsdecode(out)}"
