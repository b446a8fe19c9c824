#!/usr/bin/env python3
"""Writes hdf5/NAME, hdf5/expected.json and hdf5_pairs/NAME.before and .after: files of h5py and Keras. The layout is that of
`make_formats.py`. Needs h5py, keras and torch.
"""

import io
import json
import os
import struct
import zipfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"
import h5py
import keras
import numpy as np

HERE = Path(__file__).parent / "hdf5"
PAIRS = Path(__file__).parent / "hdf5_pairs"
expected = {}

DTYPES = {"<f4": "F32", "<f2": "F16", "<f8": "F64", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8", "|u1": "U8",
          "<u2": "U16", "<u4": "U32", "<u8": "U64"}


def role_of(path, dtype):
    if path.startswith("optimizer"):
        return "optimizer"
    return "other" if dtype.kind != "f" or path.split("/")[-1].startswith("moving_") else "weight"


def parts(dataset):
    """Offset, shape and, for a chunk, its offsets in the tensor."""
    if not dataset.chunks:
        if dataset.id.get_offset() is not None:
            yield dataset.id.get_offset(), dataset.shape, None
        return
    for number in range(dataset.id.get_num_chunks()):
        info = dataset.id.get_chunk_info(number)
        if all(at + size <= dim for at, size, dim in zip(info.chunk_offset, dataset.chunks, dataset.shape)):
            yield info.byte_offset, dataset.chunks, info.chunk_offset if dataset.chunks != dataset.shape else None


def list_hdf5(name, kind="hdf5", data=None, start=0, unnoticed=()):
    """Expected tensors of a file, by ascending offset; those below `unnoticed` are left out."""
    tensors, by_offset = [], {}

    def visit(path, dataset):
        if not isinstance(dataset, h5py.Dataset) or dataset.dtype.str not in DTYPES or path.startswith(unnoticed) and unnoticed:
            return
        for offset, shape, chunk in parts(dataset):
            where = "" if chunk is None else "[" + ",".join(map(str, chunk)) + "]"
            tensors.append({"path": path + where, "aliases": [], "dtype": DTYPES[dataset.dtype.str], "shape": list(shape),
                            "offset": start + offset, "role": role_of(path, dataset.dtype)})

    with h5py.File(data or HERE / name) as file:
        # Every link, also the second one to an object.
        def walk(group, prefix, above):
            for key in group:
                if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                    continue
                item, path = group[key], prefix + key
                visit(path, item)
                if isinstance(item, h5py.Group) and item.id not in above:
                    walk(item, path + "/", [*above, item.id])
        walk(file, "", [file.id])
    for tensor in tensors:
        first = by_offset.setdefault(tensor["offset"], tensor)
        if first is not tensor:
            first["aliases"].append(tensor["path"])
    expected[name] = {"kind": kind, "tensors": [by_offset[k] for k in sorted(by_offset)]}


def member(data, name="model.weights.h5"):
    """The offset of a zip's record, and its bytes."""
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        info = z.getinfo(name)
        start = info.header_offset + 30 + sum(struct.unpack("<HH", data[info.header_offset + 26:info.header_offset + 30]))
        return start, z.read(name)


def trained(optimizer):
    """Several layers of one shape: only their order tells whose moments are whose."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(5), keras.layers.BatchNormalization(),
                              keras.layers.Dense(5), keras.layers.Dropout(0.1), keras.layers.Dense(5)])
    model.compile(optimizer=optimizer, loss="mse")
    rng = np.random.default_rng(1)
    model.fit(rng.random((32, 4)), rng.random((32, 5)), epochs=2, verbose=0)
    return model


def keras_files():
    made = {"adam": keras.optimizers.Adam(1e-2), "adamw": "adamw", "amsgrad": keras.optimizers.Adam(amsgrad=True), "sgd": "sgd",
            "named": keras.optimizers.Adam(name="mine"), "lamb": keras.optimizers.Lamb(name="adam")}
    for stem, optimizer in made.items():
        keras.utils.clear_session()
        model = trained(optimizer)
        names = {"adam": [".keras", ".weights.h5", ".h5"], "adamw": [".keras"]}.get(stem, [".keras", ".weights.h5"])
        for name in (stem + ending for ending in names):
            (model.save_weights if name.endswith(".weights.h5") else model.save)(HERE / name)
            if name.endswith(".keras"):
                start, data = member((HERE / name).read_bytes())
                list_hdf5(name, "keras", io.BytesIO(data), start)
            else:
                list_hdf5(name)


def built_in_another_order():
    """Layers whose parts are written in the order of their names, and built in another."""
    keras.utils.clear_session()
    start = above = keras.layers.Input((3, 8))
    for _ in range(2):
        above = keras.layers.MultiHeadAttention(2, 4)(above, above)
    above = keras.layers.Bidirectional(keras.layers.SimpleRNN(2))(above)
    model = keras.Model(start, above)
    model.compile(optimizer="adam", loss="mse")
    rng = np.random.default_rng(1)
    model.fit(rng.random((16, 3, 8)), rng.random((16, 4)), verbose=0)
    model.save_weights(HERE / "built.weights.h5")
    list_hdf5("built.weights.h5")


def h5py_files():
    rng = np.random.default_rng(2)
    some = lambda *shape: rng.standard_normal(shape).astype("<f4")
    with h5py.File(HERE / "types.h5", "w") as f:
        for number, dtype in enumerate(DTYPES):
            f[f"of/{number}"] = (some(3, 4) * 9).astype(dtype)
        f["scalar"], f["text"], f["big"], f["empty"] = np.float32(2.5), "words", np.arange(4, dtype=">f4"), np.empty((0, 3), "<f4")
        f["fields"] = np.zeros(3, [("a", "<f4"), ("b", "<i2")])
        f["flags"], f["complex"] = np.array([True, False]), np.zeros(3, "<c8")
        f["nothing"] = h5py.Empty("<f4")
        f.create_dataset("unwritten", (5, 5), "<f4")
        # Such a name makes its group one of the newer kind.
        f["newer/w\u00e9ight"] = some(2, 2)
    list_hdf5("types.h5")
    # Many links in a group make a tree of more than one node; links of all kinds, and a cycle.
    with h5py.File(HERE / "groups.h5", "w") as f:
        for number in range(70):
            f[f"many/dense_{number}/kernel"] = some(2, 2)
        f["again"] = f["many/dense_7/kernel"]
        f["many/cycle"] = f["/"]
        f["soft"], f["far"] = h5py.SoftLink("/again"), h5py.ExternalLink("other.h5", "/x")
    list_hdf5("groups.h5")
    for version in ("earliest", "v108", "latest"):
        name = f"chunks.{version}.h5"
        with h5py.File(HERE / name, "w", libver=(version, "latest")) as f:
            f["plain/kernel"] = some(6, 4)
            f.create_dataset("one/kernel", data=some(6, 4), chunks=(6, 4))
            f.create_dataset("grid/kernel", data=some(6, 10), chunks=(3, 4))
            f.create_dataset("line", data=rng.integers(0, 9, 50), chunks=(10,))
            early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            early.set_chunk((2, 5))
            early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            space = h5py.h5s.create_simple((6, 10))
            h5py.h5d.create(f.id, b"early", h5py.h5t.IEEE_F32LE, space, early)
            f["early"][:] = some(6, 10)
            f.create_dataset("grows", data=some(6, 4), chunks=(3, 4), maxshape=(None, 4))
            compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            compact.set_layout(h5py.h5d.COMPACT)
            h5py.h5d.create(f.id, b"compact", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((3,)), compact)
            f["compact"][:] = some(3)
            f["dense/few"] = some(3)
            for number in range(12):
                f[f"dense/more/{number}"] = some(3)
        # Trees of the second version, and links in a heap.
        list_hdf5(name, unnoticed={"earliest": (), "v108": ("dense/more/",), "latest": ("grows", "dense/more/")}[version])
    filtered = {"gzip": {"compression": "gzip"}, "checked": {"fletcher32": True}}
    for stem, options in filtered.items():
        with h5py.File(HERE / f"{stem}.h5", "w") as f:
            f.create_dataset("w/kernel", data=some(20, 20), **options)
    with h5py.File(HERE / "mixed.h5", "w") as f:
        f["plain/kernel"] = some(5, 5)
        f.create_dataset("w/kernel", data=some(20, 20), compression="gzip", shuffle=True)


def pairs():
    """Two files that differ in a few tensors; zipfile is the reference for the CRC."""
    before = (HERE / "adam.keras").read_bytes()
    start, data = member(before)
    tensors = {t["path"]: t for t in expected["adam.keras"]["tensors"]}
    out = bytearray(data)
    for path in ("layers/dense/vars/0", "layers/dense_2/vars/0", "optimizer/vars/10"):
        offset = tensors[path]["offset"] - start
        out[offset:offset + 8] = b"\x01\x02\x03\x3d\x04\x05\x06\x3d"
    after = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(before)) as old, zipfile.ZipFile(after, "w") as new:
        for info in old.infolist():
            new.writestr(info, bytes(out) if info.filename == "model.weights.h5" else old.read(info))
    # Written again, so that both have the same headers.
    again = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(before)) as old, zipfile.ZipFile(again, "w") as new:
        for info in old.infolist():
            new.writestr(info, old.read(info))
    for label, zipped, plain in (("before", again.getvalue(), data), ("after", after.getvalue(), bytes(out))):
        (PAIRS / f"keras.{label}").write_bytes(zipped)
        (PAIRS / f"h5.{label}").write_bytes(plain)


if __name__ == "__main__":
    for folder in (HERE, PAIRS):
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
    keras_files()
    built_in_another_order()
    h5py_files()
    pairs()
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(expected.items())]
    (HERE / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
