"""`stepfs diff` and `stepfs merge`, against torch's own arithmetic."""

import json
import signal
import subprocess
import sys
import time
import zipfile

import pytest
import torch
from harness import BIN, FAILURE, USAGE, run, run_json
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.stepfs


def state(seed, dtype=torch.float32):
    """A model with a statistic and an integer, and Adam's state of it."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.BatchNorm1d(96), torch.nn.Linear(96, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(seed + 1):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
    model.to(dtype)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": seed}


@pytest.fixture
def files(tmp_path):
    states = [state(seed) for seed in range(3)]
    paths = [tmp_path / f"step_{at}.pt" for at in range(3)]
    for path, each in zip(paths, states):
        torch.save(each, path)
    return paths, states


def merged(states, weights, name):
    total = sum(weight * each["model"][name].double() for weight, each in zip(weights, states))
    return (total / sum(weights)).to(states[-1]["model"][name].dtype)


@pytest.mark.parametrize("how, weights", [
    ([], [1, 1, 1]),
    (["--weights", "3,0,-1"], [3, 0, -1]),
    (["--ema", "0.5"], [0.25, 0.5, 1]),
    (["--decay"], [1 - (1 / 3) ** 0.5, (1 / 3) ** 0.5 - (2 / 3) ** 0.5, (2 / 3) ** 0.5 - 1]),
])
def test_a_mean_is_torchs_mean(files, tmp_path, how, weights):
    paths, states = files
    if how == ["--decay"]:
        rate = [1 - (at / 3) ** 0.5 for at in range(4)]
        weights = [rate[at] - rate[at + 1] for at in range(3)]
    out = tmp_path / "out.pt"
    run("merge", *paths, "-o", out, *how)
    found = torch.load(out)
    for name, tensor in states[-1]["model"].items():
        expected = merged(states, weights, name) if tensor.is_floating_point() else tensor
        assert torch.equal(found["model"][name], expected), name
    assert found["step"] == 2
    for number, moments in states[-1]["optimizer"]["state"].items():
        assert all(torch.equal(found["optimizer"]["state"][number][key], value) for key, value in moments.items())
    # The checksums are those of the new bytes.
    assert zipfile.ZipFile(out).testzip() is None
    assert out.stat().st_mode == paths[-1].stat().st_mode


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_rounded_once(tmp_path, dtype):
    torch.manual_seed(1)
    states = [torch.randn(50_000, dtype=torch.float64).to(dtype) for _ in range(2)]
    for at, each in enumerate(states):
        save_file({"w": each}, tmp_path / f"{at}.safetensors")
    run("merge", tmp_path / "0.safetensors", tmp_path / "1.safetensors", "-o", tmp_path / "out.safetensors", "--weights", "1,3")
    found = load_file(tmp_path / "out.safetensors")["w"].double()
    exact = (states[0].double() + 3 * states[1].double()) / 4
    # No value of the type is nearer.
    for beside in (float("inf"), -float("inf")):
        other = torch.nextafter(found.to(dtype), torch.full_like(found, beside).to(dtype)).double()
        assert ((found - exact).abs() <= (other - exact).abs()).all()


def test_a_directory_of_shards_is_merged_as_one(tmp_path):
    for at in range(2):
        (tmp_path / f"c{at}").mkdir()
        for shard in "ab":
            save_file({f"{shard}.weight": torch.full((4, 4), float(at))}, tmp_path / f"c{at}/model-{shard}.safetensors")
        (tmp_path / f"c{at}/config.json").write_text(f'{{"at": {at}}}')
    run("merge", tmp_path / "c0", tmp_path / "c1", "-o", tmp_path / "out")
    for shard in "ab":
        assert torch.equal(load_file(tmp_path / f"out/model-{shard}.safetensors")[f"{shard}.weight"], torch.full((4, 4), 0.5))
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"at": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c0", "c1", "out"]


def test_what_cannot_be_merged_is_said_and_leaves_nothing(files, tmp_path):
    paths, states = files
    other = tmp_path / "other.pt"
    torch.save({"model": {**states[0]["model"], "0.weight": torch.zeros(3, 3)}}, other)
    less = tmp_path / "less.pt"
    torch.save({"model": {"0.weight": states[0]["model"]["0.weight"]}}, less)
    text = tmp_path / "notes.txt"
    text.write_text("no checkpoint")
    before = sorted(tmp_path.iterdir())
    for arguments, words in [
        ([other, paths[0]], "other.pt: model/0.weight is F32 [3, 3], and F32 [96, 64] in"),
        ([less, paths[0]], "less.pt has no model/"),
        ([text, paths[0]], "not a checkpoint that stepfs understands"),
        ([paths[0], tmp_path / "gone.pt"], "no such file"),
        ([paths[0], paths[1], "--weights", "1"], "--weights has 1 numbers for 2 files"),
        ([paths[0], paths[1], "--weights", "1,-1"], "their sum not 0"),
        ([paths[0], paths[1], "--ema", "2"], "between 0 and 1"),
    ]:
        done = run("merge", *arguments, "-o", tmp_path / "out.pt", check=False)
        assert done.returncode == FAILURE and words in done.stderr, done.stderr
        assert sorted(tmp_path.iterdir()) == before
    assert run("merge", paths[0], "-o", tmp_path / "out.pt", check=False).returncode == USAGE
    done = run("merge", *paths, "-o", paths[0], check=False)
    assert done.returncode == FAILURE and "exists; name a new file" in done.stderr


def test_a_diff_has_torchs_numbers(files):
    paths, states = files
    found = run_json("diff", paths[0], paths[2], "--json")
    assert found["different"] == found["only_in_a"] == found["only_in_b"] == []
    rows = {row["tensor"]: row for row in found["tensors"]}
    for name, a in states[0]["model"].items():
        row, b = rows[f"model/{name}"], states[2]["model"][name]
        assert row["changed"] == int((a != b).sum()) and row["elements"] == a.numel(), name
        if not a.is_floating_point():
            assert row["rms"] is row["cosine"] is None
            continue
        a, b = a.double().flatten(), b.double().flatten()
        assert row["rms"] == pytest.approx(float(a.square().mean().sqrt()))
        assert row["largest_change"] == pytest.approx(float((b - a).abs().max()))
        if a.norm() > 0:
            assert row["relative"] == pytest.approx(float((b - a).norm() / a.norm()))
            assert row["cosine"] == pytest.approx(float(torch.dot(a, b) / a.norm() / b.norm()))
    relative = [row["relative"] for row in found["tensors"] if row["relative"] is not None]
    assert relative == sorted(relative, reverse=True)
    text = run("diff", paths[0], paths[2]).stdout
    assert "tensors of optimizers and others" in text and "model/0.weight" in text
    assert all(len(line) <= 100 for line in text.splitlines()[3:]), text


def test_a_diff_tells_what_is_not_finite_not_alike_or_missing(tmp_path):
    a = {"same": torch.ones(8), "broken": torch.ones(8), "grown": torch.ones(8), "gone": torch.ones(8)}
    b = {"same": torch.ones(8), "broken": torch.tensor([float("nan")] * 2 + [1.0] * 6), "grown": torch.ones(9), "new": torch.ones(8)}
    torch.save(a, tmp_path / "a.pt")
    torch.save(b, tmp_path / "b.pt")
    found = run_json("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    assert found["only_in_a"] == ["gone"] and found["only_in_b"] == ["new"]
    assert found["different"] == ["grown: F32 [8] in A, F32 [9] in B"]
    assert [row["tensor"] for row in found["tensors"]] == ["broken", "same"], "what broke comes first"
    assert found["tensors"][0]["not_finite"] == [0, 2] and found["tensors"][1]["changed"] == 0
    text = run("diff", tmp_path / "a.pt", tmp_path / "b.pt").stdout
    assert "not finite: 0 in A, 2 in B" in text and "only in B: new" in text


def test_released_files_of_a_mount_are_read_as_they_are(mount, files):
    paths, states = files
    for at, each in enumerate(states):
        torch.save(each, mount / f"step_{at + 1}.pt")
    mount.sync()
    read = [torch.load(mount / f"step_{at + 1}.pt") for at in range(3)]
    out = mount.base / "out.pt"
    run("merge", *[mount / f"step_{at + 1}.pt" for at in range(3)], "-o", out)
    assert torch.equal(torch.load(out)["model"]["0.weight"], merged(read, [1, 1, 1], "0.weight"))
    # Also into the mount, as an ordinary file.
    run("merge", mount / "step_1.pt", mount / "step_3.pt", "-o", mount / "average.pt")
    assert torch.equal(torch.load(mount / "average.pt")["model"]["0.weight"], merged([read[0], read[2]], [1, 1], "0.weight"))
    assert run_json("diff", paths[2], mount / "step_3.pt", "--json")["tensors"][0]["changed"] == 0


# Places around which files are cut: vectors, what is widened at once, read at once, and what a thread takes.
BORDERS = [0, 7, 8, 511, 512, 2**15, 2**16 - 1, 2**16, 2**17, 2**19, 2**20 - 1, 2**20, 2**21, -1]


def awkward(seed):
    """Tensors that end within each piece in which they are read, with values that are no numbers at its borders."""
    torch.manual_seed(seed)
    state = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensor = torch.randn(2**21 + 2**20 + 13).to(dtype)
        state[f"whole {dtype}"] = tensor.clone()
        for at, border in enumerate(BORDERS[seed % 2:]):
            tensor[border] = [float("nan"), float("inf"), -float("inf")][(at + seed) % 3]
        state[f"broken {dtype}"] = tensor
        state[f"tiny {dtype}"] = torch.randn(3).to(dtype)
    kinds = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128)
    state |= {f"other {dtype}": torch.randint(2, (2**20 + 5,)).to(dtype) for dtype in kinds}
    odd = torch.randn(1_001, 2_003)
    return state | {"transposed": odd.t(), "sliced": torch.randn(999, 501)[1:, ::3], "empty": torch.zeros(0, 5), "scalar": torch.tensor(float(seed))}


def outputs(monkeypatch, *command, out=None):
    """A command's text, and the file that it writes, with one thread and with several."""
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setenv("RAYON_NUM_THREADS", str(threads))
        text = run(*command, *([] if out is None else ["-o", out])).stdout
        found.append((text, out and out.read_bytes()))
        if out:
            out.unlink()
    return found


def test_pieces_and_threads_change_nothing(tmp_path, monkeypatch):
    states = [awkward(seed) for seed in range(2)]
    paths = [tmp_path / f"{at}.pt" for at in range(2)]
    for path, each in zip(paths, states):
        torch.save(each, path)
    first, *others = outputs(monkeypatch, "diff", *paths, "--json")
    assert others == [first] * len(others)
    rows = {row["tensor"]: row for row in json.loads(first[0])["tensors"]}
    # A storage without bytes is none, and a storage that a tensor is a part of has another name.
    for name in states[0].keys() - {"sliced", "empty"}:
        a, b = (each[name].flatten() for each in states)
        row, bits = rows[name], {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.element_size(), a.dtype)
        assert row["changed"] == int((a.view(bits) != b.view(bits)).sum()), name
        if not a.is_floating_point():
            assert row["rms"] is None, name
            continue
        assert row["not_finite"] == [int((~each.isfinite()).sum()) for each in (a, b)], name
        both = a.isfinite() & b.isfinite()
        a, b = a[both].double(), b[both].double()
        if len(a) and a.norm() > 0:
            near = {"rms": a.norm() / len(a) ** 0.5, "rms_of_change": (b - a).norm() / len(a) ** 0.5, "cosine": torch.dot(a, b) / a.norm() / b.norm()}
            assert all(row[key] == pytest.approx(float(value), rel=1e-11) for key, value in near.items()), (name, row, near)
            assert row["largest_change"] == float((b - a).abs().max()), name
    first, *others = outputs(monkeypatch, "merge", *paths, "--weights", "1,2", out=tmp_path / "out.pt")
    assert others == [first] * len(others)
    (tmp_path / "out.pt").write_bytes(first[1])
    assert zipfile.ZipFile(tmp_path / "out.pt").testzip() is None
    found = torch.load(tmp_path / "out.pt")
    for name, last in states[1].items():
        expected = (states[0][name].double() + 2 * last.double()) / 3 if last.is_floating_point() else last
        if last.dtype in (torch.float16, torch.bfloat16):
            # torch rounds twice.
            assert (found[name].double() - expected).abs().nan_to_num(0).max() <= expected.abs().nan_to_num(0, 0, 0).max() * 2**-8, name
            assert torch.equal(found[name].isnan(), expected.isnan()), name
        else:
            assert torch.allclose(found[name], expected.to(last.dtype), rtol=0, atol=0, equal_nan=True), name


def test_memory_stays_small(tmp_path):
    """A file of 100 MB is never in memory as a whole."""
    for at in range(2):
        torch.save({"w": torch.full((5_000, 5_000), float(at))}, tmp_path / f"{at}.pt")
    for command in (["diff", "0.pt", "1.pt"], ["merge", "0.pt", "1.pt", "-o", "out.pt"]):
        done = subprocess.run([sys.executable, "-c", PEAK, BIN, *command], cwd=tmp_path, capture_output=True, text=True)
        assert int(done.stdout.split()[-1]) < 60_000, done.stdout + done.stderr


def test_a_signal_leaves_no_half_written_mean(tmp_path):
    paths = [tmp_path / f"{at}.pt" for at in range(2)]
    for at, path in enumerate(paths):
        torch.save({"w": torch.full((5_000, 5_000), float(at))}, path)
    process = subprocess.Popen([BIN, "merge", *paths, "-o", tmp_path / "out.pt"])
    while len(list(tmp_path.iterdir())) == 2:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert sorted(tmp_path.iterdir()) == paths


# Runs a command, and prints its largest resident memory in KiB.
PEAK = """
import resource, subprocess, sys
assert subprocess.run(sys.argv[1:]).returncode == 0
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
