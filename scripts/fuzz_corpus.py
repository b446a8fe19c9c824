#!/usr/bin/env python3
"""Keeps the fuzzer's inputs. A file takes a block of the disk, and most inputs have a hundred bytes. So a few inputs of each
target are files in fuzz/corpus, and the others lie in fuzz/packed/TARGET.tar.xz.

    scripts/fuzz_corpus.py unpack             writes the others into fuzz/corpus as packed-NAME; scripts/setup.sh calls it
    scripts/fuzz_corpus.py pack [TARGET...]   archives them; scripts/fuzz.sh --keep calls it

`cargo test` replays fuzz/corpus. git ignores packed-NAME.
"""

import io
import lzma
import pathlib
import sys
import tarfile

FUZZ = pathlib.Path(__file__).resolve().parent.parent / "fuzz"
PREFIX = "packed-"
# Inputs of each target that are files of their own.
FEW = 24


def archive(target):
    return FUZZ / "packed" / f"{target}.tar.xz"


def unpack():
    """Writes the missing inputs, and removes those of an older archive; returns the number of inputs written."""
    count = 0
    for path in sorted((FUZZ / "packed").glob("*.tar.xz")):
        folder = FUZZ / "corpus" / path.name.removesuffix(".tar.xz")
        folder.mkdir(parents=True, exist_ok=True)
        left = set(folder.glob(f"{PREFIX}*"))
        with tarfile.open(path) as packed:
            for member in packed:
                target = folder / f"{PREFIX}{pathlib.PurePosixPath(member.name).name}"
                left.discard(target)
                if not target.exists():
                    target.write_bytes(packed.extractfile(member).read())
                    count += 1
        for path in left:
            path.unlink()
    return count


def pack(target):
    """Keeps a few inputs of every length as files. The others go into the target's archive, and get the prefix."""
    folder = FUZZ / "corpus" / target
    plain = lambda path: path.name.removeprefix(PREFIX)
    inputs = sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: (path.stat().st_size, plain(path)))
    few = {inputs[at * (len(inputs) - 1) // (FEW - 1)] for at in range(FEW)} if len(inputs) > FEW else set(inputs)
    buffer = io.BytesIO()
    # Sorted by name and without times or owners, so that the same inputs make the same archive.
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as packed:
        for path in sorted(set(inputs) - few, key=plain):
            data = path.read_bytes()
            entry = tarfile.TarInfo(plain(path))
            entry.size = len(data)
            packed.addfile(entry, io.BytesIO(data))
    for path in inputs:
        path.rename(folder / (plain(path) if path in few else PREFIX + plain(path)))
    archive(target).parent.mkdir(exist_ok=True)
    if len(few) < len(inputs):
        archive(target).write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    else:
        archive(target).unlink(missing_ok=True)
    return len(few), len(inputs) - len(few)


def main():
    match sys.argv[1:]:
        case ["unpack"]:
            if count := unpack():
                print(f"unpacked {count} inputs of the fuzzer into fuzz/corpus")
        case ["pack", *targets]:
            unpack()
            for target in targets or sorted(path.name for path in (FUZZ / "corpus").iterdir() if path.is_dir()):
                few, packed = pack(target)
                print(f"{target:22} {few} files, {packed} packed")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
