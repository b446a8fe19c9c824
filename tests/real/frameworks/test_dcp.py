"""Torch's distributed checkpoint: FSDP2 on several ranks saves into a mount, and loads released steps on other numbers of ranks."""

import os
import pickle
import shutil
import subprocess
import sys
import zipfile

import harness
import pytest
import torch
from harness import run, run_json, wait_until
from series import difference, tensors_of, walk

STEPS = [f"step_{step:04d}" for step in range(25, 126, 25)]
TRAINER = os.path.join(os.path.dirname(__file__), "dcp_gpt.py")
SMALL = ["--layers", "2"]


def train(ranks, *args):
    """Runs the trainer on so many ranks; returns the held-out losses at its ends."""
    command = [sys.executable, TRAINER, "--ranks", str(ranks), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss ")]


class Distributed:
    def __init__(self, mount, plain):
        self.mount, self.plain = mount, plain


@pytest.fixture(scope="module")
def distributed():
    """Five checkpoints of two ranks, in a mount and in a directory."""
    opened = harness.open_mount(True)
    mount = next(opened)
    plain = mount.base / "plain"
    plain.mkdir()
    train(2, "--out", mount.dir, plain, "--iters", 125, *SMALL)
    mount.sync()
    yield Distributed(mount, plain)
    opened.close()


def in_one_file(folder, scratch):
    """torch's own conversion to a file of torch.save. Importing it takes seconds: only the process that runs this file does."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, scratch / "whole.pt")
    return scratch / "whole.pt"


def whole(folder, scratch):
    """All values of a distributed checkpoint."""
    return torch.load(in_one_file(folder, scratch))


def chunks(step, rank=None):
    return [f"{step}/__{rank}_0.distcp" for rank in ([0, 1] if rank is None else [rank])]


def test_all_but_the_newest_are_released_small(distributed):
    mount = distributed.mount
    mount.require_released(*(name for step in STEPS[:-1] for name in chunks(step)))
    for name in chunks(STEPS[-1]):
        assert (mount / name).read_bytes() == (distributed.plain / name).read_bytes()
    for step in STEPS[1:-1]:
        rows = [mount.entry(name) for name in [*chunks(step), f"{step}/.metadata"]]
        stored, size = sum(row["stored_bytes"] for row in rows), sum(row["logical_bytes"] for row in rows)
        assert stored <= 0.051 * size, f"{step}: {100 * stored / size:.2f} %"


def test_every_value_is_exact_or_within_its_bound(distributed, tmp_path):
    for step in STEPS[:-1]:
        exact, read = (tensors_of(whole(folder / step, tmp_path)) for folder in (distributed.plain, distributed.mount.dir))
        said = {name["path"].replace("/", "."): name for name in run_json("inspect", "--json", distributed.mount / step)["tensors"]}
        assert exact.keys() == read.keys() and len(said) > 50
        quantized = 0
        for path, tensor in exact.items():
            about = said.get(path, {"bound": 0, "max_abs_error": 0})
            assert difference(tensor, read[path]) <= about["max_abs_error"], f"{path}: {about}"
            quantized += about["bound"] > 0
        assert quantized >= 40, f"{step}: {quantized} of {len(exact)}"


def test_the_checkpoint_has_the_roles_of_the_same_state_saved_whole(distributed, tmp_path):
    """The same paths, roles and proof as in a file of torch.save."""
    file = in_one_file(distributed.plain / STEPS[0], tmp_path)
    fields = ("path", "role", "trained", "of", "partner", "shape")
    listed = [{tuple(str(tensor[field]) for field in fields) for tensor in run_json("inspect", "--json", path)["tensors"]
               if "step" not in tensor["path"].split("/")} for path in (distributed.plain / STEPS[0], file)]
    # The tied weight has one storage in the whole file, and two in the distributed one.
    tied = {row for rows in listed for row in rows if "wte" in str(row) or "head" in str(row)}
    assert listed[0] - tied == listed[1] - tied and len(listed[0] - tied) > 60


def test_each_zip_of_a_released_file_is_sound(distributed):
    with open(distributed.mount / STEPS[0] / ".metadata", "rb") as f:
        metadata = pickle.load(f)
    for info in metadata.storage_data.values():
        with open(distributed.mount / STEPS[0] / info.relative_path, "rb") as f:
            f.seek(info.offset)
            blob = distributed.mount.base / "blob.zip"
            blob.write_bytes(f.read(info.length))
        assert zipfile.ZipFile(blob).testzip() is None


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_goes_on_from_a_released_step_on_other_ranks(distributed, ranks):
    folders = [folder / STEPS[2] for folder in (distributed.mount.dir, distributed.plain)]
    losses = train(ranks, "--resume", *folders, "--iters", 10, *SMALL)
    assert abs(losses[0] - losses[1]) < 0.01, losses


@pytest.mark.slow
def test_asynchronous_saves_of_several_files_per_rank_shrink(mount):
    train(2, "--out", mount.dir, "--iters", 15, "--every", 5, "--async-save", "--threads", 2, *SMALL)
    mount.sync()
    rows = [row for row in mount.ls() if "step_0010/__" in row["path"] and row["logical_bytes"] >= 1 << 16]
    assert len(rows) > 20 and {row["state"] for row in rows} == {"released"}
    # A moment whose partner is in another file stays exact.
    assert sum(row["stored_bytes"] for row in rows) < 0.6 * sum(row["logical_bytes"] for row in rows)


def states(count):
    for state in walk(count):
        yield {"model": state["model"], "optim": {"state": {name: state["optimizer"]["state"][i] for i, name in enumerate(state["model"])},
                                                  "param_groups": [{"lr": 1e-3, "params": list(state["model"])}]}}


def write(state, folder):
    from torch.distributed.checkpoint import FileSystemWriter, save

    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


def test_a_save_without_metadata_is_no_newer_state(mount, plain):
    for number, state in enumerate(states(3), 1):
        write(state, plain / f"step_{number}")
    copy(plain / "step_1", mount / "step_1")
    # As an interrupted save leaves it.
    (mount / "step_2").mkdir()
    shutil.copy(plain / "step_2/__0_0.distcp", mount / "step_2")
    mount.sync()
    assert unfinished(mount, "step_2/__0_0.distcp")
    assert mount.state("step_1/__0_0.distcp") == "sealed"
    # Also for the next daemon.
    mount.remount()
    mount.sync()
    assert mount.state("step_1/__0_0.distcp") == "sealed" and unfinished(mount, "step_2/__0_0.distcp")
    shutil.copy(plain / "step_2/.metadata", mount / "step_2/.metadata.tmp")
    os.rename(mount / "step_2/.metadata.tmp", mount / "step_2/.metadata")
    mount.sync()
    assert not unfinished(mount, "step_2/__0_0.distcp")
    mount.require_released("step_1/__0_0.distcp")
    copy(plain / "step_3", mount / "step_3")
    mount.sync()
    mount.require_released("step_1/__0_0.distcp", "step_2/__0_0.distcp")


def test_retention_counts_finished_saves_only(mount, plain):
    for number, state in enumerate(states(3), 1):
        write(state, plain / f"step_{number}")
    mount.umount()
    settings = mount.store / "stepfs.toml"
    settings.write_text(settings.read_text() + '\n[[retention]]\nglob = "step_*"\nkeep_last = 1\n')
    mount.mount()
    (plain / "step_3/.metadata").rename(plain / "late")
    for number in (1, 2, 3):
        copy(plain / f"step_{number}", mount / f"step_{number}")
    wait_until(lambda: not (mount / "step_1").exists(), 10, "only the newest finished save stays")
    mount.sync()
    assert (mount / "step_2/.metadata").exists() and (mount / "step_3/__0_0.distcp").exists()
    shutil.copyfile(plain / "late", mount / "step_3/.metadata")
    wait_until(lambda: not (mount / "step_2").exists(), 10, "the third save is finished")


def copy(source, target):
    """Chunks first, as torch writes them."""
    target.mkdir(exist_ok=True)
    for name in sorted(os.listdir(source), reverse=True):
        shutil.copyfile(source / name, target / name)


def unfinished(mount, name):
    try:
        return os.getxattr(mount / name, "user.stepfs.why").startswith(b"the save is not finished")
    except OSError:
        return False


def test_a_save_over_another_that_is_cut_short_is_no_newer_state(mount, plain):
    for number, state in enumerate(states(4), 1):
        write(state, plain / f"step_{number}")
    for number in (1, 2, 3):
        copy(plain / f"step_{number}", mount / f"step_{number % 2}")
    # Over the state before the last; its .metadata is still the old one.
    shutil.copyfile(plain / "step_4/__0_0.distcp", mount / "step_0/__0_0.distcp")
    mount.sync()
    assert unfinished(mount, "step_0/__0_0.distcp") and mount.state("step_1/__0_0.distcp") == "sealed"
    assert (mount / "step_1/__0_0.distcp").read_bytes() == (plain / "step_3/__0_0.distcp").read_bytes()


def test_a_copy_that_gets_metadata_first_is_finished(mount, plain):
    for number, state in enumerate(states(2), 1):
        write(state, plain / f"step_{number}")
        (mount / f"step_{number}").mkdir()
        for name in (".metadata", "__0_0.distcp"):
            shutil.copyfile(plain / f"step_{number}" / name, mount / f"step_{number}" / name)
    mount.sync()
    mount.require_released("step_1/__0_0.distcp")


def test_a_checkpoint_that_lost_its_metadata_is_no_newer_state(mount, plain):
    for number, state in enumerate(states(2), 1):
        write(state, plain / f"step_{number}")
    copy(plain / "step_1", mount / "step_1")
    run("pin", mount / "step_1")
    copy(plain / "step_2", mount / "step_2")
    mount.sync()
    (mount / "step_2/.metadata").unlink()
    run("unpin", mount / "step_1")
    mount.sync()
    assert unfinished(mount, "step_2/__0_0.distcp") and mount.state("step_1/__0_0.distcp") == "sealed"


@pytest.mark.slow
def test_ranks_are_no_states_of_each_other(mount):
    """Cut evenly, so that their files look alike, in a directory whose name counts nothing."""
    train(2, "--out", mount.dir, "--iters", 5, "--every", 5, *SMALL)
    (mount / "step_0005").rename(mount / "last.ckpt")
    shutil.copyfile(mount / "last.ckpt/__0_0.distcp", mount.base / "rank")
    mount.sync()
    assert {mount.state(f"last.ckpt/__{rank}_0.distcp") for rank in (0, 1)} == {"sealed"}


def test_other_ranks_begin_a_lineage_of_their_own(distributed, tmp_path):
    mount = distributed.mount
    before = {name: mount.state(name) for name in chunks(STEPS[-1])}
    train(1, "--resume", distributed.plain / STEPS[-1], "--out", mount.dir, "--iters", 25, *SMALL)
    mount.sync()
    assert mount.state("step_0150/__0_0.distcp") == "sealed"
    assert {name: mount.state(name) for name in before} == before, "no later state of two ranks is there"


def test_metadata_that_says_nothing_finishes_nothing(mount, plain):
    for number, state in enumerate(states(3), 1):
        write(state, plain / f"step_{number}")
        (plain / f"step_{number}/.metadata").write_bytes([b"", b"\x80\x02}q\x00.", os.urandom(1000)][number - 1])
        copy(plain / f"step_{number}", mount / f"step_{number}")
    mount.sync()
    for number in (1, 2, 3):
        name = f"step_{number}/__0_0.distcp"
        assert unfinished(mount, name)
        assert (mount / name).read_bytes() == (plain / name).read_bytes()
