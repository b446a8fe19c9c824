#!/usr/bin/env python3
"""Compare the profile `exact` with zstd -19, which has the previous checkpoint as its dictionary (`--patch-from`), and with
ZipNN.

Reads the series of checkpoints that scripts/resume_study.py trains (DIR/TASK/*.pt). For stepfs it counts every byte of objects
and stubs; for zstd and ZipNN the compressed file alone. ZipNN gets each tensor by itself, in its type, and the rest of the
file as it is, since it is made for that. The first file of a series has no file before it, and is left out. Weights: stepfs's
tensors of that role beside ZipNN's of the same tensors.
"""

import argparse
import io
import json
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/real/support")]

import harness  # noqa: E402
import zstandard  # noqa: E402
from zipnn import ZipNN  # noqa: E402

LEVEL = 19


def patch_from(before, data):
    """Bytes of `zstd -19 --patch-from`: a window over both files, long-distance matching on."""
    window = max(27, (len(before) + len(data)).bit_length())
    parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, window_log=min(window, zstandard.WINDOWLOG_MAX), enable_ldm=True)
    dictionary = zstandard.ZstdCompressionDict(before, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return len(zstandard.ZstdCompressor(dict_data=dictionary, compression_params=parameters).compress(data))


def zipnn(data, dtype):
    types = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    if dtype not in types or len(data) < 1024:
        return len(data)
    return min(len(data), len(ZipNN(input_format="byte", bytearray_dtype=types[dtype]).compress(bytearray(data))))


def tensors(path):
    """(role, type, first byte, length) of every tensor, as stepfs sees them."""
    rows = harness.run_json("inspect", "--json", path)["tensors"]
    return [(row["role"], row["dtype"], row["offset"], row["bytes"]) for row in rows]


def exact(files):
    """Bytes in the store for each file, and of its weights."""
    with tempfile.TemporaryDirectory(prefix="stepfs-exact-") as base:
        mount = harness.Mount(base)
        mount.mount().umount()
        settings = mount.store / "stepfs.toml"
        settings.write_text(settings.read_text().replace('default_profile = "balanced"', 'default_profile = "exact"'))
        mount.mount()
        try:
            for file in files:
                (mount / file.name).write_bytes(file.read_bytes())
            mount.sync()
            found = []
            rows = {Path(row["path"]).name: row for row in mount.ls()}
            for file in files[:-1]:
                weights = sum(row["stored_bytes"] or 0 for row in harness.run_json("inspect", "--json", mount / file.name)["tensors"]
                              if row["role"] == "weight")
                found.append((rows[file.name]["stored_bytes"], weights))
            return found
        finally:
            mount.close()


def weigh(files):
    stored = exact(files)
    total = dict.fromkeys(("raw", "stepfs", "zstd", "zipnn", "raw weights", "stepfs weights", "zipnn weights"), 0)
    for before, file, (whole, weights) in zip(files, files[1:-1], stored[1:]):
        data = file.read_bytes()
        known = tensors(file)
        per_tensor = [(role, size, zipnn(data[at : at + size], dtype)) for role, dtype, at, size in known]
        rest = len(data) - sum(size for _, size, _ in per_tensor)
        total["raw"] += len(data)
        total["stepfs"] += whole
        total["zstd"] += patch_from(before.read_bytes(), data)
        total["zipnn"] += rest + sum(packed for _, _, packed in per_tensor)
        total["raw weights"] += sum(size for role, size, _ in per_tensor if role == "weight")
        total["stepfs weights"] += weights
        total["zipnn weights"] += sum(packed for role, _, packed in per_tensor if role == "weight")
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw", type=Path, required=True, help="where resume_study.py keeps its series")
    parser.add_argument("--count", type=int, default=8, help="checkpoints of each series, from its middle on (default: 8)")
    parser.add_argument("--json", help="write the numbers here")
    parser.add_argument("tasks", nargs="*", help="(default: all series in DIR)")
    arguments = parser.parse_args()
    names = arguments.tasks or sorted(path.name for path in arguments.raw.iterdir() if list(path.glob("step_*.pt")))
    print("| series | stepfs exact | zstd -19 --patch-from | ZipNN | weights: stepfs | weights: ZipNN | weights smaller by |")
    print("|---|---|---|---|---|---|---|")
    results = {}
    for name in names:
        files = sorted((arguments.raw / name).glob("step_*.pt"))
        first = max(0, (len(files) - arguments.count) // 2)
        total = results[name] = weigh(files[first : first + arguments.count])
        share = lambda key, of="raw": f"{100 * total[key] / total[of]:.1f} %"  # noqa: E731
        gain = 1 - total["stepfs weights"] / total["zipnn weights"]
        print(f"| {name} | {share('stepfs')} | {share('zstd')} | {share('zipnn')} | {share('stepfs weights', 'raw weights')} | "
              f"{share('zipnn weights', 'raw weights')} | {100 * gain:.1f} % |", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
