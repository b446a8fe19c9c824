"""Frameworks whose ranks save through mounts of their own into one store."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import elasticdl_files as elasticdl
import numpy as np
import pytest
from guests import in_guests
from nodes import open_nodes, verify

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]
ports = count()
DCP = Path(__file__).parents[1] / "frameworks/dcp_gpt.py"


@pytest.fixture
def nodes(request):
    yield from open_nodes(request.param)


def dcp(nodes, ranks, *args):
    """Each rank runs where its node is. In guests, these are two machines."""
    places = {}
    for rank in range(ranks):
        places.setdefault(nodes[rank].name_of_place(), []).append(rank)
    options = dict(capture_output=True, text=True, timeout=900)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(DCP), "--layers", "2", "--ranks", str(ranks), *map(str, args)]
    if in_guests():
        environment["GLOO_SOCKET_IFNAME"] = "vec1"
        command += ["--master", f"{nodes[0].guest.shared_address}:{29500 + next(ports)}"]

    def start(here):
        return nodes[here[0]].call("subprocess.run", [*command, "--only", *map(str, here)], env=environment, **options)

    with ThreadPoolExecutor() as threads:
        ended = list(threads.map(start, places.values()))
    for done in ended:
        assert done.returncode == 0, done.stderr[-3000:]
    return [float(line.split()[1]) for done in ended for line in done.stdout.splitlines() if line.startswith("loss ")]


@pytest.mark.parametrize("nodes", [4], indirect=True)
def test_four_ranks_on_four_mounts(nodes):
    # Where all ranks reach it.
    plain = nodes.store.parent / "plain"
    plain.mkdir()
    mounts = f"{nodes.base}/node{{rank}}/mnt"
    dcp(nodes, 4, "--out", mounts, plain, "--iters", 50, "--every", 10, "--keep", 3)
    keeper = nodes.keeper()
    steps = [f"step_{step:04d}" for step in (30, 40, 50)]
    assert [sorted(node.call("os.listdir", node.dir)) for node in nodes] == [steps] * 4, "rank 0 removes old checkpoints of all ranks"
    keeper.sync()
    chunks = lambda step: [f"{step}/__{rank}_0.distcp" for rank in range(4)]
    keeper.require_released(*(name for step in steps[:-1] for name in chunks(step)))
    for name in chunks(steps[-1]):
        assert all((node / name).read_bytes() == (plain / name).read_bytes() for node in nodes)
    # Each released file has the same bytes everywhere.
    for name in chunks(steps[0]):
        assert len({(node / name).read_bytes() for node in nodes}) == 1
    exact = dcp(nodes, 1, "--iters", 5, "--resume", plain / steps[0])
    for ranks in (1, 2, 4):
        [loss] = dcp(nodes, ranks, "--iters", 5, "--resume", f"{mounts}/{steps[0]}")
        assert abs(loss - exact[0]) < 0.2, (ranks, loss, exact)
    verify(nodes.store)


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_a_trainer_rotates_files_that_another_node_reads(nodes):
    writer, reader = nodes
    kept = lambda node: sorted(node.call("os.listdir", node.dir), key=lambda name: int(name.split("-")[1]))
    for step in range(5, 35, 5):
        weights = writer.call("trainer_jobs.rotate", writer.dir)
        assert kept(reader) == [f"checkpoint-{at}" for at in range(max(5, step - 10), step + 5, 5)]
        newest = f"checkpoint-{step}/model.safetensors"
        assert (reader / newest).read_bytes() == (writer / newest).read_bytes()
    keeper = nodes.keeper()
    keeper.sync()
    keeper.require_released("checkpoint-20/model.safetensors", "checkpoint-20/optimizer.pt")
    for node in nodes:
        assert node.call("trainer_jobs.load", node.dir / "checkpoint-30").items() >= weights.items()
    # The other node goes on, from a checkpoint that is released by then, and saves over the next one.
    reader.call("trainer_jobs.rotate", reader.dir, "checkpoint-25")
    reader.call("trainer_jobs.rotate", reader.dir)
    assert kept(writer) == kept(reader) == [f"checkpoint-{step}" for step in (25, 30, 35)]
    verify(nodes.store)


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_servers_of_elasticdl_save_their_shards(nodes, tmp_path):
    """Each through a mount of its own. Server 0 removes old versions."""
    rng, saved = np.random.default_rng(7), []

    def save(server):
        node, name = nodes[server], f"variables-{server}-of-2.ckpt"
        (node / saved[-1]).mkdir(exist_ok=True)
        (node / saved[-1] / name).write_bytes((tmp_path / saved[-1] / name).read_bytes())
        for old in saved[:-4] if server == 0 else ():
            node.call("shutil.rmtree", node.dir / old, True)

    for version, state in enumerate(elasticdl.train(6)):
        saved.append(f"version-{version}")
        elasticdl.save(tmp_path / saved[-1], version, state, 2, rng)
        with ThreadPoolExecutor() as threads:
            list(threads.map(save, range(2)))
    keeper = nodes.keeper()
    keeper.sync()
    *released, newest = saved[-4:]
    keeper.require_released(*(f"{version}/variables-{server}-of-2.ckpt" for version in released for server in range(2)))
    for node in nodes:
        assert sorted(node.call("os.listdir", node.dir)) == saved[-4:]
        restored = lambda version, server, servers: node.call("elasticdl_files.restore", node.dir / version, server, servers)
        assert elasticdl.same(restored(newest, 0, 1), elasticdl.everything(tmp_path / newest))
        for version in released:
            assert all(elasticdl.check_file(node, tmp_path, f"{version}/variables-{server}-of-2.ckpt") >= 2 for server in range(2))
            # Three servers take over.
            taken = [restored(version, server, 3) for server in range(3)]
            assert set().union(*(rows for _, _, rows in taken)) == set(elasticdl.everything(tmp_path / version)[2])
    verify(nodes.store)
