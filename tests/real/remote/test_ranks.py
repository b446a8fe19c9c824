"""Ranks on machines of their own: each saves and loads through its own mount of one remote."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, run
from remotes import KINDS

FRAMEWORKS = ROOT / "tests/real/frameworks"
sys.path.insert(0, str(FRAMEWORKS))

import elasticdl_files as elasticdl  # noqa: E402

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]

SMALL = ["--layers", "2", "--width", "64"]


def read(path):
    with open(path, "rb") as f:
        return f.read()


def train(ranks, *args):
    """Runs the trainer on so many ranks; returns the held-out loss at its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node",
               str(ranks), FRAMEWORKS / "dcp_gpt.py", *args, *SMALL]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=900,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return float(done.stdout.split("loss ")[1].split()[0])


# Minutes of training; other tests send less to a bucket.
@pytest.mark.parametrize("remote", [pytest.param(kind, marks=[pytest.mark.nightly] if kind == "s3" else []) for kind in KINDS], indirect=True)
def test_four_ranks_save_one_checkpoint_through_four_mounts(remote, nodes, tmp_path):
    four = [nodes('wait = "close"') for _ in range(4)]
    train(4, "--own", "--out", *(node.dir for node in four), "--iters", 4, "--every", 2)
    plain = Path(tmp_path)
    # The trainer has looked at the names after each save. The older save may be lossy by now, on one node after another.
    os.mkdir(plain / "step_0004")
    for name in sorted(os.listdir(four[0] / "step_0004")):
        first = read(four[0] / "step_0004" / name)
        assert all(read(node / "step_0004" / name) == first for node in four[1:]), name
        (plain / "step_0004" / name).write_bytes(first)
    for ranks in (2, 4):
        through = train(ranks, "--own", "--resume", *(node / "step_0004" for node in four), "--iters", 1)
        assert through == train(ranks, "--resume", plain / "step_0004", "--iters", 1)


def test_elasticdl_servers_on_mounts_of_their_own_and_reshard_from_the_remote(remote, nodes, tmp_path):
    servers = [nodes('wait = "close"') for _ in range(2)]
    names = [f"variables-{server}-of-2.ckpt" for server in range(2)]
    versions = (10, 20, 30)
    for version, state in zip(versions, elasticdl.train(len(versions))):
        elasticdl.save(tmp_path / f"plain/version-{version}", version, state, 2)
        for node, name in zip(servers, names):
            # Each server writes its own file.
            os.makedirs(node / f"version-{version}", exist_ok=True)
            (node / f"version-{version}" / name).write_bytes(read(tmp_path / f"plain/version-{version}" / name))
    for node in servers:
        for name in names:
            assert read(node / "version-30" / name) == read(tmp_path / "plain/version-30" / name)
    os.mkdir(tmp_path / "wanted")
    run("reshard", tmp_path / "plain/version-30", 3, tmp_path / "wanted/version-30")
    for number, source in enumerate((servers[0] / "version-30", f"{remote.url}:version-30", nodes() / "version-30")):
        target = tmp_path / f"new_{number}/version-30"
        os.mkdir(target.parent)
        run("reshard", source, 3, target)
        for name in os.listdir(tmp_path / "wanted/version-30"):
            assert read(target / name) == read(tmp_path / "wanted/version-30" / name), (source, name)
