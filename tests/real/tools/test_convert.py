"""`stepfs convert`: the tensors that torch and safetensors load from the copy are those of the original."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import BIN, FAILURE, ROOT, USAGE, run
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.stepfs


def flat(value, keys=()):
    """The tensors below a value, by their keys."""
    if isinstance(value, torch.Tensor):
        return {keys: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {name: tensor for key, below in items for name, tensor in flat(below, (*keys, key)).items()}


def dotted(value):
    return {".".join(map(str, keys)): tensor for keys, tensor in flat(value).items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


class Model(torch.nn.Module):
    """Tied weights, a statistic, an integer."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 24)
        self.norm = torch.nn.BatchNorm1d(24)
        self.head = torch.nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.norm(self.embedding(x)))


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randint(50, (8,))).square().mean().backward()
    optimizer.step()
    odd = torch.randn(6, 7, 8)
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "rates": [0.1, 0.2],
        "odd": {
            "transposed": odd.mT, "permuted": odd.permute(2, 0, 1), "slice": odd[1:4, ::2, 3], "expanded": torch.ones(3, 1).expand(3, 5),
            "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "half": odd.half(), "double": odd.double() / 3,
            "f8": odd.to(torch.float8_e4m3fn), "u16": torch.arange(5).to(torch.uint16), "bool": torch.tensor([True, False]),
        },
        "list": [torch.arange(4), torch.arange(5.0)],
    }


@pytest.fixture
def file(state, tmp_path):
    torch.save(state, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def from_dcp(directory):
    dcp_to_torch_save(directory, directory.parent / "back.pt")
    return torch.load(directory.parent / "back.pt", weights_only=True)


def test_each_format_becomes_each_other(file, state, tmp_path):
    said = run("convert", file, "-o", tmp_path / "a.safetensors").stdout
    assert "head.weight is " in said and "values that are no tensors: nothing is unpickled" in said, said
    tied = {"model.head.weight"}
    written = {name: tensor for name, tensor in dotted(state).items() if name not in tied}
    same(load_file(tmp_path / "a.safetensors"), written)
    with safe_open(tmp_path / "a.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "model.head.weight": "model.embedding.weight"}
    # A copy of torch has the dictionaries and lists of the original, and its tied weights.
    run("convert", file, "-o", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    same(flat(back), flat(state))
    assert list(back) == ["model", "optimizer", "odd", "list"] and list(back["model"]) == list(state["model"])
    assert back["model"]["head.weight"].data_ptr() == back["model"]["embedding.weight"].data_ptr()
    assert zipfile.ZipFile(tmp_path / "b.pt").testzip() is None
    assert os.stat(tmp_path / "b.pt").st_mode == file.stat().st_mode
    # Keys of dictionaries are text in a distributed checkpoint, whoever writes it.
    run("convert", file, "-o", tmp_path / "c", "--to", "dcp")
    dcp.save({key: value for key, value in state.items()}, checkpoint_id=tmp_path / "torchs")
    theirs = from_dcp(tmp_path / "torchs")
    same(flat(from_dcp(tmp_path / "c")), flat(theirs))
    empty = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}
    dcp.load(empty, checkpoint_id=tmp_path / "c")
    same(flat(empty), flat({"model": state["model"]}))
    for source in ("torchs", "c"):
        run("convert", tmp_path / source, "-o", tmp_path / f"{source}.pt")
        same(flat(torch.load(tmp_path / f"{source}.pt", weights_only=True)), flat(theirs))
        run("convert", tmp_path / source, "-o", tmp_path / f"{source}.safetensors")
        same(load_file(tmp_path / f"{source}.safetensors"), dotted(state))
    run("convert", tmp_path / "a.safetensors", "-o", tmp_path / "d.pt")
    # The metadata tells the tied names.
    back = torch.load(tmp_path / "d.pt", weights_only=True)
    same(back, dotted(state))
    assert back["model.head.weight"].data_ptr() == back["model.embedding.weight"].data_ptr()
    run("convert", tmp_path / "a.safetensors", "-o", tmp_path / "e", "--to", "dcp")
    same(from_dcp(tmp_path / "e"), dotted(state))


def test_what_two_ranks_wrote_becomes_whole(tmp_path):
    """Each rank has a part of each tensor."""
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        shutil.copy(ROOT / "tests/corpus/dcp" / name, tmp_path)
    run("convert", tmp_path, "-o", tmp_path.with_suffix(".pt"))
    found = torch.load(tmp_path.with_suffix(".pt"), weights_only=True)
    same(dotted(found), dotted(torch.load(ROOT / "tests/corpus/dcp/tiny.pt", weights_only=True)))


def test_what_safetensors_saves_of_a_model_it_loads_again(state, tmp_path):
    model = Model()
    model.load_state_dict(state["model"])
    torch.save(model.state_dict(), tmp_path / "m.pt")
    run("convert", tmp_path / "m.pt", "-o", tmp_path / "m.safetensors")
    save_model(model, tmp_path / "theirs.safetensors")
    same(load_file(tmp_path / "m.safetensors"), load_file(tmp_path / "theirs.safetensors"))
    other = Model()
    load_model(other, tmp_path / "m.safetensors")
    same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)])
def test_values_are_rounded_as_torch_does(tmp_path, name, dtype):
    torch.manual_seed(2)
    bits = torch.randint(-(2**31), 2**31, (20_000,)).to(torch.int32).view(torch.float32)
    edges = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 65519.9, 65520.0, 1e-8, -0.0, float("inf")], dtype=torch.float64)
    model = {"a": bits, "b": torch.cat([edges, edges + 1e-12]), "c": torch.randn(999).half(), "n": torch.arange(9), "d": bits.bfloat16()}
    torch.save({"model": model}, tmp_path / "in.pt")
    run("convert", tmp_path / "in.pt", "-o", tmp_path / "out.pt", "--dtype", name)
    found = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert found.pop("n").dtype == torch.int64
    for key, tensor in found.items():
        expected = model[key].to(dtype)
        is_number = ~expected.isnan()
        assert tensor.dtype == dtype and torch.equal(tensor.isnan(), ~is_number)
        assert torch.equal(tensor[is_number], expected[is_number]), key
        assert torch.equal(tensor[is_number].signbit(), expected[is_number].signbit()), key


def test_only_the_weights_are_sent_away(file, state, tmp_path):
    said = run("convert", file, "-o", tmp_path / "w.pt", "--only", "weights", "--dtype", "bf16", "--strip-prefix", "model.").stdout
    assert "tensors of optimizers" in said
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert "optimizer" not in found and found["odd"]["double"].dtype == torch.bfloat16
    for name, tensor in state["model"].items():
        assert torch.equal(found[name], tensor.bfloat16() if tensor.is_floating_point() else tensor)
    # An optimizer's state keeps its type.
    run("convert", file, "-o", tmp_path / "all.pt", "--dtype", "bf16", "--prefix", "run")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert found["run.optimizer.state.0.exp_avg"].dtype == torch.float32
    assert found["run.model.head.weight"].dtype == torch.bfloat16


def test_shards_and_their_index(tmp_path):
    torch.manual_seed(3)
    weights = {f"h.{at}.weight": torch.randn(100, 100) for at in range(7)}
    torch.save(weights, tmp_path / "in.pt")
    run("convert", tmp_path / "in.pt", "-o", tmp_path / "hf", "--shard", "100K")
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 280_000} and index["weight_map"].keys() == weights.keys()
    shards = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert shards == [f"model-0000{at}-of-00004.safetensors" for at in (1, 2, 3, 4)] and set(index["weight_map"].values()) == set(shards)
    same({name: load_file(tmp_path / "hf" / file)[name] for name, file in index["weight_map"].items()}, weights)
    # Files beside them that the index does not list are none of the model's, nor is another format of it.
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}}, tmp_path / "hf/optimizer.pt")
    (tmp_path / "hf/pytorch_model.bin.index.json").write_text('{"weight_map": {"h.0.weight": "pytorch_model-1.bin"}}')
    (tmp_path / "hf/search.index.json").write_text("[1]")
    (tmp_path / "hf" / shards[0]).chmod(0o600)
    (tmp_path / "hf/config.json").write_text("{}")
    said = run("convert", tmp_path / "hf", "-o", tmp_path / "back.pt").stdout
    assert os.stat(tmp_path / "back.pt").st_mode & 0o777 == 0o600
    assert "left out: 1 files that no index lists or that have no tensors, such as optimizer.pt" in said
    same(torch.load(tmp_path / "back.pt", weights_only=True), weights)
    run("convert", tmp_path / "in.pt", "-o", tmp_path / "one", "--shard", "1G")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    # A shard that cannot be read, or is another one, is never left out in silence.
    whole = (tmp_path / "hf" / shards[1]).read_bytes()
    other = (tmp_path / "hf" / shards[2]).read_bytes()
    for damaged, words in [
        (b"version https://git-lfs.github.com/spec/v1\n", "no tensors can be read: "),
        (whole.replace(b"{", b"[", 2), "no tensors can be read: "),
        (whole + b"more", "no tensors can be read: "),
        (other, "which the index lists"),
    ]:
        (tmp_path / "hf" / shards[1]).write_bytes(damaged)
        done = run("convert", tmp_path / "hf", "-o", tmp_path / "x.pt", check=False)
        assert done.returncode == FAILURE and shards[1] in done.stderr and words in done.stderr, done
    (tmp_path / "hf" / shards[1]).unlink()
    done = run("convert", tmp_path / "hf", "-o", tmp_path / "x.pt", check=False)
    assert done.returncode == FAILURE and f"lists {shards[1]}, which is missing" in done.stderr


def test_a_store_a_mirror_and_a_mount_are_read_alike(mount, tmp_path):
    """Released files as they read; with any of the tools."""
    states = [{"model": {"w": torch.randn(256, 256, generator=torch.Generator().manual_seed(at))}} for at in range(3)]
    for at, each in enumerate(states):
        torch.save(each, mount / f"step_{at + 1}.pt")
    mount.sync()
    read = torch.load(mount / "step_1.pt")["model"]["w"]
    run("umount", mount.dir)
    mirror = f"file://{tmp_path}/mirror"
    run("mount", mount.store, mount.dir, "--mirror", mirror)
    run("sync", "--mirror", mount.dir)
    for at, place in enumerate((f"{mount.store}:step_1.pt", f"{mirror}:step_1.pt", mount / "step_1.pt", f"{mount.dir}:step_1.pt")):
        run("convert", place, "-o", tmp_path / f"{at}.safetensors")
        same(load_file(tmp_path / f"{at}.safetensors"), {"model.w": read})
        assert "1 weights, 0 changed" in run("diff", place, mount / "step_1.pt").stdout
        run("merge", place, mount / "step_1.pt", "-o", tmp_path / f"{at}.pt")
        assert torch.equal(torch.load(tmp_path / f"{at}.pt")["model"]["w"], read)


def test_files_without_tensors_are_told(tmp_path):
    """Of an old torch, and of another program."""
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    torch.save({"epoch": 1}, tmp_path / "args.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "tokenizer.bin").write_bytes(b"words" * 99)
    said = run("convert", tmp_path, "-o", f"{tmp_path}.pt").stdout
    assert "left out: 2 files that no index lists or that have no tensors, such as args.bin" in said
    same(torch.load(f"{tmp_path}.pt", weights_only=True), {"w": torch.ones(3)})


def test_what_cannot_be_converted_is_said_and_leaves_nothing(file, state, tmp_path):
    whole = file.read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[:-999])
    (tmp_path / "both").mkdir()
    for name in ("a", "b"):
        save_file({"w": torch.ones(3)}, tmp_path / f"both/{name}.safetensors")
    torch.save(torch.ones(3), tmp_path / "one.pt")
    torch.save({"a": torch.ones(3).to_sparse()}, tmp_path / "sparse.pt")
    torch.save({"a": torch.ones(3, dtype=torch.complex64).conj()}, tmp_path / "conj.pt")
    torch.save({"a": torch.ones(3, dtype=torch.complex128)}, tmp_path / "complex.pt")
    numpy.save(tmp_path / "array.npy", numpy.ones(3))
    torch.save({"__metadata__": torch.ones(3)}, tmp_path / "own.pt")
    one = torch.ones(3)
    torch.save({"a": one, "format": one}, tmp_path / "tied.pt")
    torch.save(torch.nn.Linear(20, 20), tmp_path / "module.pt")
    for name in ("pointer", "mixed"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(3)}, tmp_path / name / "a.safetensors")
    (tmp_path / "pointer/b.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    numpy.save(tmp_path / "mixed/w.npy", numpy.ones(3))
    torch.save({"optimizer": state["optimizer"]}, tmp_path / "optimizer.pt")
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    part = next((tmp_path / "dcp").glob("*.distcp"))
    part.rename(tmp_path / "part.distcp")
    (tmp_path / "dcp" / "__9_0.distcp").write_bytes((tmp_path / "part.distcp").read_bytes())
    before = sorted(tmp_path.rglob("*"))
    for arguments, words in [
        (["cut.pt", "-o", "x.pt"], "the file is cut short; name a whole checkpoint"),
        (["in.pt", "-o", "in.pt"], "exists; name a new file"),
        (["in.pt", "-o", "x"], "tell the format with --to"),
        (["in.pt", "-o", "x.pt", "--shard", "1G"], "--shard is for safetensors alone"),
        (["in.pt", "-o", "x.pt", "--strip-prefix", "modle"], "no name begins with"),
        (["both", "-o", "both/x.pt"], "lies inside both; name a place outside of it"),
        (["both", "-o", "x.pt"], "two tensors have the name w"),
        (["one.pt", "-o", "x.safetensors"], "give it one with --prefix"),
        (["sparse.pt", "-o", "x.pt"], "tensors are inside of objects, such as "),
        (["pointer", "-o", "x.pt"], "b.safetensors: no tensors can be read: "),
        (["mixed", "-o", "x.pt"], "and this is npy; name one file"),
        (["conj.pt", "-o", "x.pt"], "a: a kind of tensor that stepfs does not know"),
        (["complex.pt", "-o", "x.safetensors"], "safetensors has no C128"),
        (["own.pt", "-o", "x.safetensors"], "safetensors has __metadata__ for itself"),
        (["tied.pt", "-o", "x.safetensors"], "safetensors has format for itself"),
        (["module.pt", "-o", "x.pt"], "tensors are inside of objects, such as "),
        (["array.npy", "-o", "x.pt"], "array.npy: convert reads torch.save, safetensors and distributed checkpoints, and this is npy"),
        (["optimizer.pt", "-o", "x.pt", "--only", "weights"], "no tensors are left to write; leave out --only"),
        (["dcp", "-o", "x.pt"], "is not whole"),
        (["gone.pt", "-o", "x.pt"], "no such file"),
    ]:
        done = subprocess.run([BIN, "convert", *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == FAILURE and words in done.stderr, (arguments, done)
        assert sorted(tmp_path.rglob("*")) == before, arguments
    assert run("convert", file, check=False).returncode == USAGE


def test_pieces_and_threads_change_nothing(tmp_path, monkeypatch):
    torch.manual_seed(5)
    odd = torch.randn(1_501, 2_003)
    odd[0, 0], odd[-1, -1], odd[700, 3] = float("nan"), float("inf"), -0.0
    state = {
        "whole": torch.randn(3 * 2**20 + 7), "transposed": odd.t(), "sliced": odd[1:, ::3], "half": odd.half().t(), "empty": torch.zeros(4, 0, 2),
        "scalar": torch.tensor(2), "double": odd.double()[::2], "bytes": torch.randint(256, (2**22 + 1,), dtype=torch.uint8), "tied": odd.t(),
    } | {f"small.{at}": torch.full((at,), at) for at in range(40)}
    torch.save(state, tmp_path / "in.pt")
    for out, options, load in [
        ("out.safetensors", [], load_file),
        ("out.pt", [], torch.load),
        ("out.safetensors", ["--dtype", "bf16"], load_file),
        ("out", ["--to", "dcp"], from_dcp),
    ]:
        written = []
        for threads in (1, 2, 5):
            monkeypatch.setenv("RAYON_NUM_THREADS", str(threads))
            run("convert", tmp_path / "in.pt", "-o", tmp_path / out, *options)
            files = sorted((tmp_path / out).iterdir()) if "dcp" in options else [tmp_path / out]
            written.append([file.read_bytes() for file in files])
            found = load(tmp_path / out)
            shutil.rmtree(tmp_path / out) if "dcp" in options else files[0].unlink()
        assert written[1:] == written[:1] * 2, (out, options)
        for name, tensor in state.items():
            expected = tensor.bfloat16() if tensor.is_floating_point() and "--dtype" in options else tensor
            if name in found:
                assert found[name].dtype == expected.dtype and torch.allclose(found[name], expected, rtol=0, atol=0, equal_nan=True), (out, name)
        assert found.keys() ^ state.keys() <= {"tied", "transposed"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
@pytest.mark.parametrize("out", [["out.pt"], ["hf", "--shard", "1M"], ["out", "--to", "dcp"]], ids=lambda out: out[0])
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, out):
    torch.save({"w": torch.ones(1_000, 1_000), "v": torch.ones(1_000, 1_000)}, tmp_path / "in.pt")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], check=True)
    try:
        done = run("convert", tmp_path / "in.pt", "-o", disk / out[0], *out[1:], check=False)
        assert done.returncode == FAILURE and "make room there, and try again" in done.stderr, done.stderr
        assert str(disk / out[0]) in done.stderr and "in.pt" not in done.stderr, done.stderr
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_nothing_half_written_stays(tmp_path):
    """A signal in the middle; a file of 100 MB is never in memory as a whole."""
    torch.save({"w": torch.ones(25_000, 1_000), "t": torch.ones(300, 100).t()}, tmp_path / "in.pt")
    done = subprocess.run([sys.executable, "-c", PEAK, BIN, "convert", "in.pt", "-o", "out.pt", "--dtype", "bf16"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert int(done.stdout.split()[-1]) < 70_000, done.stdout + done.stderr
    (tmp_path / "out.pt").unlink()
    for out in (["out.pt"], ["out", "--to", "dcp"]):
        process = subprocess.Popen([BIN, "convert", "in.pt", "-o", *out], cwd=tmp_path)
        while len(list(tmp_path.iterdir())) == 1:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


# Runs a command, and prints its largest resident memory in KiB.
PEAK = """
import resource, subprocess, sys
assert subprocess.run(sys.argv[1:]).returncode == 0
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
