"""`stepfs tune`: the search for a profile, driven by the held-out loss of a real model and by commands that misbehave."""

import contextlib
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading

import gpt
import pytest
import torch
from harness import BIN, FAILURE, USAGE, run, run_json, wait_until
from series import save_walk

pytestmark = pytest.mark.stepfs

# Asks the scorer: a command that imported torch for each candidate would take minutes.
ASK = """
import socket, sys
asked = socket.socket(socket.AF_UNIX)
asked.connect(sys.argv[1])
asked.sendall(sys.argv[2].encode() + b"\\n")
print("score of", sys.argv[2])
print(asked.makefile().readline().strip())
"""
# A model that trains in seconds; its checkpoints are like any other's.
SMALL = dict(layers=1, width=64)
# Seconds. A search uses all cores: ten seconds alone, minutes beside other searches.
SEARCH = 900
# Tests that depend on no size use a series of an eighth of a megabyte: a search tries 183 configurations.
SHAPES = {"wte.weight": (32, 64), "block.attn.weight": (48, 64), "block.attn.bias": (48,), "block.up.weight": (64, 64), "ln.weight": (64,)}


class Scorer(socketserver.StreamRequestHandler):
    def handle(self):
        try:
            answer = self.server.score(self.rfile.readline().decode().strip())
        except Exception as error:  # the command's answer is then no number
            answer = repr(error)
        self.wfile.write(f"{answer}\n".encode())


@contextlib.contextmanager
def scoring(folder, score):
    """A command that prints the `score` of its last argument, a path."""
    (folder / "ask.py").write_text(ASK)
    with socketserver.UnixStreamServer(str(folder / "scorer"), Scorer) as server:
        server.score = score
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"{sys.executable} -S {folder / 'ask.py'} {folder / 'scorer'}"
        server.shutdown()


def held_out_loss(path, windows=8):
    state = torch.load(path, map_location="cpu")
    config = gpt.Config(**state["config"])
    model, _ = gpt.build(config)
    model.load_state_dict(state["model"])
    return gpt.held_out_loss(model, config, HELD_OUT, windows)


HELD_OUT = gpt.corpus()[1]


@pytest.fixture(scope="module")
def small_gpt(tmp_path_factory):
    """Four checkpoints of a small GPT, and the command that scores one."""
    folder = tmp_path_factory.mktemp("gpt")
    names = gpt.train([str(folder)], 60, 15, config=gpt.Config(**SMALL), say=lambda line: None)
    with scoring(folder, held_out_loss) as command:
        yield [folder / name for name in names], command


@pytest.fixture
def files(tmp_path):
    """Two checkpoints of a walk."""
    return [tmp_path / name for name in save_walk(tmp_path, 2, seed=5, shapes=SHAPES)]


def new_store(path, source):
    run("import", path, source)
    return path


def failure(*args, code=FAILURE, **options):
    done = run("tune", *args, check=False, **options)
    assert done.returncode == code, done.stdout + done.stderr
    assert "panicked" not in done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_real_score_decides_and_the_store_gets_it(small_gpt, tmp_path):
    files, command = small_gpt
    files = files[-2:]
    store = new_store(tmp_path / "store", files[0])
    settings = store / "stepfs.toml"
    settings.write_text("# of our own\n" + settings.read_text().replace('"balanced"\n', '"balanced" # for now\n', 1))
    before = settings.read_text()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = run_json("tune", *files, "--eval", command, "--tolerance", "0.5%", "--store", store, "--tmp", scratch, "--json",
                     timeout=SEARCH)
    exact = held_out_loss(files[-1])
    assert found["exact_score"] == pytest.approx(exact, rel=1e-4)
    candidates = {candidate["profile"]: candidate for candidate in found["candidates"]}
    assert {"exact", "balanced", "compact"} < candidates.keys()
    assert candidates["exact"]["error"] == 0 and candidates["exact"]["score"] == pytest.approx(exact, rel=1e-4)
    for candidate in candidates.values():
        worse = (candidate["score"] - found["exact_score"]) / found["exact_score"]
        assert candidate["degradation"] == pytest.approx(worse, abs=1e-9)
        assert candidate["good"] == (worse <= 0.005)
        assert candidate["bytes"] == candidate["series_bytes"][-1] and len(candidate["series_bytes"]) == len(files)
    tried = [candidate for name, candidate in candidates.items() if name.startswith("inshrinkerator")]
    assert any(not candidate["good"] for candidate in tried), "the most aggressive are too much"
    chosen = candidates[found["chosen"]]
    assert chosen["good"] and chosen["bytes"] == min(c["bytes"] for c in candidates.values() if c["good"])
    # Only the one word changes.
    assert settings.read_text() == before.replace('"balanced" # for now', f'"{found["chosen"]}" # for now')
    assert not list(scratch.iterdir())
    run("import", store, files[1])
    run("verify", store)


@pytest.mark.slow
def test_a_configuration_that_was_found_works_in_a_store(small_gpt, tmp_path):
    """The score is of the file that a store gives back under the configuration."""
    files, command = small_gpt
    seen = tmp_path / "seen.pt"
    found = run_json("tune", *files[:3], "--eval", f"cp \"$1\" {seen}; {command} \"$1\"", "--tolerance", "20%", "--near",
                     "inshrinkerator-12bins-prune20", "--json", timeout=SEARCH)
    tried = [candidate["profile"] for candidate in found["candidates"] if candidate["profile"].startswith("inshrinkerator")]
    assert tried and found["chosen"] in [candidate["profile"] for candidate in found["candidates"]]
    store = tmp_path / "store"
    run("import", store, files[0])
    (store / "stepfs.toml").write_text((store / "stepfs.toml").read_text().replace('"balanced"', f'"{tried[-1]}"', 1))
    again = tmp_path / "again"
    again.mkdir()
    for at, file in enumerate(files):
        os.utime(file, (1_700_000_000 + at, 1_700_000_000 + at))
    run("import", store, *files[1:])
    out = tmp_path / "out.pt"
    run("export", store, files[2].name, out)
    assert torch.load(out)["step"] == 45
    assert out.stat().st_size == files[2].stat().st_size
    run("verify", store)


@pytest.mark.slow
def test_without_a_score_the_error_decides(files):
    found = run_json("tune", *reversed(files), "--json", timeout=SEARCH)
    assert found["files"] == [str(file) for file in files], "in the order that their names say"
    for candidate in found["candidates"]:
        assert candidate["good"] == (candidate["error"] <= 0.75) and candidate["score"] is None
    loose = run("tune", *files, "--tolerance", "1000%", timeout=SEARCH).stdout
    assert re.search(r'(?s)^Use (\S+)\n.*of the update.*default_profile = "\1"\n$', loose), loose


@pytest.mark.nightly
def test_higher_is_better(files, tmp_path):
    """A score that falls with the error: the largest weight's deviation, negated."""
    newest = torch.load(files[-1])["model"]["wte.weight"]
    score = lambda path: 1 - (torch.load(path)["model"]["wte.weight"] - newest).square().mean().item()
    with scoring(tmp_path, score) as command:
        found = run_json("tune", *files, "--eval", command, "--higher-is-better", "--absolute", "--tolerance", "1e-7", "--json", timeout=SEARCH)
    assert found["exact_score"] == 1
    assert any(candidate["good"] for candidate in found["candidates"])
    assert all(candidate["good"] == (1 - candidate["score"] <= 1e-7) for candidate in found["candidates"])


@pytest.mark.parametrize("command, words", [
    ("false", "failed"),
    ("echo why >&2; exit 7 #", "why"),
    ("true", "must be a number"),
    ("echo loss 3 #", "must be a number"),
    ("echo nan #", "must print a finite number"),
    ("echo 0 #", "--absolute"),
    ("/nowhere/to/be/found", "failed"),
    # Only of the restored file: its path is another one.
    ("case $1 in */stepfs-tune-*) exit 9;; esac; echo 1", "exact: --eval"),
    ("case $1 in */stepfs-tune-*) echo 2;; *) echo 1;; esac", "same bytes"),
])
def test_commands_that_fail(files, tmp_path, command, words):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert words in failure(*files, "--eval", command, "--tmp", scratch)
    assert not list(scratch.iterdir())


@pytest.mark.nightly
def test_what_is_not_a_number_is_not_good_enough(files):
    """A destroyed model may well score NaN: a valid answer, but a failed one."""
    command = f"cmp -s \"$1\" {files[-1]} && echo 1 || echo nan"
    found = run_json("tune", *files, "--eval", command, "--json", timeout=SEARCH)
    assert found["chosen"] == "exact"


@pytest.mark.parametrize("when", ["evaluating", "searching"])
def test_an_interrupt_leaves_nothing(files, tmp_path, when):
    store = new_store(tmp_path / "store", files[0])
    settings = (store / "stepfs.toml").read_text()
    scratch, started = tmp_path / "scratch", tmp_path / "started"
    scratch.mkdir()
    command = f"echo $$ >> {started}; exec sleep 1000" if when == "evaluating" else f"echo $$ >> {started}; echo 1"
    tune = subprocess.Popen([BIN, "tune", *files, "--eval", f"{command} #", "--store", store, "--tmp", scratch],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: started.exists() and started.read_text(), 60, "the command was started")
    tune.send_signal(signal.SIGINT)
    _, said = tune.communicate(timeout=60)
    assert tune.returncode == 128 + signal.SIGINT and "interrupted" in said
    assert not list(scratch.iterdir()) and (store / "stepfs.toml").read_text() == settings
    pids = started.read_text().split()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids), "its processes are gone"


def test_wrong_files(files, tmp_path):
    assert "at least two" in failure(files[0])
    (tmp_path / "empty").mkdir()
    assert "without checkpoints" in failure(files[0], tmp_path / "empty")
    assert "No such file" in failure(files[0], tmp_path / "none.pt")
    noise = tmp_path / "noise.pt"
    noise.write_bytes(os.urandom(200_000))
    assert "not a checkpoint" in failure(files[0], noise)
    small = tmp_path / "small.pt"
    torch.save({"a": torch.zeros(10)}, small)
    assert "below" in failure(small, small)
    other = tmp_path / "other.pt"
    torch.save({"model": {"other.weight": torch.randn(256, 256)}}, other)
    assert "not of the same model" in failure(files[0], other)
    assert "its weights are the same" in failure(files[0], files[0])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "neither a file nor a directory" in failure(files[0], pipe, timeout=20)
    failure(code=USAGE)
    for wrong in (["--tolerance", "-1"], ["--tolerance", "much"], ["--near", "lc-3"], ["--higher-is-better"]):
        failure(*files, *wrong, code=USAGE)


def test_files_that_are_lossy_already_are_refused(files, mount):
    names = save_walk(mount.dir, 3, seed=5)
    mount.sync()
    mount.require_released(*names[:-1])
    for given, first in [([mount / name for name in names], f"{names[0]} and 1 more"), ([mount.dir], f"{names[0]} and 1 more"),
                         ([mount / names[0], mount / names[-1]], names[0])]:
        said = failure(*given)
        assert f"{first}: stepfs has released this with loss (errors up to weight " in said, said
        assert "stepfs profile --set exact" in said
    # The newest is exact.
    assert "not of the same model" in failure(mount / names[-1], files[0])


@pytest.mark.slow
def test_a_store_in_use_and_one_that_is_none(files, mount, tmp_path):
    save_walk(mount.dir, 1, seed=5)
    before = (mount.store / "stepfs.toml").read_text()
    assert "in use" in failure(*files, "--store", mount.store)
    assert (mount.store / "stepfs.toml").read_text() == before
    mount.umount()
    # Any error is good enough, so the search ends soon.
    chosen = run_json("tune", *files, "--tolerance", "1000%", "--store", mount.store, "--json", timeout=SEARCH)["chosen"]
    assert f'default_profile = "{chosen}"' in (mount.store / "stepfs.toml").read_text() and chosen != "balanced"
    failure(*files, "--store", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert "eval.py" in run("tune", "--help").stdout
