"""Checkpoints that are directories, pins, releases and recalls by hand, copies."""

import os
import shutil
import time

import pytest
import torch
from harness import FAILURE, Mount, require_clean, run, shell, wait_until
from safetensors.torch import save_file
from series import save_walk, walk

pytestmark = pytest.mark.stepfs


def settle(mount, seconds):
    """Mounts again with another settle time."""
    mount.umount()
    path = mount.store / "stepfs.toml"
    text = path.read_text()
    assert "settle_seconds = 600" in text
    path.write_text(text.replace("settle_seconds = 600", f"settle_seconds = {seconds}"))
    mount.mount()


class Checkpoints:
    """Directories as transformers' Trainer writes them: model first, then the optimizer's file."""

    def __init__(self, mount):
        self.mount, self.states, self.bytes = mount, walk(9, seed=5), {}

    def save(self, step, optimizer=True, trainer_state=True):
        directory = self.mount / f"checkpoint-{step}"
        directory.mkdir()
        state = next(self.states)
        save_file(state["model"], directory / "model.safetensors")
        if trainer_state:
            (directory / "trainer_state.json").write_text('{"global_step": %d}' % step)
        if optimizer:
            torch.save(state["optimizer"], directory / "optimizer.pt")
        return state

    def note(self, *steps):
        for step in steps:
            for path in (self.mount / f"checkpoint-{step}").iterdir():
                self.bytes[path.relative_to(self.mount.dir)] = path.read_bytes()

    def exact(self, step):
        directory = self.mount / f"checkpoint-{step}"
        return all((self.mount / name).read_bytes() == data for name, data in self.bytes.items() if name.parent.name == directory.name)


def test_a_checkpoint_stays_exact_until_the_next_is_complete(both):
    mount, saves = both, Checkpoints(both)
    saves.save(10)
    saves.note(10)
    state = saves.save(20, optimizer=False)
    mount.sync()
    # The kernel reports a close after it has returned: the sync may have come before.
    wait_until(lambda: mount.status()["settling"] == 1, 10, "the model of checkpoint 10 waits for its optimizer")
    assert not mount.released()
    # Still being written, for any length of time.
    with open(mount / "checkpoint-20/optimizer.pt", "wb") as f:
        f.write(b"PK")
        f.flush()
        mount.sync()
        assert not mount.released() and saves.exact(10)
        f.seek(0)
        torch.save(state["optimizer"], f)
    mount.sync()
    assert mount.released() == ["checkpoint-10/model.safetensors", "checkpoint-10/optimizer.pt"]
    wait_until(lambda: "checkpoint-10: released, 2 files" in mount.log.read_text(), 10, "the log says so")


def test_killed_between_two_files_of_a_checkpoint(both):
    mount, saves = both, Checkpoints(both)
    saves.save(10)
    saves.note(10)
    saves.save(20, optimizer=False)
    half = open(mount / "checkpoint-20/optimizer.pt", "wb")
    half.write(os.urandom(300_000))
    half.flush()
    mount.sync()
    mount.kill()
    try:
        half.close()
    except OSError:
        pass
    mount.mount()
    mount.sync()
    assert saves.exact(10) and not mount.released(), mount.states()
    # The job resumes from checkpoint-10 and saves 20 again.
    shutil.rmtree(mount / "checkpoint-20")
    saves.save(20)
    mount.sync()
    mount.require_released("checkpoint-10/model.safetensors", "checkpoint-10/optimizer.pt")
    mount.umount()
    require_clean(mount.store)


def test_the_settle_time_passes_by_itself(mount):
    settle(mount, 2)
    saves = Checkpoints(mount)
    saves.save(10)
    (mount / "checkpoint-10/report.txt").write_text("\n".join(map(str, range(40_000))))
    saves.save(20)
    (mount / "checkpoint-20/another.txt").write_text("as many files")
    wait_until(lambda: mount.released() == ["checkpoint-10/model.safetensors", "checkpoint-10/optimizer.pt"], 20, "both are released")
    assert mount.status()["settling"] == 0


def test_killed_before_the_smallest_file_of_a_checkpoint(mount):
    settle(mount, 1)
    saves = Checkpoints(mount)
    saves.save(10)
    saves.note(10)
    # Trainer writes it last, and does not resume without it.
    saves.save(20, trainer_state=False)
    mount.sync()
    mount.kill()
    mount.mount()
    mount.sync()
    time.sleep(2)
    why = os.getxattr(mount / "checkpoint-10/optimizer.pt", "user.stepfs.release").decode()
    assert saves.exact(10) and not mount.released() and why == "it waits until a newer checkpoint has as many files; `stepfs release` ends the wait"
    # The job resumes from checkpoint-10 and saves 20 again.
    shutil.rmtree(mount / "checkpoint-20")
    saves.save(20)
    mount.sync()
    mount.require_released("checkpoint-10/model.safetensors", "checkpoint-10/optimizer.pt")


def test_no_settle_time_makes_the_last_state_with_an_optimizer_lossy(mount):
    settle(mount, 1)
    saves = Checkpoints(mount)
    saves.save(10)
    saves.save(20)
    saves.note(20)
    saves.save(30, optimizer=False)
    mount.sync()
    mount.require_released("checkpoint-10/model.safetensors", "checkpoint-10/optimizer.pt")
    time.sleep(3)
    mount.umount()
    mount.mount()
    mount.sync()
    why = os.getxattr(mount / "checkpoint-20/model.safetensors", "user.stepfs.release").decode()
    assert saves.exact(20) and why == "it waits until checkpoint-20/optimizer.pt of its checkpoint has a newer state"


def test_release_by_hand_does_not_wait(mount):
    saves = Checkpoints(mount)
    saves.save(10)
    saves.save(20, optimizer=False)
    mount.sync()
    assert not mount.released()
    done = run("release", mount / "checkpoint-10", check=False)
    assert done.returncode == FAILURE and mount.released() == ["checkpoint-10/model.safetensors"]
    assert "checkpoint-10/optimizer.pt stays as it is: it is the newest of its lineage" in done.stderr
    assert "trainer_state" not in done.stderr
    run("release", mount / "checkpoint-10/model.safetensors")
    with open(mount / "checkpoint-20/model.safetensors", "r+b"):
        done = run("release", mount / "checkpoint-20/model.safetensors", check=False)
        assert done.returncode == FAILURE and "open for writing" in done.stderr


def test_pins(both):
    mount = both
    names = save_walk(mount.dir, 2, seed=3)
    first = (mount / names[0]).read_bytes()
    # Before it could be released: otherwise the pin may come too late.
    settle_names = save_walk(mount.dir, 1, seed=4, name="other_1{:03d}.pt")
    kept = (mount / settle_names[0]).read_bytes()
    run("pin", mount / settle_names[0])
    state = list(walk(3, seed=4))
    for n in (2, 3):
        torch.save(state[n - 1], mount / f"other_1{n:03d}.pt")
    mount.sync()
    assert (mount / "other_1001.pt").read_bytes() == kept
    mount.require_released(names[0], "other_1002.pt")
    assert mount.entry("other_1001.pt")["pinned"] and not mount.entry(names[0])["pinned"]
    assert "pinned" in run("ls", mount.dir).stdout
    pin = os.getxattr(mount / "other_1001.pt", "user.stepfs.pin")
    assert pin == b"1" and "user.stepfs.pin" not in os.listxattr(mount / "other_1001.pt")
    done = run("release", mount / "other_1001.pt", check=False)
    assert done.returncode == FAILURE and "pinned" in done.stderr
    # The pin survives a rename, a remount, a release and a recall; a copy does not get it.
    shell("cp -a other_1001.pt copy.pt && mkdir d && mv other_1001.pt d/other_1001.pt", cwd=mount.dir)
    with pytest.raises(OSError):
        os.getxattr(mount / "copy.pt", "user.stepfs.pin")
    run("pin", mount / names[0])
    mount.remount()
    assert mount.entry("d/other_1001.pt")["pinned"] and mount.entry(names[0])["pinned"]
    run("recall", mount / names[0])
    assert mount.entry(names[0])["pinned"] and mount.entry(names[0])["state"] != "released"
    run("unpin", mount / names[0])
    run("release", mount / names[0])
    assert first and mount.state(names[0]) == "released"
    # A directory's pin holds for everything below; the pin of a file is its own.
    os.rename(mount / "d/other_1001.pt", mount / "other_1001.pt")
    run("unpin", mount / "other_1001.pt")
    assert run("unpin", mount / "other_1001.pt", check=False).returncode == FAILURE
    mount.sync()
    mount.require_released("other_1001.pt")
    os.mkdir(mount / "keep")
    os.setxattr(mount / "keep", "user.stepfs.pin", b"1")
    more = list(walk(2, seed=8))
    for n in (1, 2):
        torch.save(more[n - 1], mount / f"keep/x_{n}.pt")
    mount.sync()
    assert not [name for name in mount.released() if name.startswith("keep/")]
    os.removexattr(mount / "keep", "user.stepfs.pin")
    mount.sync()
    mount.require_released("keep/x_1.pt")
    assert run("pin", mount.store, check=False).returncode == FAILURE


def test_recall_and_release_change_nothing(both):
    mount = both
    names = save_walk(mount.dir, 4, seed=6)
    mount.sync()
    mount.require_released(*names[:-1])
    look = lambda name: (lambda s: (s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns, s.st_uid))(os.stat(mount / name))
    before = {name: (look(name), (mount / name).read_bytes(), mount.entry(name)["object"]) for name in names[:-1]}
    # One of them is being read from the cache meanwhile.
    with open(mount / names[0], "rb") as reader:
        reader.read(1000)
        run("recall", mount.dir)
        assert reader.read() == before[names[0]][1][1000:]
    mount.sync()
    assert not mount.released()
    for name, (seen, data, _) in before.items():
        assert (mount.store / "tree" / name).read_bytes() == data == (mount / name).read_bytes()
        assert look(name)[1:] == seen[1:]
    assert look(names[1]) == before[names[1]][0]
    done = run("release", mount.dir, check=False)
    assert done.returncode == FAILURE and done.stderr.count("stays as it is") == 1 and names[-1] in done.stderr
    for name, (seen, data, object) in before.items():
        assert mount.entry(name)["object"] == object and (mount / name).read_bytes() == data
    # Until a remount.
    run("recall", mount / names[2])
    mount.remount()
    mount.sync()
    assert mount.entry(names[2])["object"] == before[names[2]][2]
    # A write ends it, too.
    run("recall", mount / names[1])
    with open(mount / names[1], "r+b") as f:
        f.seek(100_000)
        f.write(b"changed")
    data = before[names[1]][1]
    assert (mount / names[1]).read_bytes() == data[:100_000] + b"changed" + data[100_007:]
    mount.umount()
    require_clean(mount.store)


@pytest.mark.parametrize("copy", ["cp", "cp --reflink=auto", "cp -a", "copyfile", "copytree", "copy_file_range"])
def test_a_copy_is_stored_once(both, copy):
    mount = both
    os.mkdir(mount / "run")
    names = ["run/" + name for name in save_walk(mount / "run", 3, seed=7)]
    mount.sync()
    target = mount / "run/kept.pt"
    if copy.startswith("cp"):
        shell(f"{copy} {names[1]} run/kept.pt", cwd=mount.dir)
    elif copy == "copyfile":
        shutil.copyfile(mount / names[1], target)
    elif copy == "copytree":
        shutil.copytree(mount / "run", mount / "tree")
        target = mount / "tree" / os.path.basename(names[1])
    else:
        with open(mount / names[1], "rb") as source, open(target, "wb") as out:
            size = os.fstat(source.fileno()).st_size
            try:
                while size:
                    size -= os.copy_file_range(source.fileno(), out.fileno(), size)
            except OSError:
                shutil.copyfileobj(source, out)
    mount.sync()
    name = str(target.relative_to(mount.dir))
    assert mount.entry(name)["object"] == mount.entry(names[1])["object"] and mount.state(name) == "released"
    assert target.read_bytes() == (mount / names[1]).read_bytes()


def test_all_but_one_of_several_names_go(mount):
    names = save_walk(mount.dir, 1, seed=9)
    os.link(mount / names[0], mount / "second.pt")
    states = list(walk(3, seed=9))
    for n in (2, 3):
        torch.save(states[n - 1], mount / f"step_{n:04d}.pt")
    mount.sync()
    assert mount.released() == ["step_0002.pt"] and os.stat(mount / names[0]).st_nlink == 2
    os.unlink(mount / "second.pt")
    mount.sync()
    mount.require_released(names[0])
