"""Retention by the rules of stepfs.toml: files of real programs, and the ones that remain."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from bounds import check_within_bounds
from harness import FAILURE, OK, require_clean, run, run_json, wait_until
from series import save_walk, walk

pytestmark = pytest.mark.stepfs


def set_rules(mount, *rules):
    """Mount anew with these rules, each (glob, lines)."""
    mount.umount()
    settings = mount.store / "stepfs.toml"
    text = settings.read_text() + "".join(f'\n[[retention]]\nglob = "{glob}"\n' + "\n".join(lines) + "\n" for glob, *lines in rules)
    settings.write_text(text)
    mount.mount()


def gc(path, *options):
    return run_json("gc", "--json", *options, path)


def going(report):
    return [line["path"] for line in report["checkpoints"] if line["verdict"] == "remove"]


def names(folder):
    return sorted(os.listdir(folder))


def test_a_series_of_torch_saves(both):
    set_rules(both, ("run/step_*.pt", "keep_last = 3", "keep_every = 5"))
    os.mkdir(both / "run")
    states = {}
    for step, state in enumerate(walk(16, seed=301), 1):
        states[step] = state
        torch.save(state, both / f"run/step_{step:04d}.pt")
    left = [f"step_{step:04d}.pt" for step in (5, 10, 14, 15, 16)]
    wait_until(lambda: names(both / "run") == left, 60, f"only {left} are left")
    both.sync()
    both.require_released(*(f"run/{name}" for name in left[:-1]))
    for step in (5, 10, 14, 15, 16):
        name = f"run/step_{step:04d}.pt"
        quantized = check_within_bounds(both, name, states[step], torch.load(both / name))
        assert step != 16 or quantized == 0, "the newest is exact"
    content = {name: (both / "run" / name).read_bytes() for name in left}
    assert going(gc(both.dir)) == []
    both.umount()
    require_clean(both.store)
    assert going(gc(both.store)) == []
    both.mount()
    assert {name: (both / "run" / name).read_bytes() for name in left} == content


def test_gc_by_hand_mounted_and_not(mount):
    save_walk(mount.dir, 8, seed=303)
    mount.sync()
    mount.umount()
    before = {p: p.stat().st_mtime_ns for p in mount.store.rglob("*")}
    text = (mount.store / "stepfs.toml").read_text()
    (mount.store / "stepfs.toml").write_text(text + '\n[[retention]]\nglob = "step_*.pt"\nkeep_last = 5\n')
    dry = gc(mount.store, "--dry-run")
    assert going(dry) == [f"step_000{i}.pt" for i in (1, 2, 3)]
    assert {p: p.stat().st_mtime_ns for p in mount.store.rglob("*") if p.name != "stepfs.toml"} == {
        p: t for p, t in before.items() if p.name != "stepfs.toml"}
    done = gc(mount.store)
    assert going(done) == going(dry)
    assert done["stored_after"] < done["stored_before"]
    require_clean(mount.store)
    content = {i: (mount.store / f"tree/step_000{i}.pt").stat().st_size for i in range(4, 9)}
    (mount.store / "stepfs.toml").write_text(text + '\n[[retention]]\nglob = "step_*.pt"\nkeep_last = 2\n')
    mount.mount()
    words = run("gc", mount.dir).stdout
    wait_until(lambda: names(mount.dir) == ["step_0007.pt", "step_0008.pt"], 30, "two are left")
    assert "freed" in words
    assert run("gc", "--dry-run", "-v", mount.dir).stdout.count("stays") == 2
    busy = run("gc", mount.store, check=False)
    assert busy.returncode == FAILURE and "mounted" in busy.stderr
    assert os.stat(mount / "step_0007.pt").st_size == content[7]


def test_gc_takes_wrong_paths_and_rules_in_words(mount, plain):
    for path in (plain, plain / "nothing"):
        done = run("gc", path, check=False)
        assert done.returncode == FAILURE and done.stderr.startswith("stepfs: ")
    mount.umount()
    with open(mount.store / "stepfs.toml", "a") as settings:
        settings.write('\n[[retention]]\nglob = "*"\nkeep_for = "-1d"\n')
    for command in (["gc", mount.store], ["gc", "--dry-run", mount.store], mount.arguments()):
        done = run(*command, check=False)
        assert done.returncode == FAILURE and "-1d" in done.stderr


WRITER = """
import os, sys, time
root, shard, versions, pause = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), float(sys.argv[4])
for version in versions:
    folder = f"{root}/version-{version}"
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/variables-{shard}-of-2.ckpt", "wb") as file:
        for part in range(4):
            file.write(f"{version} {shard} {part} ".encode() * 10_000)
            time.sleep(pause)
"""


def is_valid(folder):
    """As ElasticDL's CheckpointSaver.check_checkpoint_valid."""
    entries = os.listdir(folder)
    return bool(entries) and len(entries) == int(entries[0].split("-of-")[1].split(".")[0])


def test_version_directories_of_two_writers(mount):
    set_rules(mount, ("ckpt/version-*", "keep_checkpoint_max = 3"))
    root = mount / "ckpt"
    os.mkdir(root)
    versions = [str(v) for v in range(10, 130, 10)]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, root, str(shard), ",".join(versions), str(pause)])
               for shard, pause in ((0, 0.005), (1, 0.02))]
    valid_before, lost = set(), []

    def valid_versions():
        valid = set()
        for name in os.listdir(root):
            try:
                if is_valid(root / name):
                    valid.add(int(name.split("-")[1]))
            except (FileNotFoundError, ValueError):
                pass  # it has gone meanwhile
        return valid

    while any(writer.poll() is None for writer in writers):
        valid = valid_versions()
        if valid_before and (not valid or max(valid) < max(valid_before)):
            lost.append((valid_before, valid))
        valid_before = valid or valid_before
        time.sleep(0.01)
    assert [writer.wait() for writer in writers] == [0, 0]
    assert not lost, f"the newest valid version went: {lost}"
    wait_until(lambda: names(root) == ["version-100", "version-110", "version-120"], 30, "three are left")
    for version in (100, 110, 120):
        for shard in (0, 1):
            expected = b"".join(f"{version} {shard} {part} ".encode() * 10_000 for part in range(4))
            assert (root / f"version-{version}/variables-{shard}-of-2.ckpt").read_bytes() == expected


def test_checkpoint_directories_under_load(mount):
    """A trainer's directories come and go while others read; nothing half removed ever remains."""
    set_rules(mount, ("**/checkpoint-*/", "keep_last = 2"))
    stop, trouble = threading.Event(), []

    def read():
        while not stop.is_set():
            for name in names(mount.dir):
                try:
                    torch.load(mount / name / "model.pt")
                except FileNotFoundError:
                    pass  # removed between the two
                except Exception as error:  # noqa: BLE001
                    trouble.append(f"{name}: {error!r}")

    reader = threading.Thread(target=read)
    for step, state in enumerate(walk(10, seed=305), 1):
        folder = mount / f"checkpoint-{step}"
        os.mkdir(folder)
        torch.save(state["model"], folder / "part")
        os.rename(folder / "part", folder / "model.pt")
        torch.save(state["optimizer"], folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text("{}")
        if step == 1:
            reader.start()
    wait_until(lambda: names(mount.dir) == ["checkpoint-10", "checkpoint-9"], 60, "two are left")
    stop.set()
    reader.join()
    assert not trouble, trouble
    assert names(mount / "checkpoint-9") == ["model.pt", "optimizer.pt", "trainer_state.json"]
    mount.umount()
    require_clean(mount.store)
    assert run("gc", "--dry-run", mount.store).returncode == OK


@pytest.mark.slow
def test_older_checkpoints_of_the_trainer_lose_the_optimizers_state(mount, plain):
    import trainer_jobs as jobs

    set_rules(mount, ("checkpoint-*/optimizer.pt", "keep_last = 2"), ("checkpoint-*", "keep_last = 5"))

    def train(steps, **options):
        job = jobs.trainer(mount.dir, jobs.model(64, 2, 2), jobs.noise(32, 1), jobs.Copy(mount, plain), jobs.noise(32, 2), learning_rate=1e-2,
                           per_device_train_batch_size=8, max_steps=steps, save_steps=5, eval_strategy="steps", eval_steps=5,
                           load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False)
        job.train(**options)
        return int(job.state.best_model_checkpoint.rsplit("-", 1)[1])

    def kept(pattern):
        mount.sync()
        assert gc(mount.dir)["failed"] == []
        return {int(path.relative_to(mount.dir).parts[0].split("-")[1]) for path in mount.dir.glob(pattern)}

    best = train(40)
    assert best < 20
    assert kept("checkpoint-*/optimizer.pt") == {best, 35, 40} and kept("checkpoint-*/model.safetensors") == {best, 20, 25, 30, 35, 40}
    for step in (20, 25, 30):
        jobs.GPT2LMHeadModel.from_pretrained(mount / f"checkpoint-{step}")
    # A run goes on from a checkpoint that has it.
    assert train(50, resume_from_checkpoint=str(mount / "checkpoint-35")) == best
    assert kept("checkpoint-*/optimizer.pt") == {best, 45, 50} and kept("checkpoint-*") >= {best, 30, 35, 40, 45, 50}
