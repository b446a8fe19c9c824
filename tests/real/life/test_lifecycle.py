"""The daemon's life and the store's: locks, versions, signals, dead mounts, and metadata that nothing changes."""

import os
import re
import shutil
import signal
import subprocess
import threading
import time

import harness
import pytest
import torch
from harness import BIN, FAILURE, OK, USAGE, Mount, du, empty_cache, is_alive, is_mounted, require_clean, run, run_json, wait_until
from series import bits_equal, save_walk, tensors_of, walk

pytestmark = pytest.mark.stepfs


def metadata(root):
    """All metadata of each file and directory that an application can set."""
    found = {}
    for folder, _, files in os.walk(root):
        for path in [folder, *(os.path.join(folder, name) for name in files)]:
            s = os.lstat(path)
            xattrs = {k: os.getxattr(path, k) for k in os.listxattr(path) if not k.startswith("user.stepfs.")}
            size = s.st_size if path != folder else None
            found[os.path.relpath(path, root)] = (s.st_mode, s.st_uid, s.st_gid, s.st_nlink, size, s.st_mtime_ns, xattrs)
    return found


def inodes(root):
    return {os.path.relpath(os.path.join(f, n), root): os.lstat(os.path.join(f, n)).st_ino for f, _, files in os.walk(root) for n in files}


def test_metadata_is_what_the_application_made_it(both):
    os.mkdir(both / "run", 0o750)
    os.mkdir(both / "run/deeper")
    names = []
    for step, state in enumerate(walk(5, seed=71), 1):
        folder = both / ("run" if step % 2 else "run/deeper")
        names.append(str((folder / f"step_{step}.pt").relative_to(both.dir)))
        torch.save(state, both / names[-1])
    os.chmod(both / names[0], 0o604)
    os.utime(both / names[1], ns=(1, 1_700_000_000_000_000_001))
    os.utime(both / "run", ns=(1, 1_600_000_000_000_000_001))
    try:
        os.setxattr(both / names[2], "user.run", b"17")
    except OSError:
        pass  # the file system below has none
    before, numbers = metadata(both.dir), inodes(both.dir)
    both.sync()
    both.require_released(*names[:3])
    assert metadata(both.dir) == before and inodes(both.dir) == numbers
    for name in names:
        (both / name).read_bytes()
    assert metadata(both.dir) == before and inodes(both.dir) == numbers
    both.remount()
    assert metadata(both.dir) == before
    empty_cache(both.store)
    for name in names:
        torch.load(both / name)
    assert metadata(both.dir) == before


def test_mtime_order_of_directories_survives_a_kill_during_release(mount):
    """Trainers delete the directory with the oldest mtime; a kill must not make an old one young."""
    for step in range(1, 5):
        os.mkdir(mount / f"checkpoint-{step}")
    times = {}
    for step, state in enumerate(walk(4, seed=73), 1):
        torch.save(state, mount / f"checkpoint-{step}/model.pt")
        times[step] = os.stat(mount / f"checkpoint-{step}").st_mtime_ns
    syncing = threading.Thread(target=lambda: run("sync", mount.dir, check=False))
    syncing.start()
    time.sleep(0.15)
    mount.kill()
    syncing.join()
    mount.mount()
    assert {step: os.stat(mount / f"checkpoint-{step}").st_mtime_ns for step in times} == times
    mount.sync()
    assert {step: os.stat(mount / f"checkpoint-{step}").st_mtime_ns for step in times} == times


def test_remount_gives_the_same_bytes(both):
    names = save_walk(both.dir, 5, seed=75)
    both.sync()
    content = {name: (both / name).read_bytes() for name in names}
    both.umount()
    require_clean(both.store)
    both.passthrough = not both.passthrough
    both.mount()
    assert {name: (both / name).read_bytes() for name in names} == content
    both.umount()
    empty_cache(both.store)
    both.mount()
    assert {name: (both / name).read_bytes() for name in names} == content


def test_sync_waits_for_nothing_that_is_saved_later(mount):
    """Two programs save all the time, so that work never runs out. Earlier work is finished all the same."""
    names = save_walk(mount.dir, 6, seed=76)
    newest = (mount / names[-1]).read_bytes()
    other = torch.arange(200_000, dtype=torch.float32)
    stop, saved = threading.Event(), [0, 0]

    def save(run):
        os.mkdir(mount / f"busy-{run}")
        while not stop.is_set():
            # No state of one run has the bytes of the other's: a copy is released at once, and is no newer state to its run.
            torch.save({"w": other + 1000 * run + saved[run]}, mount / f"busy-{run}/step_{saved[run]}.pt")
            saved[run] += 1
            # Sealing comes before archiving: hundreds of files a second would leave no time for that.
            time.sleep(0.02)

    savers = [threading.Thread(target=save, args=(run,)) for run in range(2)]
    for saver in savers:
        saver.start()
    try:
        wait_until(lambda: min(saved) > 5, 30, "they save")
        # On a calm machine it may be done between two saves.
        for _ in range(200):
            before = list(saved)
            done = run("sync", mount.dir, check=False, timeout=120)
            during = [now - then for now, then in zip(saved, before)]
            if done.returncode != OK or min(during) > 0:
                break
    finally:
        stop.set()
        for saver in savers:
            saver.join()
    assert done.returncode == OK, done.stderr
    assert min(during) > 0, "nobody saved meanwhile"
    mount.require_released(*names[:-1], *(f"busy-{run}/step_{n}.pt" for run in range(2) for n in range(before[run] - 1)))
    assert (mount / names[-1]).read_bytes() == newest


def test_umount_in_the_middle_of_work(mount):
    """Unmounted while the queue is full: nothing is lost, and the next mount continues."""
    names = save_walk(mount.dir, 6, seed=77)
    newest = (mount / names[-1]).read_bytes()
    mount.umount()
    require_clean(mount.store)
    mount.mount()
    mount.sync()
    mount.require_released(*names[:-1])
    assert (mount / names[-1]).read_bytes() == newest


def test_the_newest_is_a_plain_file_in_the_store(mount):
    names = save_walk(mount.dir, 3, seed=79)
    mount.sync()
    content = (mount / names[-1]).read_bytes()
    mount.umount()
    assert (mount.store / "tree" / names[-1]).read_bytes() == content


def test_store_can_be_copied(mount, plain):
    """`cp -a` of an unmounted store is a backup."""
    names = save_walk(mount.dir, 4, seed=81)
    mount.sync()
    content = {name: (mount / name).read_bytes() for name in names}
    mount.umount()
    harness.shell(f"cp -a {mount.store} {plain}/store")
    copy = Mount(plain / "second", store=plain / "store")
    try:
        copy.mount()
        assert {name: (copy / name).read_bytes() for name in names} == content
    finally:
        copy.close()


# --- one daemon per store, one format


def test_second_daemon_is_refused(mount, plain):
    done = run("mount", mount.store, plain, check=False)
    assert done.returncode == FAILURE
    assert str(mount.store) in done.stderr and re.search(r"already|another|in use|mounted", done.stderr), done.stderr
    assert "panicked" not in done.stderr and not is_mounted(plain)
    (mount / "still").write_text("works")
    assert (mount / "still").read_text() == "works"


def test_commands_that_write_are_refused_while_mounted(mount, plain):
    (plain / "x.pt").write_bytes(b"x" * 100)
    done = run("import", mount.store, plain / "x.pt", check=False)
    assert done.returncode == FAILURE and "panicked" not in done.stderr and done.stderr.strip()


def test_mount_on_a_directory_that_is_in_use(mount, plain):
    done = run("mount", plain / "other-store", mount.dir, check=False)
    assert done.returncode != OK and "panicked" not in done.stderr


def test_store_of_a_newer_format_is_refused(mount):
    save_walk(mount.dir, 1)
    mount.umount()
    settings = mount.store / "stepfs.toml"
    text = settings.read_text()
    newer, count = re.subn(r"(?m)^(format\w*\s*=\s*)(\d+)", lambda m: m[1] + str(int(m[2]) + 1), text)
    assert count == 1, text
    settings.write_text(newer)
    for command in (["mount", mount.store, mount.dir], ["verify", mount.store], ["ls", mount.store], ["cat", mount.store, "step_0001.pt"]):
        done = run(*command, check=False)
        assert done.returncode == FAILURE, f"{command}: {done.returncode}"
        assert "newer" in done.stderr and "panicked" not in done.stderr, done.stderr
    assert not is_mounted(mount.dir)
    settings.write_text(text)
    mount.mount()
    torch.load(mount / "step_0001.pt")


def test_settings_that_make_no_sense_are_refused(mount):
    mount.umount()
    settings = mount.store / "stepfs.toml"
    text = settings.read_text()
    settings.write_text("format = [\n")
    done = run("mount", mount.store, mount.dir, check=False)
    assert done.returncode == FAILURE and "stepfs.toml" in done.stderr and "panicked" not in done.stderr
    settings.write_text(text)
    mount.mount()


def test_something_else_is_not_taken_for_a_store(plain):
    (plain / "dir").mkdir()
    (plain / "dir/precious.txt").write_text("mine")
    (plain / "mnt").mkdir()
    done = run("mount", plain / "dir", plain / "mnt", check=False)
    assert done.returncode != OK and not is_mounted(plain / "mnt") and "panicked" not in done.stderr
    assert os.listdir(plain / "dir") == ["precious.txt"]


# --- signals


def test_killed_daemon_and_its_dead_mount(mount):
    names = save_walk(mount.dir, 3, seed=83)
    mount.sync()
    content = {name: (mount / name).read_bytes() for name in names}
    mount.kill(signal.SIGKILL)
    with pytest.raises(OSError):
        os.listdir(mount.dir)
    assert is_mounted(mount.dir)
    mount.mount()  # clears it
    assert {name: (mount / name).read_bytes() for name in names} == content


def test_a_dead_mount_is_mounted_again_from_inside(mount):
    (mount / "f").write_text("words")
    command = 'read _; exec "$0" mount "$1" .'
    inside = subprocess.Popen(["sh", "-c", command, BIN, mount.store], cwd=mount.dir, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    mount.kill(signal.SIGKILL)
    _, said = inside.communicate("now\n", timeout=60)
    assert inside.returncode == 0, said
    mount.pid = mount.find_daemon()
    assert (mount / "f").read_text() == "words"


def test_umount_of_a_dead_mount(mount):
    mount.kill(signal.SIGKILL)
    run("umount", mount.dir)
    assert not is_mounted(mount.dir)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=str)
@pytest.mark.parametrize("foreground", [False, True], ids=["background", "foreground"])
def test_signals_unmount_cleanly(mount, how, foreground):
    process = None
    if foreground:
        mount.umount()
        process = subprocess.Popen([BIN, *map(str, mount.arguments()), "--foreground"], stdin=subprocess.DEVNULL)
        mount.pid = process.pid
        wait_until(lambda: is_mounted(mount.dir), 30, "mounted")
    names = save_walk(mount.dir, 4, seed=85)
    content = (mount / names[-1]).read_bytes()
    os.kill(mount.pid, how)
    if process:
        assert process.wait(timeout=60) == OK
    wait_until(lambda: not is_alive(mount.pid), 60, "the daemon ends")
    assert not is_mounted(mount.dir) and os.listdir(mount.dir) == []
    require_clean(mount.store)
    mount.mount()
    assert (mount / names[-1]).read_bytes() == content
    mount.sync()
    mount.require_released(*names[:-1])


def test_sigterm_with_a_file_open(mount):
    """A daemon is asked to stop while a file is held open: it ends, and the written bytes stay."""
    f = open(mount / "held.bin", "wb", buffering=0)
    f.write(b"a" * 200_000)
    os.fsync(f.fileno())
    os.kill(mount.pid, signal.SIGTERM)
    time.sleep(1)
    try:
        f.close()
    except OSError:
        pass
    wait_until(lambda: not is_alive(mount.pid), 60, "the daemon ends")
    if is_mounted(mount.dir):
        run("umount", mount.dir)
    require_clean(mount.store)
    mount.mount()
    assert (mount / "held.bin").read_bytes() == b"a" * 200_000


# --- policy


def test_overwritten_in_place_costs_nothing_beyond_itself(mount):
    for state in walk(20, seed=87):
        torch.save(state, mount / "ckpt.pt")
        last = tensors_of(state)
    mount.sync()
    size = os.path.getsize(mount / "ckpt.pt")
    assert all(bits_equal(t, last[name]) for name, t in tensors_of(torch.load(mount / "ckpt.pt")).items())
    row = mount.entry("ckpt.pt")
    assert row["state"] == "sealed"
    assert mount.status()["stored_bytes"] <= 1.02 * size
    assert du(mount.store) <= 1.02 * size + 200_000, "something else is kept in the store"


def test_best_and_final_stay_exact(mount, plain):
    content = {}
    for step, state in enumerate(walk(6, seed=89), 1):
        name = {2: "model_best.pt", 4: "final.pt"}.get(step, f"step_{step}.pt")
        torch.save(state, plain / name)
        content[name] = (plain / name).read_bytes()
        (mount / name).write_bytes(content[name])
    mount.sync()
    for name in ("model_best.pt", "final.pt", "step_6.pt"):
        assert (mount / name).read_bytes() == content[name], name
    assert mount.entry("model_best.pt")["profile"] == "exact" and not mount.entry("final.pt")["max_abs_error"]
    mount.require_released("step_1.pt", "step_3.pt", "step_5.pt")


def test_last_beside_best_costs_one(mount):
    """Copies of a checkpoint under other names cost next to nothing once they are released."""
    for step, state in enumerate(walk(5, seed=91), 1):
        torch.save(state, mount / f"step_{step}.pt")
        shutil.copyfile(mount / f"step_{step}.pt", mount / "last.pt")
    mount.sync()
    assert (mount / "last.pt").read_bytes() == (mount / "step_5.pt").read_bytes()
    mount.require_released("step_1.pt", "step_2.pt", "step_3.pt", "step_4.pt")


# --- commands without a mount


def test_import_export_cat_ls_verify(plain):
    store = plain / "store"
    (plain / "in").mkdir()
    names = save_walk(plain / "in", 5, seed=93)
    run("import", store, *(plain / "in" / name for name in names))
    rows = {row["path"].strip("/"): row for row in run_json("ls", "--json", store)}
    assert sorted(rows) == names
    newest = (plain / "in" / names[-1]).read_bytes()
    for name in names:
        run("export", store, name, plain / f"out-{name}")
        data = run("cat", store, name, text=False).stdout
        assert data == (plain / f"out-{name}").read_bytes() and len(data) == os.path.getsize(plain / "in" / name)
        torch.load(plain / f"out-{name}")
        assert rows[name]["logical_bytes"] == len(data)
    assert data == newest
    done = run("export", store, names[0], plain / f"out-{names[0]}", check=False)
    assert done.returncode == FAILURE and "exists" in done.stderr, "export must not overwrite"
    status = run_json("status", "--json", store)
    assert status["files"] == 5 and status["logical_bytes"] == sum(os.path.getsize(plain / "in" / n) for n in names)
    require_clean(store)
    mount = Mount(plain / "base", store=store)
    try:
        mount.mount()
        assert run("cat", store, names[0], text=False, check=False).returncode in (OK, FAILURE)
        assert (mount / names[-1]).read_bytes() == newest
    finally:
        mount.close()


def test_inspect_any_checkpoint(plain):
    """`inspect` needs no store: paths, types, shapes, and the real offsets of the bytes."""
    save_walk(plain, 1, seed=95)
    answer = run_json("inspect", "--json", plain / "step_0001.pt")
    tensors = answer["tensors"] if isinstance(answer, dict) else answer
    data, state = (plain / "step_0001.pt").read_bytes(), tensors_of(torch.load(plain / "step_0001.pt"))
    assert len(tensors) == len(state)
    left = [t.contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else t.reshape(1).view(torch.uint8).numpy().tobytes()
            for t in state.values()]
    roles = {"weight": 0, "optimizer": 0}
    for tensor in tensors:
        assert {"path", "dtype", "shape", "role", "offset"} <= tensor.keys()
        match = [raw for raw in left if data[tensor["offset"] : tensor["offset"] + len(raw)] == raw]
        assert match, tensor
        left.remove(max(match, key=len))
        roles[tensor["role"]] = roles.get(tensor["role"], 0) + 1
    assert roles["weight"] == 5 and roles["optimizer"] >= 5 and roles["first_moment"] == roles["second_moment"] == 5, roles


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["mount"], ["ls"], ["sync", "--nonsense", "x"]], ids=str)
def test_usage_errors(arguments):
    done = run(*arguments, check=False)
    assert done.returncode == USAGE and "Usage" in done.stderr + done.stdout


@pytest.mark.parametrize("command", [["ls", "PLAIN"], ["status", "PLAIN/none"], ["sync", "PLAIN"], ["umount", "PLAIN"], ["verify", "PLAIN"],
                                     ["cat", "PLAIN", "x"], ["inspect", "PLAIN/none.pt"], ["export", "PLAIN/none", "x", "PLAIN/y"]], ids=str)
def test_commands_on_the_wrong_thing_say_so(plain, command):
    done = run(*(word.replace("PLAIN", str(plain)) for word in command), check=False)
    assert done.returncode == FAILURE and done.stderr.strip() and "panicked" not in done.stderr, (done.returncode, done.stderr)
    assert os.listdir(plain) == []


def test_sync_knows_of_a_close_just_before_it(mount):
    """The kernel tells of a close late where the machine is busy. Here the close itself is late, by less than the wait."""
    path = mount / "late.bin"
    file = open(path, "w+b", buffering=0)
    file.write(os.urandom(1 << 20))
    late = threading.Timer(0.1, file.close)
    late.start()
    mount.sync()
    late.join()
    assert os.getxattr(path, "user.stepfs.state") == b"sealed"
    # A file that stays open holds nothing up for ever.
    with open(path, "r+b"):
        mount.sync(timeout=60)
        assert os.getxattr(path, "user.stepfs.state") == b"staged"
