"""What commands say to people: who holds a mount, what is wrong, which checkpoint to go on from, and answers to mistakes."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import BIN, FAILURE, OK, Mount, is_mounted, run, run_json, wait_dead, wait_until
from series import save_walk, walk

pytestmark = pytest.mark.stepfs
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces, and works as another user")
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def said(*arguments, as_user=(), **options):
    """The exit code, and all that a command prints."""
    done = subprocess.run([*as_user, BIN, *map(str, arguments)], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=180,
                          **options)
    assert "panicked" not in done.stderr
    return done.returncode, done.stdout + done.stderr


# --- mounting and unmounting


@needs_root
@pytest.mark.waits
def test_a_mount_that_another_namespace_holds(mount):
    # It holds this mount alone, and none of tests beside it.
    others = f"awk '/ - fuse.stepfs / && $5 != \"{mount.dir}\" {{ print $5 }}' /proc/self/mountinfo"
    hold = f"{others} | xargs --no-run-if-empty umount --lazy; exec sleep 600"
    holder = subprocess.Popen(["unshare", "-m", "sh", "-c", hold])
    try:
        wait_until(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n", 10, "it sleeps")
        began = time.monotonic()
        code, words = said("umount", mount.dir)
        assert code == FAILURE and f"sleep ({holder.pid}) in another mount namespace" in words and "--force" in words, words
        assert time.monotonic() - began < 30
        # Also when the name is free again, and for who mounts anew.
        for command in (["umount", mount.dir], ["umount", mount.store], ["mount", mount.store, mount.dir]):
            code, words = said(*command)
            assert code == FAILURE and f"sleep ({holder.pid})" in words, words
        assert said("umount", "--force", mount.store) == (OK, "")
        wait_dead(mount.pid)
    finally:
        holder.kill()
        holder.wait()
    mount.mount()


@needs_root
def test_force_cuts_programs_off(mount):
    (mount / "file").write_text("safe")
    reader = subprocess.Popen(["sleep", "600"], cwd=mount.dir)
    try:
        code, words = said("umount", mount.dir)
        assert code == FAILURE and f"sleep ({reader.pid})" in words and is_mounted(mount.dir), words
        assert said("umount", "--force", mount.dir) == (OK, "")
        assert not is_mounted(mount.dir)
        wait_dead(mount.pid)
    finally:
        reader.kill()
        reader.wait()
    mount.mount()
    assert (mount / "file").read_text() == "safe"


@needs_root
def test_the_disk_of_a_store_can_be_unmounted_right_after(plain):
    image, disk, place = plain / "image", plain / "disk", plain / "mnt"
    disk.mkdir()
    subprocess.run(["truncate", "-s", "200M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    for _ in range(5):
        subprocess.run(["mount", "-o", "loop", image, disk], check=True)
        try:
            run("mount", disk / "store", place)
            save_walk(place, 3)
            run("umount", place)
        finally:
            done = subprocess.run(["umount", disk], capture_output=True, text=True)
            if done.returncode != 0:
                subprocess.run(["umount", "-l", disk], check=True)
        assert done.returncode == 0, done.stderr


def test_mounting_twice(mount, plain):
    code, words = said("mount", mount.store, mount.dir)
    assert code == OK and "already mounted" in words and str(mount.dir) in words
    code, words = said("mount", mount.store, plain / "other")
    assert code == FAILURE and f"mounted at {mount.dir}" in words and f"stepfs umount {mount.dir}" in words
    code, words = said("mount", plain / "store", mount.dir)
    assert code == FAILURE and f"the store {mount.store} is mounted at {mount.dir}" in words and not (plain / "store").exists()
    mount.umount()
    mount.mount()


def test_a_store_is_mounted_from_within_its_dead_mount(mount):
    (mount / "file").write_text("x")
    done = subprocess.run(["bash", "-c", f"cd {mount.dir}; kill -9 {mount.pid}; sleep 1; {BIN} mount ../store ."], capture_output=True,
                          text=True)
    assert done.returncode == OK and 'cd "$PWD"' in done.stderr, done
    mount.pid = mount.find_daemon()
    assert (mount / "file").read_text() == "x"


def test_files_below_a_mount_are_told(plain):
    place = plain / "ckpts"
    place.mkdir()
    (place / "step_1.pt").write_text("1")
    code, words = said("mount", plain / "store", place)
    assert code == OK and f"{place} has 1 name of its own" in words and "hides" in words
    assert said("umount", plain / "store") == (OK, "") and (place / "step_1.pt").read_text() == "1"


def test_a_store_does_not_lie_in_a_mount(mount, plain):
    for store in (mount.dir, mount / "inside"):
        code, words = said("mount", store, plain / "second")
        assert code == FAILURE and f"lies in the stepfs mount {mount.dir}" in words and os.listdir(mount.dir) == [], words


# --- five reasons why a mount does not answer


@needs_root
def test_permission_is_not_death(plain):
    for option in ([], ["--allow-other"]):
        mount = Mount(plain)
        os.chmod(plain, 0o755)
        try:
            run("mount", *option, mount.store, mount.dir)
            for command in ("ls", "status", "why"):
                code, words = said(command, mount.dir, as_user=NOBODY)
                assert code == FAILURE and "belongs to user 0" in words and "dead" not in words and "gone" not in words, words
            code, words = said("status", as_user=NOBODY)
            assert code == OK and words.startswith("stepfs: no store is mounted"), "others' mounts are no problem of this user"
            code, words = said("umount", mount.dir, as_user=NOBODY)
            assert code == FAILURE and f"{mount.dir} belongs to user 0" in words and is_mounted(mount.dir), words
        finally:
            mount.close()


def test_death_names_the_store(mount):
    mount.kill(signal.SIGKILL)
    for command in (["ls", mount.dir], ["status", mount.dir], ["latest", mount.dir]):
        code, words = said(*command)
        assert code == FAILURE and f"stepfs mount {mount.store} {mount.dir}" in words, words
    assert f"the daemon of the mount {mount.dir} is gone" in said("status")[1]


def test_a_store_that_was_moved_or_removed_is_named(mount):
    save_walk(mount.dir, 2)
    mount.sync()
    moved = mount.base / "moved"
    os.rename(mount.store, moved)
    # The kernel does not believe its attributes of the mount any longer.
    time.sleep(1.2)
    code, words = said("status", "--check", mount.dir)
    assert code == FAILURE and words.startswith("1 problem") and f"no longer at {mount.store}" in words, words
    assert f"it is at {moved}" in words
    assert "step_0002.pt" in said("ls", mount.dir)[1]
    os.rename(moved, mount.store)
    assert said("status", "--check", mount.dir)[0] == OK
    os.rename(mount.store / "stepfs.toml", mount.base / "toml")
    code, words = said("ls", mount.dir)
    assert code == FAILURE and "moved or removed" in words, words
    os.rename(mount.base / "toml", mount.store / "stepfs.toml")


@needs_root
def test_files_of_others_are_released_without_the_capability(plain):
    """As in a container that has CAP_SYS_ADMIN beside the usual ones: root may take no lease on files of other users."""
    os.chmod(plain, 0o755)
    save_walk(plain, 4)
    lost = ["setpriv", "--bounding-set=-lease", "--inh-caps=-lease"]
    assert said("mount", "--allow-other", plain / "store", plain / "mnt", as_user=lost)[0] == OK
    try:
        os.chmod(plain / "mnt", 0o777)
        for step in range(1, 5):
            subprocess.run([*NOBODY, "cp", plain / f"step_{step:04}.pt", plain / "mnt"], check=True)
        run("sync", plain / "mnt")
        states = lambda: [(row["state"], os.stat(plain / "mnt" / row["path"]).st_uid) for row in run_json("ls", "--json", plain / "mnt")]
        # On a busy machine the kernel tells late of the last close.
        wait_until(lambda: states() == [("released", 65534)] * 3 + [("sealed", 65534)], 10, "they are released")
    finally:
        run("umount", plain / "mnt")


# --- health


def damage(store):
    """Writes zeros into the largest object."""
    objects = [Path(folder) / name for folder, _, names in os.walk(store / "objects") for name in names]
    largest = max(objects, key=os.path.getsize)
    os.chmod(largest, 0o600)
    with open(largest, "r+b") as file:
        file.seek(os.path.getsize(largest) // 2)
        file.write(bytes(64))


def test_a_file_that_cannot_be_read_is_in_status_and_in_ls(mount):
    names = save_walk(mount.dir, 4, seed=3)
    mount.sync()
    mount.umount()
    damage(mount.store)
    mount.mount()
    assert said("status", "--check", mount.dir)[0] == OK, "nobody has read it yet"
    with pytest.raises(OSError):
        (mount / names[0]).read_bytes()
    code, words = said("status", "--check", mount.dir)
    assert code == FAILURE and re.match(r"\d problems?\n", words) and f"{names[0]} cannot be read: object" in words, words
    assert "verify --repair" in words
    assert [problem["kind"] for problem in mount.status()["problems"]] == ["damaged"]
    assert "DAMAGED" in next(line for line in said("ls", mount.dir)[1].splitlines() if names[0] in line)
    assert "damage" in mount.entry(names[0]) and said("latest", mount.dir)[1].strip() == str(mount / names[-1])


def test_a_failed_read_is_no_restore(mount):
    names = save_walk(mount.dir, 3, seed=3)
    mount.sync()
    mount.umount()
    damage(mount.store)
    mount.mount()
    program = f"""
import os
try: open("{mount / names[0]}", "rb").read()
except OSError: pass
open("{mount / 'step_0009.pt'}", "wb").write(open("{mount / names[-1]}", "rb").read())
"""
    subprocess.run([shutil.which("python3"), "-c", program], check=True)
    mount.sync()
    assert mount.status()["restored"] == []


def test_a_checkpoint_that_was_cut_short(mount):
    names = save_walk(mount.dir, 3, seed=5)
    whole = (mount / names[2]).read_bytes()
    (mount / names[2]).write_bytes(whole[: len(whole) // 2])
    mount.sync()
    code, words = said("status", "--check", mount.dir)
    assert code == FAILURE and f"{names[2]} is cut short" in words and "stepfs latest" in words, words
    line = next(line for line in said("ls", mount.dir)[1].splitlines() if names[2] in line)
    assert "CUT SHORT" in line and "cut short" in mount.entry(names[2])["cut_short"]
    done = run("latest", mount.dir)
    assert done.stdout == f"{mount.dir}/{names[1]}\n" and f"{names[2]} (CUT SHORT)" in done.stderr
    mount.umount()
    assert "CUT SHORT" in said("ls", mount.store)[1] and said("status", "--check", mount.store)[0] == FAILURE


@needs_root
def test_a_disk_without_room_for_the_next_save(plain):
    disk = plain / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], check=True)
    try:
        run("mount", disk / "store", plain / "mnt")
        save_walk(plain / "mnt", 1)
        assert said("status", "--check", plain / "mnt")[0] == OK
        (disk / "fills").write_bytes(bytes(3 << 20))
        code, words = said("status", "--check", plain / "mnt")
        assert code == FAILURE and "the disk of the store has" in words and "cut short" in words, words
    finally:
        run("umount", plain / "mnt", check=False)
        subprocess.run(["umount", disk], check=True)


@pytest.mark.waits
def test_status_of_all_mounts(mount, plain):
    listed = run_json("status", "--json")
    assert [row["daemon"] for row in listed if row["mount"] == str(mount.dir)] == [mount.pid]
    words = run("status").stdout
    assert f"mounted    {mount.dir} by process {mount.pid}" in words
    assert run("status", mount.dir).stdout.startswith("nothing is wrong\n")


@pytest.mark.waits
def test_a_daemon_that_hangs_is_named(mount):
    os.kill(mount.pid, signal.SIGSTOP)
    try:
        for command in (["status", "--check", mount.dir], ["status", "--check"]):
            code, words = said(*command)
            assert code == FAILURE and f"the daemon of the mount {mount.dir} has not answered" in words, words
            assert f"umount --force {mount.dir}" in words
    finally:
        os.kill(mount.pid, signal.SIGCONT)
    assert said("status", "--check", mount.dir)[0] == OK


# --- which checkpoint


def test_a_checkpoint_in_a_directory_is_one_line(mount):
    for step, state in enumerate(walk(3, seed=9), 1):
        os.makedirs(mount / f"run/checkpoint-{step * 10}")
        torch.save(state["model"], mount / f"run/checkpoint-{step * 10}/model.pt")
        if step < 3:
            torch.save(state, mount / f"run/checkpoint-{step * 10}/optimizer.pt")
    mount.sync()
    lines = run("ls", mount.dir).stdout.splitlines()
    assert [line.split()[-1] for line in lines[1:4]] == [f"run/checkpoint-{step}/" for step in (10, 20, 30)]
    assert [line.split()[0] for line in lines[1:4]] == ["10", "20", "30"] and "unfinished" in lines[3]
    assert all(len(line) <= 80 for line in lines)
    done = run("latest", mount.dir)
    assert done.stdout == f"{mount.dir}/run/checkpoint-20\n" and "checkpoint-30 (unfinished)" in done.stderr
    inside = run("ls", mount / "run/checkpoint-20", mount / "run/checkpoint-10").stdout.splitlines()
    assert [line.split()[-1] for line in inside[1:5]] == [f"run/checkpoint-{step}/{file}.pt" for step in (20, 10)
                                                         for file in ("model", "optimizer")]
    torch.save(state, mount / "run/checkpoint-30/optimizer.pt")
    mount.sync()
    assert run("latest", mount / "run").stdout == f"{mount.dir}/run/checkpoint-30\n"


def test_the_newest_whole_checkpoint(mount):
    code, words = said("latest", mount.dir)
    assert code == FAILURE and "no whole checkpoint" in words
    names = save_walk(mount.dir, 11, name="step_{}.pt")
    (mount / "config.json").write_text("{}")
    assert [line.split()[-1] for line in run("ls", mount.dir).stdout.splitlines()[2:13]] == names
    mount.sync()
    assert run("latest", mount.dir).stdout == f"{mount.dir}/step_11.pt\n"
    with open(mount / "step_12.pt", "wb") as file:
        file.write(b"x")
        done = run("latest", mount.dir)
        assert done.stdout == f"{mount.dir}/step_11.pt\n" and "step_12.pt (being written)" in done.stderr


def test_arrays_are_no_state_to_go_on_from(mount):
    """An evaluation and a curve of the loss are newer than the training state, and steps stand in their names."""
    names = save_walk(mount.dir, 3, name="step_{}.pt")
    for name in ("eval_step_3.npz", "data_step_1.npz"):
        np.savez(mount / name, predictions=np.ones((300, 300), np.float32))
    np.save(mount / "embeddings.npy", np.ones((300, 300), np.float32))
    mount.sync()
    done = run("latest", mount.dir)
    assert done.stdout == f"{mount.dir}/{names[2]}\n" and "newer, but without an optimizer's state: embeddings.npy" in done.stderr
    # Weights of a later step are one, whatever the run began with, or another run has.
    weights = next(walk(1))["model"]
    torch.save(weights, mount / "weights_4.pt")
    mount.sync()
    assert run("latest", mount.dir).stdout == f"{mount.dir}/weights_4.pt\n"
    os.rename(mount / names[2], mount / "pretrained.pt")
    os.unlink(mount / "weights_4.pt")
    torch.save(weights, mount / "weights_2.pt")
    mount.sync()
    assert run("latest", mount.dir).stdout == f"{mount.dir}/{names[1]}\n", "it has the step, and an optimizer"
    names = ["pretrained.pt", "weights_2.pt", *names[:2]]
    # Weights alone are one, as long as nothing else is there.
    for name in names:
        os.unlink(mount / name)
    torch.save(next(walk(1))["model"], mount / "weights.pt")
    np.save(mount / "losses.npy", np.ones((300, 300), np.float32))
    mount.sync()
    assert run("latest", mount.dir).stdout == f"{mount.dir}/weights.pt\n"
    os.unlink(mount / "weights.pt")
    mount.sync()
    assert run("latest", mount.dir).stdout == f"{mount.dir}/losses.npy\n", "a program may keep its state in arrays"


def test_a_run_that_diverged(mount):
    """Everybody says so, and names the last state with finite weights, which stays exact. No rule removes it."""
    mount.umount()
    with open(mount.store / "stepfs.toml", "a") as settings:
        settings.write('\n[[retention]]\nglob = "step_*.pt"\nkeep_last = 2\n')
    mount.mount()
    names = [f"step_{step}.pt" for step in range(1, 9)]
    for at, (name, state) in enumerate(zip(names, walk(8, seed=4))):
        if at >= 3:
            next(iter(state["model"].values()))[0] = math.nan
        torch.save(state, mount / name)
        mount.sync()
    run("gc", mount.dir)
    # The second went if the fourth was not compared yet.
    left = sorted(os.listdir(mount.dir))
    assert left[-3:] == [names[2], *names[6:]] and left[:-3] in ([], names[1:2]), left
    done = run("latest", mount.dir)
    assert done.stdout == f"{mount.dir}/{names[2]}\n" and f"{names[7]} (NOT FINITE)" in done.stderr, done.stderr
    lines = run("ls", mount.dir).stdout.splitlines()
    assert ["NOT FINITE" in line for line in lines[1:-1]] == [False] * len(left[:-2]) + [True] * 2, lines
    assert "whose weights are finite" in run("why", mount / names[2]).stdout
    problems = [problem for problem in mount.status()["problems"] if problem["kind"] == "not-finite"]
    assert len(problems) == 1 and "2 files" in problems[0]["says"] and said("status", "--check", mount.dir)[0] == FAILURE
    # A run must not begin anew because nothing else is left.
    for name in left[:-2]:
        os.unlink(mount / name)
    mount.sync()
    done = run("latest", mount.dir)
    assert done.stdout == f"{mount.dir}/{names[7]}\n" and "no state with finite weights is left" in done.stderr
    *_, state = walk(9, seed=4)
    torch.save(state, mount / "step_9.pt")
    mount.sync()
    done = run("latest", mount.dir)
    assert done.stdout == f"{mount.dir}/step_9.pt\n" and not done.stderr
    assert said("status", "--check", mount.dir)[0] == OK, "the run has left the others behind"


def test_no_store_is_made_inside_a_mount(mount, plain):
    names = save_walk(mount.dir, 2)
    for words in (["import", mount / "new", mount / names[0]], ["mount", mount / "new", plain / "m"]):
        code, told = said(*words)
        assert code == FAILURE and f"lies in the stepfs mount {mount.dir}" in told, told
    code, told = said("export", mount.store, names[0], mount.store / "tmp/copy.pt")
    assert code == FAILURE and f"lies inside the store {mount.store}" in told, told
    assert sorted(os.listdir(mount.dir)) == names and not (mount.store / "tmp/copy.pt").exists()
    assert not (plain / "m").exists()


def test_the_best_checkpoint_as_the_run_states_it(mount):
    code, words = said("best", mount.dir)
    assert code == FAILURE and "nothing below" in words
    for step, (state, loss) in enumerate(zip(walk(3, seed=9), (0.5, 0.2, 0.3)), 1):
        torch.save(state, mount / f"epoch={step}-val_loss={loss}.ckpt")
    mount.sync()
    assert run("best", mount.dir).stdout == f"{mount.dir}/epoch=2-val_loss=0.2.ckpt\n"
    assert "best, exact" in next(line for line in run("ls", mount.dir).stdout.splitlines() if "0.2" in line)
    # A link is a statement, and counts for more.
    # Right after it was made.
    for name in ["epoch=3-val_loss=0.3.ckpt", "epoch=1-val_loss=0.5.ckpt"] * 5:
        os.symlink(name, mount / "link")
        os.rename(mount / "link", mount / "best.ckpt")
        assert run("best", mount.dir).stdout == f"{mount.dir}/{name}\n"


def test_colour_where_it_is_wanted(mount):
    (mount / "x").write_text("x")
    assert "\x1b[" in run("ls", "--color=always", mount.dir).stdout and "\x1b[" in run("--color", "always", "status", mount.dir).stdout
    assert "\x1b" not in run("ls", mount.dir).stdout
    terminal = lambda environment: subprocess.run(["script", "-qec", f"{BIN} ls {mount.dir}", "/dev/null"], capture_output=True, text=True,
                                                  env={**os.environ, "TERM": "xterm", **environment}, stdin=subprocess.DEVNULL).stdout
    if shutil.which("script"):
        assert "\x1b[1m" in terminal({"NO_COLOR": ""}) and "\x1b" not in terminal({"NO_COLOR": "1"}) and "\x1b" not in terminal({"TERM": "dumb"})


# --- mistakes: the answer names the file, what is wrong, and what to do


@pytest.mark.parametrize("command,words", [
    (["mount", "D/none/deep/store", "D/m"], "mkdir -p D/none/deep"),
    (["mount", "D/file", "D/m"], "D/file is a file"),
    (["mount", "D/store2", "D/file"], "D/file is a file; name a directory"),
    (["mount", "D/full", "D/m"], "name an empty or new directory"),
    (["umount", "D/none"], "no stepfs is mounted at D/none; `stepfs status` lists"),
    (["umount", "D/full"], "no stepfs is mounted at D/full"),
    (["ls", "D/full"], "`stepfs status` lists the mounts"),
    (["latest", "D/store"], "stepfs mount D/store DIR"),
    (["export", "D/store", "none", "D/out"], "none is not in D/store; `stepfs ls D/store` shows its files"),
    (["export", "D/store", "a", "D/none/x"], "D/none does not exist; mkdir -p D/none"),
    (["mount", "--profile", "best", "D/s", "D/m"], "write exact, balanced or compact"),
    (["mount", "--memory", "lots", "D/s", "D/m"], "write a size such as 512M or 2G"),
], ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_mistakes(plain, command, words):
    (plain / "file").write_text("x")
    (plain / "full").mkdir()
    (plain / "full/a").write_text("x")
    (plain / "a").write_text("x")
    run("import", plain / "store", plain / "a")
    code, answer = said(*(word.replace("D/", f"{plain}/") for word in command))
    assert code != OK and words.replace("D/", f"{plain}/") in answer, answer
    assert len(answer) < 500 and not (plain / "none").exists() and not (plain / "m").exists()
    # Nothing is said twice.
    assert answer.count("No such file") <= 1 and answer.count("not a directory") <= 1


def test_a_store_that_is_in_use_says_where(mount, plain):
    (plain / "a").write_text("x")
    for command in (["import", mount.store, plain / "a"], ["verify", "--repair", mount.store], ["gc", mount.store]):
        code, words = said(*command)
        assert code == FAILURE and f"mounted at {mount.dir}" in words, words


def test_the_lines_for_lost_settings_work(mount):
    (mount / "a").write_text("x")
    mount.umount()
    (mount.store / "stepfs.toml").unlink()
    for command in (["mount", mount.store, mount.dir], ["ls", mount.store], ["status", mount.store], ["verify", mount.store]):
        code, words = said(*command)
        assert code == FAILURE and "without stepfs.toml" in words, words
    (mount.store / "stepfs.toml").write_text("\n".join(words.splitlines()[1:]))
    mount.mount()
    assert (mount / "a").read_text() == "x"


@pytest.mark.parametrize("line", ["cache_mib = 100", "settle_seconds = 5", "expected_restores = 3"])
def test_a_setting_at_the_end_of_the_file(mount, line):
    mount.umount()
    settings = mount.store / "stepfs.toml"
    text = settings.read_text()
    settings.write_text(text + line + "\n")
    code, words = said("mount", mount.store, mount.dir)
    assert code == FAILURE and f"move `{line.split()[0]}` above the first line that begins with `[`" in words, words
    settings.write_text(text)
    mount.mount()


@needs_root
def test_a_closed_device_is_named(plain):
    os.chmod(plain, 0o777)
    closed = plain / "fuse"
    os.mknod(closed, 0o600 | 0o020000, os.stat("/dev/fuse").st_rdev)
    os.chmod(closed, 0o600)
    inner = " ".join([*NOBODY, BIN, "mount", f"{plain}/store", f"{plain}/mnt"])
    done = subprocess.run(["unshare", "-m", "bash", "-c", f"mount --bind {closed} /dev/fuse && {inner}"], capture_output=True, text=True)
    assert done.returncode == FAILURE and "cannot open /dev/fuse: Permission denied" in done.stderr and "stepfs doctor" in done.stderr, done
    assert done.stderr.count("Permission denied") == 1


def test_the_commands_stand_in_groups():
    for option in ("-h", "--help"):
        words = run(option).stdout
        groups = re.findall(r"(?m)^([A-Z][^\n]*):\n  [a-z]", words)
        assert groups[:5] == ["Mount", "Look", "Choose what stays, and how", "Copy, check and mend", "Shell"], groups
        assert all(len(line) <= 100 for line in words.splitlines())
