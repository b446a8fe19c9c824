"""Frameworks whose ranks save through mounts of their own into one store."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
import torch
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
    states = keeper.states()
    chunks = lambda step: [f"{step}/__{rank}_0.distcp" for rank in range(4)]
    assert {states[name] for step in steps[:-1] for name in chunks(step)} == {"released"}, states
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


@pytest.mark.skipif(in_guests(), reason="its callback looks from one process at both mounts")
@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_a_trainer_rotates_files_that_another_node_reads(nodes):
    import trainer_jobs as jobs

    writer, reader = nodes
    kept = []

    class Look(jobs.TrainerCallback):
        def on_save(self, args, state, control, **rest):
            names = sorted((path.name for path in reader.dir.glob("checkpoint-*")), key=lambda name: int(name.split("-")[1]))
            kept.append(names)
            newest = reader / names[-1] / "model.safetensors"
            assert newest.read_bytes() == (writer / names[-1] / "model.safetensors").read_bytes()

    job = jobs.trainer(writer.dir, jobs.model(96, 3, 4), jobs.noise(64, 1), Look(), max_steps=30, save_steps=5, save_total_limit=3,
                       logging_steps=5, per_device_train_batch_size=4, learning_rate=1e-3)
    job.train()
    assert kept[-1] == [f"checkpoint-{step}" for step in (20, 25, 30)]
    keeper = nodes.keeper()
    keeper.sync()
    states = keeper.states()
    assert states["checkpoint-20/model.safetensors"] == "released" == states["checkpoint-20/optimizer.pt"], states
    for node in nodes:
        read = type(job.model).from_pretrained(node / "checkpoint-30").state_dict()
        final = job.model.state_dict()
        assert all(torch.equal(read[name], tensor) for name, tensor in final.items())
    again = jobs.trainer(reader.dir, jobs.model(96, 3, 4), jobs.noise(64, 1), Look(), max_steps=35, save_steps=5, save_total_limit=3,
                         logging_steps=5, per_device_train_batch_size=4, learning_rate=1e-3)
    again.train(resume_from_checkpoint=str(reader / "checkpoint-25"))
    assert again.state.global_step == 35 and sorted(os.listdir(writer.dir)) == sorted(os.listdir(reader.dir))
    verify(nodes.store)
