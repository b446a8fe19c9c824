#!/usr/bin/env python3
"""Writes formats/NAME, formats/expected.json and formats_pairs/NAME.before and .after: legacy files of torch.save, npy and npz.
The layout is that of `make.py`. Files with one stem have the same tensors. Needs torch, numpy and safetensors.
"""

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import torch
from make import NAMES, Settings, checkpoint_role, float_weight, walk
from safetensors.numpy import save_file

HERE = Path(__file__).parent / "formats"
PAIRS = Path(__file__).parent / "formats_pairs"
expected = {}


class Legacy(pickle.Unpickler):
    """Finds the payloads with Python's own unpickler: first their sizes, then, from the list of keys, their places."""

    def __init__(self, file):
        super().__init__(file)
        self.storages = {}

    def persistent_load(self, pid):
        if pid[0] == "module":
            return pid[1]
        _, kind, key, _, numel, view = pid
        assert view is None
        if key not in self.storages:
            raw = torch.UntypedStorage(numel * kind.dtype.itemsize)
            self.storages[key] = torch.storage.TypedStorage(wrap_storage=raw, dtype=kind.dtype, _internal=True), raw, numel
        return self.storages[key][0]


def list_legacy(name, role):
    """Expected tensors of a legacy file, by ascending offset."""
    with open(HERE / name, "rb") as f:
        for _ in range(3):
            pickle.load(f)
        reader = Legacy(f)
        value = reader.load()
        offsets = {}
        for key in pickle.load(f):
            _, raw, numel = reader.storages[key]
            assert struct.unpack("<q", f.read(8))[0] == numel
            offsets[raw.data_ptr()] = f.tell()
            f.seek(raw.nbytes(), 1)
        assert f.read() == b""
    found = {}
    for path, t in walk(value, "", []):
        storage = t.untyped_storage()
        if storage.nbytes() == 0:
            continue
        offset = offsets[storage.data_ptr()]
        if offset in found:
            found[offset]["aliases"].append(path)
            continue
        numel = storage.nbytes() // t.element_size()
        if not t.is_contiguous():  # dimensions in the order of the storage
            t = t.permute(sorted(range(t.dim()), key=lambda dim: -t.stride(dim)))
        whole = t.is_contiguous() and t.storage_offset() == 0 and t.numel() == numel
        found[offset] = {"path": path, "aliases": [], "dtype": NAMES[t.dtype], "shape": list(t.shape) if whole else [numel],
                         "offset": offset, "role": role(path, t)}
    expected[name] = {"kind": "legacy", "tensors": [found[k] for k in sorted(found)]}
    return [t["path"] for t in expected[name]["tensors"]]


def save_legacy(value, name, **options):
    torch.save(value, HERE / name, _use_new_zipfile_serialization=False, **options)


DTYPES = {"<f4": "F32", "<f2": "F16", "<f8": "F64", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8", "|u1": "U8",
          "<u2": "U16", "<u4": "U32", "<u8": "U64", "|b1": "BOOL", "<c8": "C64", "<c16": "C128"}


def array_of(path, array, offset, role):
    dtype = DTYPES.get(array.dtype.str)
    flat = array.flags.f_contiguous and not array.flags.c_contiguous
    shape = [array.size] if flat else list(array.shape)
    if dtype is None:
        dtype, shape, role = "U8", [array.nbytes], "other"
    return {"path": path, "aliases": [], "dtype": dtype, "shape": shape, "offset": offset, "role": role}


def header_of(data, at):
    with io.BytesIO(data[at:]) as f:
        version = np.lib.format.read_magic(f)
        (np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0)(f)
        return f.tell()


def list_npy(name):
    data = (HERE / name).read_bytes()
    array = np.load(HERE / name)
    expected[name] = {"kind": "npy", "tensors": [array_of(".", array, header_of(data, 0), "other")]}


def list_npz(name, role):
    data = (HERE / name).read_bytes()
    arrays, tensors = np.load(HERE / name), []
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        for i in z.infolist():
            key = i.filename.removesuffix(".npy")
            start = i.header_offset + 30 + sum(struct.unpack("<HH", data[i.header_offset + 26:i.header_offset + 30]))
            if arrays[key].size:
                tensors.append(array_of(key, arrays[key], start + header_of(data, start), role(key, arrays[key])))
    expected[name] = {"kind": "npz", "tensors": tensors}


def trained():
    """Several parameters of one shape: only their order tells whose state is whose."""
    torch.manual_seed(11)
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(6)), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def legacy_files(model, optimizer):
    nested = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 200}
    for _ in range(20):
        # Keys are addresses: not every save has them in another order than the pickle.
        kept = [torch.randn(64) for _ in range(64)]
        again = {"model": {k: v.clone() for k, v in reversed(nested["model"].items())}, **{k: nested[k] for k in ("optimizer", "step")}}
        again["model"] = {k: again["model"][k] for k in nested["model"]}
        save_legacy(again, "trained.legacy.pt")
        paths = list_legacy("trained.legacy.pt", checkpoint_role)
        weights = [p for p in paths if p.endswith(".weight")]
        if weights != sorted(weights):
            break
        del kept
    else:
        raise RuntimeError("the payloads are in the order of the pickle")
    torch.save(again, HERE / "trained.pt")
    for protocol in (3, 4, 5):
        save_legacy(nested, f"protocol{protocol}.legacy.pt", pickle_protocol=protocol)
        list_legacy(f"protocol{protocol}.legacy.pt", checkpoint_role)
    w, base = torch.randn(8, 4), torch.randn(10, 3)
    tied = {"emb.weight": w, "head.weight": w, "again.weight": w[:], "row.weight": base[2], "all.weight": base,
            "turned.weight": torch.randn(3, 5).t()}
    save_legacy({"model": tied}, "tied.legacy.pt")
    list_legacy("tied.legacy.pt", lambda p, t: "weight")
    # torch can write the other types, but not read them.
    kinds = {f"w.{name}": (torch.randn(3, 4) * 20).to(dtype) for dtype, name in NAMES.items() if name[:2] not in ("F8", "U1", "U3", "U6")}
    save_legacy(kinds | {"empty": torch.empty(0, 3), "scalar": torch.tensor(1.5)}, "dtypes.legacy.pt")
    list_legacy("dtypes.legacy.pt", float_weight)
    model.extra = Settings()
    save_legacy(model, "module.legacy.pt")
    list_legacy("module.legacy.pt", lambda p, t: "weight" if "_parameters/" in p else "other")


def array_files(model, optimizer):
    named = dict(model.named_parameters())
    state = {f"model.{k}": v.detach().numpy() for k, v in model.state_dict().items()}
    for name, slots in zip(named, optimizer.state_dict()["state"].values()):
        state |= {f"state.model.{name}.{slot}": slots[slot].numpy() for slot in ("exp_avg", "exp_avg_sq")}

    def role(key, array):
        if key.startswith("state."):
            return "optimizer"
        return "other" if key.endswith(("running_mean", "running_var")) or array.dtype.kind != "f" else "weight"

    np.savez(HERE / "trained.npz", **state)
    list_npz("trained.npz", role)
    save_file({k: np.asarray(v, order="C") for k, v in state.items()}, HERE / "trained.safetensors")
    rng = np.random.default_rng(5)
    odd = {f"w.{i}": (rng.standard_normal((3, 4)) * 9).astype(dtype) for i, dtype in enumerate(DTYPES)}
    odd |= {"turned": np.asfortranarray(rng.standard_normal((3, 5))), "row": rng.standard_normal((1, 5)), "scalar": np.float32(2.5),
            "big": np.arange(4, dtype=">f4"), "text": np.array(["a", "bcd"]), "times": np.array(["2020-01-01"], "M8[ns]"),
            "void": np.frombuffer(bytes(range(8)), "V2"), "empty": np.empty((0, 3)), "dir/w": rng.standard_normal((2, 2))}
    np.savez(HERE / "odd.npz", **odd)
    list_npz("odd.npz", lambda key, array: "weight" if array.dtype.kind in "fc" else "other")
    np.save(HERE / "array.npy", odd["w.0"])
    np.save(HERE / "turned.npy", odd["turned"])
    np.save(HERE / "big.npy", odd["big"])
    with open(HERE / "version2.npy", "wb") as f:
        np.lib.format.write_array(f, odd["w.2"], version=(2, 0))
    for name in ("array.npy", "turned.npy", "big.npy", "version2.npy"):
        list_npy(name)


class Pipe(io.BytesIO):
    """A file that cannot seek: zipfile then writes the CRC behind each record."""

    def seekable(self):
        return False

    def seek(self, *where):
        raise OSError("a pipe")

    def tell(self):
        raise OSError("a pipe")


def pairs():
    """Two files that differ in a few arrays; numpy is the reference for every other byte."""
    rng = np.random.default_rng(6)
    before = {"a.weight": rng.standard_normal((4, 3)).astype("<f4"), "b.weight": rng.standard_normal(7).astype("<f4"),
              "c.weight": np.asfortranarray(rng.standard_normal((3, 2))), "ids": np.arange(9)}
    after = before | {"a.weight": before["a.weight"] + 1, "b.weight": before["b.weight"] * 2, "c.weight": before["c.weight"] - 1}
    for name, made in (("npz", io.BytesIO), ("npz.pipe", Pipe)):
        for label, arrays in (("before", before), ("after", after)):
            out = made()
            np.savez(out, **arrays)
            (PAIRS / f"{name}.{label}").write_bytes(out.getvalue())


if __name__ == "__main__":
    for folder in (HERE, PAIRS):
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
    legacy_files(*trained())
    array_files(*trained())
    pairs()
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(expected.items())]
    (HERE / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
