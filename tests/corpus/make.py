#!/usr/bin/env python3
"""Writes the corpus of the container tests: small checkpoints by the real writers, hostile files, and the expected results. Needs
torch, numpy and safetensors; the tests themselves need none of them.

  good/NAME and good/expected.json   files, and their tensors as Python finds them; tensors of an optimizer have one common
  role
  pairs/NAME.before, NAME.after      the same checkpoint with a few tensors altered, both written by the same writer
  bad/NAME                           inputs that must end as opaque or sane

The expected offsets do not come from stepfs's reader: torch itself gives them, by loading into FakeTensors.
"""

import collections
import io
import json
import os
import pickle
import random
import struct
import sys
import zipfile
import zlib

import numpy as np
import safetensors.torch
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

HERE = os.path.dirname(os.path.abspath(__file__))
NAMES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.complex128: "C128", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}
expected = {}


def walk(value, path, out):
    """All tensors below a value: (path, tensor), in pickle order."""
    join = lambda part: f"{path}/{part}" if path else str(part)
    if isinstance(value, torch.Tensor):
        out.append((path or ".", value))
    elif isinstance(value, torch.nn.Module):
        for key, v in value.__dict__.items():
            walk(v, join(key), out)
    elif isinstance(value, collections.abc.Mapping):
        for key, v in value.items():
            walk(v, join(key), out)
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            walk(v, join(i), out)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        walk(vars(value), path, out)
    return out


def list_torch(name, role):
    """Expected tensors of a torch file; `role` maps a path to a role, by the writer of the checkpoint."""
    with FakeTensorMode():
        loaded = torch.load(os.path.join(HERE, "good", name), weights_only=False)
    found = {}
    for path, t in walk(loaded, "", []):
        storage = t.untyped_storage()
        if storage.nbytes() == 0:
            continue
        offset = storage._checkpoint_offset
        if offset in found:
            found[offset]["aliases"].append(path)
            continue
        numel = storage.nbytes() // t.element_size()
        # Dimensions in the order of the storage: a transposed matrix is one of columns and rows.
        if not t.is_contiguous():
            t = t.permute(sorted(range(t.dim()), key=lambda dim: -t.stride(dim)))
        whole = t.is_contiguous() and t.storage_offset() == 0 and t.numel() == numel
        found[offset] = {
            "path": path, "aliases": [], "dtype": NAMES[t.dtype], "shape": list(t.shape) if whole else [numel],
            "offset": offset, "role": role(path, t),
        }
    expected[name] = {"kind": "torch", "tensors": [found[k] for k in sorted(found)]}


def list_safetensors(name, role):
    """Expected tensors of a safetensors file, from its JSON."""
    with open(os.path.join(HERE, "good", name), "rb") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        header = json.loads(f.read(n))
    header.pop("__metadata__", None)
    tensors = [
        {"path": k, "aliases": [], "dtype": v["dtype"], "shape": v["shape"], "offset": 8 + n + v["data_offsets"][0],
         "role": role(k, v["dtype"])}
        for k, v in header.items() if v["data_offsets"][0] != v["data_offsets"][1]
    ]
    expected[name] = {"kind": "safetensors", "tensors": sorted(tensors, key=lambda t: t["offset"])}


def good(name):
    return os.path.join(HERE, "good", name)


def float_weight(path, t):
    return "weight" if t.is_floating_point() or t.is_complex() else "other"


def checkpoint_role(path, t):
    if path.split("/")[0].startswith("optimizer"):
        return "optimizer"
    last = path.split(".")[-1]
    if path.startswith(("model/", "state_dict/", "ema/")) and last not in ("running_mean", "running_var"):
        return float_weight(path, t)
    return "other"


def small_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))


def trained(model, cls=torch.optim.AdamW, **kw):
    optimizer = cls(model.parameters(), lr=1e-2, **kw)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    return optimizer


class Settings:
    """A class of the writer's own: stepfs must look through it without knowing it."""

    def __init__(self):
        self.name, self.centers = "x", torch.randn(4)


def torch_files():
    model = small_model()
    optimizer = trained(model)
    nested = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 200, "config": {"lr": 1e-2},
        "rng": {"torch": torch.get_rng_state()[:256].clone(), "python": random.Random(3).getstate(),
                "numpy": np.random.RandomState(3).get_state()},
        "scheduler": {"base_lrs": [1e-2], "last_epoch": 7},
    }
    torch.save(nested, good("nested.pt"))
    list_torch("nested.pt", checkpoint_role)
    for protocol in (2, 3, 4, 5):
        with open(good(f"protocol{protocol}.pt"), "wb") as f:
            junk = [1, -1, 1 << 70, 2.5, "é", b"bytes", bytearray(b"x"), {1, 2}, frozenset("a"), (1,), (1, 2, 3, 4), None,
                    True, collections.Counter("aab"), "long" * 500, range(3), complex(1, 2), -(1 << 40), [[], [[]]]]
            torch.save({"junk": junk, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, f,
                       pickle_protocol=protocol)
        list_torch(f"protocol{protocol}.pt", checkpoint_role)

    torch.manual_seed(2)
    w = torch.randn(8, 4)
    tied = {"emb.weight": w, "head.weight": w, "again.weight": w[:], "base.weight": torch.randn(6, 6)}
    base = torch.randn(10, 3)
    tied |= {"row.weight": base[2], "all.weight": base, "turned.weight": torch.randn(3, 5).t()}
    torch.save({"model": tied}, good("tied.pt"))
    list_torch("tied.pt", lambda p, t: "weight")

    kinds = {}
    for dtype in NAMES:
        kinds[f"w.{NAMES[dtype]}"] = (torch.randn(3, 4) * 20).to(dtype)
    kinds["empty"] = torch.empty(0, 3)
    kinds["scalar"] = torch.tensor(1.5)
    torch.save(kinds, good("dtypes.bin"))
    list_torch("dtypes.bin", float_weight)

    sys.modules["corpus_models"] = sys.modules["__main__"]
    whole = small_model()
    whole.extra = Settings()
    torch.save(whole, good("module.pth"))
    list_torch("module.pth", lambda p, t: "weight" if "_parameters/" in p else "other")

    net = torch.nn.Linear(3, 3)
    trainer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.save({"trainer": trainer, "net": net}, good("objects.pt"))
    list_torch("objects.pt", lambda p, t: "weight")

    mask = {"w.weight": torch.randn(30, 30), "w.mask": torch.ones(7, 7)}
    slots = {0: {"step": torch.tensor(1.0), "exp_avg": torch.randn(30, 30), "exp_avg_sq": torch.randn(30, 30)}}
    torch.save({"model": mask, "optimizer": {"state": slots, "param_groups": [{"params": [0]}]}}, good("mask.pt"))
    list_torch("mask.pt", checkpoint_role)

    lightning = {
        "epoch": 0, "global_step": 8, "pytorch-lightning_version": "2.6.6", "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.25)}},
        "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [{"last_epoch": 1}],
        "hparams_name": "kwargs", "hyper_parameters": {"n": 3},
    }
    buffer = io.BytesIO()
    torch.save(lightning, buffer)
    open(good("lightning.ckpt"), "wb").write(buffer.getvalue())
    list_torch("lightning.ckpt", checkpoint_role)

    sgd = trained(small_model(), torch.optim.SGD, momentum=0.9)
    torch.save(sgd.state_dict(), good("sgd.pt"))
    list_torch("sgd.pt", lambda p, t: "optimizer")

    hand = {
        "params": {"a": torch.randn(4, 4), "b": torch.randn(4)}, "v": {"a": torch.randn(4, 4)}, "m": {"a": torch.randn(4, 4), "b": torch.randn(4)},
        "theta2": {"a": torch.randn(4, 4), "b": torch.randn(4)}, "history": {"loss_curve": torch.randn(9)},
        "list": [torch.randn(3), torch.nn.Parameter(torch.randn(5))], "mixed": {"n": 1, "x": torch.randn(3)},
        "replay": {"obs": torch.randn(7, 2)}, 3: {0: torch.randn(2, 2)}, "flat": {"param": torch.randn(4), "exp_avg": torch.randn(4)}, "a/b": {"c": torch.randn(2)},
        "a": {"b": {"c": torch.randn(3)}}, ("k", 1): torch.randn(6),
    }
    roles = {"params/a": "weight", "params/b": "weight", "m/a": "optimizer", "v/a": "optimizer", "list/1": "weight",
             "a/b/c": "weight"}
    torch.save(hand, good("handwritten.pt"))
    list_torch("handwritten.pt", lambda p, t: roles.get(p, "other"))
    rename(good_list("handwritten.pt"), {("('k', 1)", 0): "(k,1)", ("a/b/c", 1): "a/b/c#2"})

    marked, parameter = torch.randn(3, 2), torch.nn.Parameter(torch.randn(2))
    marked.mark = parameter.mark = "attributes change how a tensor is pickled"
    torch.save({"model": {"w": marked, "p": parameter}}, good("attributes.pt"))
    list_torch("attributes.pt", checkpoint_role)

    # Tensors of several storages, and storages without a tensor: known by their persistent ids only.
    odd = {"sparse": torch.eye(3).to_sparse(), "quantized": torch.quantize_per_tensor(torch.randn(6), 0.1, 0, torch.qint8),
           "untyped": torch.UntypedStorage(8), "typed": torch.FloatStorage(4)}
    torch.save(odd, good("odd.pt"))
    found = [("sparse/args/1/0", "I64", [2, 3]), ("sparse/args/1/1", "F32", [3]), ("quantized/args/0", "I8", [6]),
             ("untyped", "U8", [8]), ("typed", "F32", [4])]
    at = offsets("odd.pt")
    expected["odd.pt"] = {"kind": "torch", "tensors": [
        {"path": path, "aliases": [], "dtype": dtype, "shape": shape, "offset": at[f"data/{i}"], "role": "other"}
        for i, (path, dtype, shape) in enumerate(found)]}

    torch.save(torch.randn(5, 5), good("tensor.pt"))
    list_torch("tensor.pt", lambda p, t: "other")

    torch.serialization.set_crc32_options(False)
    torch.save({"model": model.state_dict()}, good("nocrc.pt"))
    torch.serialization.set_crc32_options(True)
    list_torch("nocrc.pt", checkpoint_role)

    for name, craft in CRAFTED.items():
        open(good(name), "wb").write(craft(open(good("tied.pt"), "rb").read()))
        # FakeTensors support only torch's own layout: the same tensors, at the offsets that zipfile finds.
        keys = {offset: key for key, offset in offsets("tied.pt").items()}
        moved = offsets(name)
        tensors = [dict(t, offset=moved[keys[t["offset"]]]) for t in good_list("tied.pt")]
        expected[name] = {"kind": "torch", "tensors": tensors}


def offsets(name):
    """Offset of each record's payload."""
    data = open(good(name), "rb").read()
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        heads = {i.filename: i.header_offset for i in z.infolist()}
    after = lambda at: at + 30 + sum(struct.unpack("<HH", data[at + 26:at + 30]))
    return {name.split("/", 1)[1]: after(at) for name, at in heads.items()}


def good_list(name):
    return expected[name]["tensors"]


def rename(tensors, names):
    """Paths that stepfs spells its own way: tuples as keys, and paths that are taken already."""
    seen = collections.Counter()
    for t in tensors:
        key = (t["path"], seen[t["path"]])
        seen[t["path"]] += 1
        t["path"] = names.get(key, t["path"])


def safetensors_files():
    torch.manual_seed(4)
    mixed = {"h.0.weight": torch.randn(4, 3), "h.0.bias": torch.randn(3).half(), "b": torch.randn(2, 2).bfloat16(),
             "d": torch.randn(3).double(), "i": torch.arange(5), "flag": torch.tensor([True, False]),
             "f8": torch.randn(4).to(torch.float8_e4m3fn), "u16": torch.arange(4).to(torch.uint16),
             "empty": torch.empty(0, 2), "h.0.exp_avg": torch.randn(4, 3), "bn.running_mean": torch.randn(3),
             "scalar": torch.tensor(2.0), "é\n": torch.randn(2), "c": torch.randn(2).to(torch.complex64)}
    safetensors.torch.save_file(mixed, good("mixed.safetensors"), {"format": "pt"})
    os.chmod(good("mixed.safetensors"), 0o644)
    role = {"h.0.exp_avg": "other", "bn.running_mean": "other"}
    list_safetensors("mixed.safetensors",
                     lambda k, d: role.get(k, "weight" if d.startswith(("F", "BF", "C")) else "other"))


# Zips as other tools write them, from the records of a torch file.


def records(data):
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        return [(i.filename, z.read(i)) for i in z.infolist()]


def python_zip(data, **kw):
    """Python's zipfile: sizes and CRC in the local header, no descriptors."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **kw) as z:
        for name, payload in records(data):
            with z.open(zipfile.ZipInfo(name), "w", force_zip64=kw.get("allowZip64", False)) as f:
                f.write(payload)
    return out.getvalue()


def hand_zip(data, *, zip64=False, signature=True, local_crc=False, comment=b""):
    """Torch's layout with descriptors of each form; with `zip64` all sizes and offsets are 64 bits wide."""
    out, entries = bytearray(), []
    for name, payload in records(data):
        name, crc, n, at = name.encode(), zlib.crc32(payload), len(payload), len(out)
        pad = b"FB" + struct.pack("<H", p := -(at + 30 + len(name) + 4) % 64) + b"Z" * p
        out += struct.pack("<IHHHHHIIIHH", 0x04034B50, 0, 0x808, 0, 0, 0, crc if local_crc else 0, 0, 0, len(name), len(pad))
        out += name + pad + payload
        out += b"PK\7\10" if signature else b""
        out += struct.pack("<IQQ" if zip64 else "<III", crc, n, n)
        entries.append((name, crc, n, at))
    start = len(out)
    for name, crc, n, at in entries:
        extra = struct.pack("<HHQQQ", 1, 24, n, n, at) if zip64 else b""
        size, offset = (0xFFFFFFFF, 0xFFFFFFFF) if zip64 else (n, at)
        out += struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 0, 0, 0x808, 0, 0, 0, crc, size, size, len(name), len(extra), 0,
                           0, 0, 0, offset) + name + extra
    length, at64, k = len(out) - start, len(out), len(entries)
    if zip64:
        out += struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, k, k, length, start)
        out += struct.pack("<IIQI", 0x07064B50, 0, at64, 1)
        k, length, start = 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF
    out += struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, k, k, length, start, len(comment)) + comment
    return bytes(out)


CRAFTED = {
    "python.zip.pt": python_zip,
    "python64.zip.pt": lambda d: python_zip(d, allowZip64=True),
    "zip64.pt": lambda d: hand_zip(d, zip64=True, comment=b"a comment"),
    "unsigned.pt": lambda d: hand_zip(d, signature=False, local_crc=True),
}


def pairs():
    """Two files that differ in a few tensors; the writer is the reference for every other byte."""
    torch.manual_seed(5)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    before = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ids": torch.arange(9)}

    def altered():
        out = io.BytesIO()
        torch.save(before, out)
        new = torch.load(io.BytesIO(out.getvalue()), weights_only=False)
        new["model"]["weight"] += 0.5
        new["model"]["bias"].zero_()
        new["optimizer"]["state"][0]["momentum_buffer"] *= 2
        return new

    def write(value, crc=True):
        out = io.BytesIO()
        torch.serialization.set_crc32_options(crc)
        torch.save(value, out)
        torch.serialization.set_crc32_options(True)
        return out.getvalue()

    after = altered()
    writers = {"torch": write, "nocrc": lambda v: write(v, False)}
    for name, craft in CRAFTED.items():
        writers[name] = lambda v, craft=craft: craft(write(v))
    for name, writer in writers.items():
        for label, value in (("before", before), ("after", after)):
            open(os.path.join(HERE, "pairs", f"{name}.{label}"), "wb").write(writer(value))
    path = os.path.join(HERE, "pairs", "bypath.before")
    torch.save(before, path)
    torch.save(after, os.path.join(HERE, "pairs", "bypath.after"))


# Hostile inputs.


def torch_zip(pickled, storages=(), extra=()):
    """A zip of torch's layout around a given pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, data in [("archive/data.pkl", pickled), ("archive/byteorder", b"little"),
                           *((f"archive/data/{k}", v) for k, v in storages), *extra, ("archive/version", b"3\n")]:
            z.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def op_str(s):
    return b"X" + struct.pack("<I", len(s.encode())) + s.encode()


def op_tensor(key, numel, shape=None, cls="FloatStorage"):
    """Opcodes that push a tensor."""
    ints = lambda v: b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", i) for i in v) + b"t"
    shape = (numel,) if shape is None else shape
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = min(strides[i + 1] * shape[i + 1], 1 << 62)
    return (b"ctorch._utils\n_rebuild_tensor_v2\n((" + op_str("storage") + b"ctorch\n" + cls.encode() + b"\n" + op_str(key)
            + op_str("cpu") + b"\x8a\x08" + struct.pack("<q", numel) + b"tQK\0" + ints(shape) + ints(strides)
            + b"\x89ccollections\nOrderedDict\n)RtR")


def op_dict(pairs):
    return b"}(" + b"".join(op_str(k) + v for k, v in pairs) + b"u"


def bad():
    out = {}
    nested = open(good("tied.pt"), "rb").read()
    end = nested.rindex(b"PK\5\6")
    directory = struct.unpack("<I", nested[end + 16:end + 20])[0]
    out["empty.pt"] = b""
    out["one-byte.pt"] = b"P"
    out["magic-only.pt"] = b"PK\3\4"
    legacy = io.BytesIO()
    torch.save({"w": torch.ones(3)}, legacy, _use_new_zipfile_serialization=False)
    out["legacy.pt"] = legacy.getvalue()
    out["text.pt"] = b"this is no checkpoint, whatever its name says\n" * 3
    out["truncated-payload.pt"] = nested[:1500]
    out["truncated-directory.pt"] = nested[:directory + 40]
    out["truncated-end.pt"] = nested[:-1]
    out["trailing.pt"] = nested + b"\0"
    out["prepended.pt"] = b"PK\3\4" + nested

    def edit(data, at, fmt, value):
        return data[:at] + struct.pack(fmt, value) + data[at + struct.calcsize(fmt):]

    simple = hand_zip(nested)
    e = simple.rindex(b"PK\5\6")
    d = struct.unpack("<I", simple[e + 16:e + 20])[0]
    starts = [i for i in range(d, e) if simple[i:i + 4] == b"PK\1\2"]
    second = starts[1]
    out["count-lies.pt"] = edit(edit(simple, e + 8, "<H", 0xFFFE), e + 10, "<H", 0xFFFE)
    out["count-too-few.pt"] = edit(edit(simple, e + 8, "<H", 1), e + 10, "<H", 1)
    out["directory-beyond.pt"] = edit(simple, e + 16, "<I", len(simple) + 10)
    out["directory-long.pt"] = edit(simple, e + 12, "<I", 0x7FFFFFFF)
    big = hand_zip(nested, zip64=True)
    z = big.rindex(b"PK\6\6")
    out["count-2-32.pt"] = edit(edit(big, z + 24, "<Q", 1 << 32), z + 32, "<Q", 1 << 32)
    out["count-2-64.pt"] = edit(edit(big, z + 24, "<Q", (1 << 64) - 1), z + 32, "<Q", (1 << 64) - 1)
    out["directory-2-63.pt"] = edit(big, z + 40, "<Q", 1 << 63)
    out["directory-wraps.pt"] = edit(big, z + 48, "<Q", (1 << 64) - 50)
    out["locator-wraps.pt"] = edit(big, big.rindex(b"PK\6\7") + 8, "<Q", (1 << 64) - 8)
    b1 = [i for i in range(len(big)) if big[i:i + 4] == b"PK\1\2"][1]
    n1 = struct.unpack("<H", big[b1 + 28:b1 + 30])[0]
    out["size-2-64.pt"] = edit(edit(big, b1 + 46 + n1 + 4, "<Q", (1 << 64) - 1), b1 + 46 + n1 + 12, "<Q", (1 << 64) - 1)
    out["offset-2-64.pt"] = edit(big, b1 + 46 + n1 + 20, "<Q", (1 << 64) - 20)
    out["size-lies.pt"] = edit(edit(simple, second + 20, "<I", 4000), second + 24, "<I", 4000)
    out["sizes-differ.pt"] = edit(simple, second + 20, "<I", 0)
    out["offset-beyond.pt"] = edit(simple, second + 42, "<I", 0xFFFFFFF0)
    first_header = struct.unpack("<I", simple[starts[0] + 42:starts[0] + 46])[0]
    out["overlap.pt"] = edit(simple, second + 42, "<I", first_header)
    out["crc-differs.pt"] = edit(simple, second + 16, "<I", 12345)
    name_at = simple.index(b"/byteorder")
    out["name-differs.pt"] = simple[:name_at + 1] + b"B" + simple[name_at + 2:]
    out["entry-cut.pt"] = edit(simple, second + 28, "<H", 0xFFFF)
    zip_dup = io.BytesIO()
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(zip_dup, "w") as zf:
            for _ in range(2):
                zf.writestr(zipfile.ZipInfo("archive/data.pkl"), b"\x80\x02N.")
    out["duplicate-record.pt"] = zip_dup.getvalue()
    out["two-pickles.pt"] = torch_zip(b"\x80\x02N.", extra=[("other/data.pkl", b"\x80\x02N.")])
    out["no-pickle.zip"] = python_zip(hand_zip(nested)).replace(b"data.pkl", b"data.pkk")
    out["compressed-pickle.pt"] = python_zip(nested)
    with io.BytesIO() as f:
        with zipfile.ZipFile(f, "w", zipfile.ZIP_DEFLATED) as zf:
            for name, data in records(nested):
                zf.writestr(name, data * 1)
        out["compressed-pickle.pt"] = f.getvalue()

    out["comment-end-record.pt"] = hand_zip(nested, comment=b"PK\5\6 is what an end record begins with")

    quarter = [("0", bytes(16))]
    good_dict = op_dict([("model", op_dict([("w", op_tensor("0", 4))]))])
    pickles = {
        "pickle-empty.pt": b"", "pickle-no-stop.pt": b"\x80\x02N", "pickle-protocol-9.pt": b"\x80\x09N.",
        "pickle-unknown-opcode.pt": b"\x80\x02\xffN.", "pickle-underflow.pt": b"\x80\x02RRR.",
        "pickle-no-mark.pt": b"\x80\x02t.", "pickle-memo-missing.pt": b"\x80\x02h\x05.",
        "pickle-string-lies.pt": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
        "pickle-string-lies-32.pt": b"\x80\x02X\xff\xff\xff\xffx.", "pickle-long-lies.pt": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "pickle-long-negative.pt": b"\x80\x02\x8b\xff\xff\xff\xff.", "pickle-frame-lies.pt": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        "pickle-odd-items.pt": b"\x80\x02}(K\1u.", "pickle-append-to-int.pt": b"\x80\x02K\1K\2a.",
        "pickle-put-2-64.pt": b"\x80\x02Np18446744073709551615\np18446744073709551616\n.",
        "pickle-system.pt": b"cos\nsystem\n(" + op_str("touch /tmp/stepfs-was-here") + b"tR.",
        "pickle-system-kept.pt": op_dict([("x", b"cos\nsystem\n(" + op_str("touch /tmp/stepfs-was-here") + b"tR"),
                                          ("model", op_dict([("w", op_tensor("0", 4))]))]) + b".",
        "pickle-self-list.pt": b"]q\0h\0a.", "pickle-self-dict.pt": b"}q\0" + op_str("me") + b"h\0s"
                               + op_str("w") + op_tensor("0", 4) + b"s.",
        "pickle-cycle-object.pt": b"cx\ny\n)Rq\0}" + op_str("me") + b"h\0sb.",
        "pickle-storage-lies.pt": op_dict([("w", op_tensor("0", 1 << 40))]) + b".",
        "pickle-shape-lies.pt": op_dict([("w", op_tensor("0", 4, (1 << 40, 1 << 40, 1 << 40)))]) + b".",
        "pickle-negative.pt": op_dict([("w", op_tensor("0", -4))]) + b".",
        "pickle-no-record.pt": op_dict([("w", op_tensor("7", 4))]) + b".",
        "pickle-two-types.pt": op_dict([("w", op_tensor("0", 4)), ("v", op_tensor("0", 4, cls="IntStorage"))]) + b".",
        "pickle-unknown-storage.pt": op_dict([("w", op_tensor("0", 3, cls="OddStorage"))]) + b".",
        "pickle-duplicate-keys.pt": op_dict([("w", op_tensor("0", 4)), ("w", op_tensor("1", 4)), ("w#2", op_tensor("2", 4))])
                                    + b".",
        "pickle-odd-keys.pt": op_dict([("\x1b[2J\n\0", op_tensor("0", 4)), ("k" * 2000, op_tensor("1", 4)),
                                       ("\U0001f600" * 100, op_tensor("2", 4)), ("", op_tensor("3", 4))]) + b".",
        "pickle-bad-utf8.pt": b"}(U\3\xff\xfe\xfd" + op_tensor("0", 4) + b"u.",
        "pickle-inst-obj.pt": b"((imod\nCls\n" + b"(cmod\nCls\nK\1o" + op_dict([("w", op_tensor("0", 4))]) + b"t.",
        "pickle-text-ops.pt": b"(dp0\nVw\\u00e9\\n\np1\n" + op_tensor("0", 4) + b"sS'q\\x41\\\\'\nI5\nsS\"n\"\nL-5L\nsVf\nF1.5\nsVt\nI01\ns.",
        "pickle-ext.pt": b"\x80\x02(\x82\1\x83\1\0\x84\1\0\0\0\x97\x98\x96" + struct.pack("<Q", 2) + b"abt.",
    }
    laughs = b"]q\0" + b"".join(b"](" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(200))
    pickles["pickle-billion-laughs.pt"] = b"(" + laughs + b"t."
    for name, p in pickles.items():
        out[name] = torch_zip(p, [(str(i), bytes([i]) * 16) for i in range(4)] if "unknown" not in name else [("0", bytes(12))])
    out["big-endian.pt"] = torch_zip(good_dict + b".", quarter).replace(b"little", b"\0\0\0big"[-6:])
    with io.BytesIO() as f:
        with zipfile.ZipFile(f, "w") as zf:
            for name, data in (("a/data.pkl", good_dict + b"."), ("a/byteorder", b"big"), ("a/data/0", bytes(16))):
                zf.writestr(zipfile.ZipInfo(name), data)
        out["big-endian.pt"] = f.getvalue()

    def st(header, payload=b"", n=None):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text) if n is None else n) + text + payload

    one = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    out |= {
        "st-2-60.safetensors": st({"w": one}, bytes(16), n=1 << 60),
        "st-2-64.safetensors": st({"w": one}, bytes(16), n=(1 << 64) - 1),
        "st-cut.safetensors": st({"w": one}, bytes(15)),
        "st-not-json.safetensors": st(b"{nonsense}", bytes(16)),
        "st-overlap.safetensors": st({"w": one, "v": one}, bytes(16)),
        "st-half-overlap.safetensors": st({"w": one, "v": dict(one, data_offsets=[8, 24])}, bytes(24)),
        "st-backwards.safetensors": st({"w": dict(one, data_offsets=[16, 0])}, bytes(16)),
        "st-offset-2-64.safetensors": st({"w": dict(one, data_offsets=[(1 << 64) - 16, (1 << 64) - 1])}, bytes(16)),
        "st-shape-lies.safetensors": st({"w": dict(one, shape=[5])}, bytes(16)),
        "st-shape-2-96.safetensors": st({"w": dict(one, shape=[1 << 32] * 3)}, bytes(16)),
        "st-shape-negative.safetensors": st({"w": dict(one, shape=[-4])}, bytes(16)),
        "st-duplicate.safetensors": st(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
                                       b'"w":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}', bytes(32)),
        "st-deep.safetensors": st(b'{"__metadata__":' + b"[" * 2000 + b"]" * 2000 + b"}"),
        "st-dims.safetensors": st({"w": dict(one, shape=[1] * 1000 + [4])}, bytes(16)),
        "st-unknown-type.safetensors": st({"w": dict(one, dtype="F5_E9", shape=[17])}, bytes(16)),
        "st-hole.safetensors": st({"w": dict(one, data_offsets=[16, 32])}, bytes(48)),
    }
    for name, data in out.items():
        open(os.path.join(HERE, "bad", name), "wb").write(data)


if __name__ == "__main__":
    for folder in ("good", "pairs", "bad"):
        os.makedirs(os.path.join(HERE, folder), exist_ok=True)
        for old in os.listdir(os.path.join(HERE, folder)):
            os.remove(os.path.join(HERE, folder, old))
    torch_files()
    safetensors_files()
    pairs()
    bad()
    with open(good("expected.json"), "w") as f:
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(expected.items())]
        f.write("{\n" + ",\n".join(lines) + "\n}\n")
