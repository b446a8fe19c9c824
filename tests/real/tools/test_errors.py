"""Each entry of the catalogue of mistakes: the command fails as written, and its next step works."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from harness import BIN, ROOT, make_base, mounts_below, remove_base, run
from mistakes import MISTAKES, pattern
from series import save_walk, walk

pytestmark = pytest.mark.stepfs
# Just above the length from which a file is released.
SHAPES = {"w.weight": (128, 128), "b.weight": (64, 128)}


def bash(line, cwd, *words, strict=True):
    """Runs a line as a user types it; mounts that it makes are below `cwd`."""
    flags = "-euo" if strict else "-o"
    environment = {**os.environ, "PATH": f"{cwd.parent}/bin:{os.environ['PATH']}", "M": f"{cwd.parent}/m", "S": f"{cwd.parent}/live",
                   "PYTHON": sys.executable}
    return subprocess.run(["bash", flags, "pipefail", "-c", line, "bash", *words], cwd=cwd, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, errors="replace", timeout=100)


@pytest.fixture(scope="module")
def ready():
    """The things that entries need, and a mount of a store that they share."""
    base = make_base()
    os.chmod(base, 0o755)
    (base / "bin").mkdir()
    (base / "bin/stepfs").symlink_to(Path(BIN).resolve())
    for name, shapes in (("run", SHAPES), ("tiny", {"w.weight": (16, 16)})):
        (base / name).mkdir()
        save_walk(base / name, 4, name="step_{}.pt", shapes=shapes)
        # Saved within a tick of the clock, two files of one length could not be told apart once their stubs are zeros.
        for at, file in enumerate(sorted((base / name).iterdir())):
            os.utime(file, (1_700_000_000 + at, 1_700_000_000 + at))
    torch.save(next(walk(1, shapes={"other": (200, 128)})), base / "other.pt")
    run("import", base / "st", base / "run")
    for copy in ("live", "mirrored"):
        (base / copy).mkdir()
        subprocess.run(["cp", "-a", f"{base}/st/.", base / copy], check=True)
    run("mount", base / "mirrored", base / "m", "--mirror", f"file://{base}/mir")
    run("sync", "--mirror", base / "m")
    run("umount", base / "m")
    sys.path.insert(0, str(ROOT / "tests/real/frameworks"))
    import elasticdl_files as elasticdl

    elasticdl.save(base / "edl", 40, next(elasticdl.train(1, rows=600)), 2)
    run("mount", base / "live", base / "m")
    yield base
    run("umount", "--force", base / "m", check=False)
    remove_base(base)


@pytest.fixture
def place(ready):
    place = Path(tempfile.mkdtemp(dir=ready))
    yield place
    for point in mounts_below(place):
        run("umount", "--force", point, check=False)
    remove_base(place)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.when.replace(" ", "_"))
def test_a_mistake_and_its_next_step(ready, place, mistake):
    if "root" in mistake.needs and os.geteuid() != 0:
        pytest.skip("works as another user")
    for name in set(mistake.needs.split()) - {"M", "root"}:
        subprocess.run(["cp", "-a", ready / name, place / name], check=True)
    shutil.copy(ready / "other.pt", place)
    made = bash(mistake.make, place)
    assert made.returncode == 0, made
    done = bash(mistake.run, place, strict=False)
    words = done.stdout + done.stderr
    assert done.returncode == mistake.code and "panicked" not in words, (done.returncode, words)
    groups = []
    for text in mistake.patterns:
        found = pattern(text).search(words)
        assert found, f"not said: {text}\n{words}"
        groups += found.groups()
    then = bash(mistake.then, place, *groups)
    assert then.returncode == 0, (mistake.then, groups, then.stdout + then.stderr)


def test_each_message_has_an_entry_or_a_reason():
    done = subprocess.run([sys.executable, ROOT / "scripts/errors.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_command_shows_an_example():
    words = run("--help").stdout
    commands = re.findall(r"(?m)^  ([a-z]+) ", words.split("Options:")[0])
    assert len(commands) > 20 and "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 damage found." in words
    for command in commands:
        assert re.search(rf"(?s)Examples?:.*stepfs {command} ", run(command, "--help").stdout), command
