"""A store and its mirror: a plain directory, and moto as S3. Real daemons, real mounts."""

import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import BIN, DAMAGE, Mount, make_base, remove_base, require_clean, run, run_json, wait_until
from mirrors import Directory, Expiring, Mirrored
from series import save_walk, walk

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]


def read(path):
    with open(path, "rb") as f:
        return f.read()


def noise(seed, size):
    return np.random.default_rng(seed).bytes(size)


def everything(root):
    """Each file and link below a directory: its bytes or target, mode, owner and time."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            of = os.lstat(path)
            content = os.readlink(path) if os.path.islink(path) else read(path)
            time = None if os.path.islink(path) else of.st_mtime_ns
            found[os.path.relpath(path, root)] = (content, of.st_mode, of.st_uid, time)
    return found


def pull(url, base, *more, code=0):
    """A store of what a mirror has."""
    os.makedirs(base, exist_ok=True)
    done = run("pull", url, base / "pulled.store", *more, check=code == 0)
    assert done.returncode == code, done.stderr
    return base / "pulled.store"


def fill(mount):
    os.makedirs(mount / "run/empty/deep")
    names = [f"run/{name}" for name in save_walk(mount / "run", 5)]
    torch.save(torch.arange(50_000), mount / "run/empty/deep/data.bin")
    (mount / "config.json").write_text("{}")
    os.chmod(mount / "config.json", 0o640)
    os.symlink("run/step_0005.pt", mount / "latest")
    (mount / "noise.bin").write_bytes(noise(1, 9_000_000))
    os.makedirs(mount / "an/empty/one")
    return names


def test_a_store_that_is_lost_comes_back(mirror, mounts):
    first = mounts(mirror)
    names = fill(first)
    first.sync()
    first.mirrored()
    assert first.progress()["files"] == 0 and first.progress()["failing"] is None
    wanted = everything(first.dir)
    # The machine and its disk are gone.
    first.kill()
    store = pull(mirror.other_url, first.base)
    require_clean(store)
    second = mounts(store=store)
    assert everything(second.dir) == wanted
    assert os.path.isdir(second / "an/empty/one")
    # Training goes on from the newest, exact.
    state = torch.load(second / names[-1], weights_only=False)
    assert state["step"] == 5
    torch.save(state, second / "run/step_0006.pt")
    second.sync()
    second.remount()
    assert read(second / names[-2]) == wanted[names[-2]][0]


def marks_of(mount, names):
    """The pins and profiles that files and directories of a store have themselves."""
    marks = {}
    for name in names:
        at = mount.store / "tree" / name
        own = {mark: os.getxattr(at, mark) for mark in os.listxattr(at) if mark in ("user.stepfs.pin", "user.stepfs.profile")}
        marks |= {name: own} if own else {}
    return marks


def test_pins_and_profiles_travel(mirror, mounts):
    mount = mounts(mirror)
    os.mkdir(mount / "run")
    names = [f"run/{name}" for name in save_walk(mount / "run", 3)]
    mount.sync()
    run("pin", mount / names[1], mount / names[2])
    run("profile", "--set", "exact", mount / "run")
    mount.mirrored()
    other = mounts(store=pull(mirror.other_url, mount.base))
    pinned = {"user.stepfs.pin": b"1"}
    assert marks_of(other, [*names, "run"]) == {names[1]: pinned, names[2]: pinned, "run": {"user.stepfs.profile": b"exact"}}
    # Training goes on there, and the pinned file stays as it is.
    exact = read(other / names[2])
    torch.save(list(walk(4))[3], other / "run/step_0004.pt")
    other.sync()
    assert other.state(names[2]) == "sealed" and read(other / names[2]) == exact
    # Removed marks go.
    run("unpin", mount / names[2])
    run("profile", "--unset", mount / "run")
    mount.mirrored()
    again = mounts(store=pull(mirror.other_url, mount.base / "again"))
    assert marks_of(again, [*names, "run"]) == {names[1]: pinned}


def test_a_removal_is_undone_by_time(mirror, mounts):
    mount = mounts(mirror)
    fill(mount)
    mount.sync()
    mount.mirrored()
    wanted = everything(mount.dir)
    time.sleep(1.1)
    then = f"@{int(time.time())}"
    time.sleep(1.1)
    shutil.rmtree(mount / "run")
    os.remove(mount / "latest")
    mount.mirrored()
    assert {line["path"] for line in run_json("ls", mirror.url, "--json")} == {"config.json", "noise.bin"}
    assert {line["path"] for line in run_json("ls", mirror.url, "--json", "--at", then)} == set(wanted)
    states = run_json("status", mirror.url, "--json")
    assert len(states) >= 2 and states[0]["at"] <= int(then[1:]) < states[-1]["at"]
    other = mounts(store=pull(mirror.other_url, mirror.base, "--at", then))
    assert everything(other.dir) == wanted
    done = run("ls", mirror.url, "--at", "@7", check=False)
    assert done.returncode == 1 and "no state of that time" in done.stderr, done.stderr


@pytest.mark.parametrize("size", [1000, 100_000])
def test_old_times_on_new_bytes_travel(mirror, mounts, size):
    mount = mounts(mirror)
    (mount / "x").write_bytes(noise(1, size))
    mount.mirrored()
    was = os.stat(mount / "x")
    (mount / "x").write_bytes(noise(2, size))
    os.utime(mount / "x", ns=(was.st_atime_ns, was.st_mtime_ns))
    mount.mirrored()
    assert run("cat", mirror.other_url, "x", text=False).stdout == noise(2, size)
    # The same while nothing is mounted.
    mount.umount()
    with open(mount.store / "tree/x", "r+b") as f:
        f.write(noise(3, size))
    os.utime(mount.store / "tree/x", ns=(was.st_atime_ns, was.st_mtime_ns))
    mount.mount()
    mount.mirrored()
    assert run("cat", mirror.other_url, "x", text=False).stdout == noise(3, size)


def test_names_links_and_directories_move_and_go(mirror, mounts):
    mount = mounts(mirror)
    fill(mount)
    mount.sync()
    mount.mirrored()
    before = sum(mirror.names().values())

    def is_mirrored():
        mount.mirrored()
        base = mirror.base / "seen"
        other = mounts(store=pull(mirror.other_url, base))
        assert everything(other.dir) == everything(mount.dir)
        other.umount()
        shutil.rmtree(base)

    os.rename(mount / "run", mount / "moved")
    os.remove(mount / "latest")
    is_mirrored()
    os.rename(mount / "noise.bin", mount / "moved/noise.bin")
    os.chmod(mount / "moved/noise.bin", 0o600)
    os.utime(mount / "moved/noise.bin")
    os.symlink("nowhere", mount / "latest")
    is_mirrored()
    assert sum(mirror.names().values()) < before + 100_000, "bytes travelled again"
    # Removed, then a kill, and gone while nobody looked.
    os.remove(mount / "config.json")
    mount.kill()
    os.remove(mount.store / "tree/latest")
    mount.mount()
    is_mirrored()


def test_names_that_programs_make_without_a_write_travel(mirror, mounts):
    mount = mounts(mirror)
    os.symlink("nowhere", mount / "link")
    sizes = {"small": 1000, "large": 100_000}
    for name, size in sizes.items():
        (mount / name).write_bytes(noise(1, size))
        os.link(mount / name, mount / f"{name}.other")
    mount.mirrored()

    def is_mirrored():
        mount.mirrored()
        base = mirror.base / "seen"
        other = mounts(store=pull(mirror.other_url, base))
        assert everything(other.dir) == everything(mount.dir)
        other.umount()
        shutil.rmtree(base)

    os.link(mount / "link", mount / "link.other", follow_symlinks=False)
    os.mknod(mount / "empty", 0o600 | stat.S_IFREG)
    is_mirrored()
    # After this the kernel knows one name of each file only.
    mount.remount()
    mount.mirrored()
    for name, size in sizes.items():
        with open(mount / name, "r+b") as f:
            f.write(noise(2, size))
        os.chmod(mount / name, 0o640)
    is_mirrored()


def test_a_daemon_that_is_killed_while_it_puts_repeats_nothing(mirror, mounts):
    mount = mounts(mirror, "bandwidth_mib = 8")
    for number in range(6):
        (mount / f"file_{number}").write_bytes(noise(number, 2_000_000))
    blobs = lambda: {name for name in mirror.names() if name.startswith("blobs/")}  # noqa: E731
    wait_until(lambda: len(blobs()) >= 2, 30, "some bytes are there")
    mount.kill()
    before = blobs()
    mount.mount()
    mount.mirrored()
    assert before <= blobs()
    # Six files, and a few states of one directory.
    assert sum(size > 1_000_000 for name, size in mirror.names().items()) == 6


def test_one_save_beside_many_names(mirror, mounts):
    mount = mounts(mirror)
    for folder in range(20):
        os.mkdir(mount / f"{folder}")
        for number in range(20):
            (mount / f"{folder}/{number}.json").write_text(f"{folder} {number}")
    mount.mirrored()
    before = mirror.names()
    (mount / "7/7.json").write_text("new")
    mount.mirrored()
    new = {name: size for name, size in mirror.names().items() if name not in before}
    # The file, its directory, the one above, and a manifest.
    assert len(new) <= 6 and sum(new.values()) < 6_000, new
    assert run("cat", mirror.other_url, "7/7.json").stdout == "new"


def test_commands_read_a_mirror(mirror, mounts):
    mount = mounts(mirror)
    os.mkdir(mount / "run")
    names = save_walk(mount / "run", 3)
    (mount / "note").write_text("small")
    (mount / "data.bin").write_bytes(noise(2, 300_000))
    mount.sync()
    mount.mirrored()
    url = mirror.other_url
    listed = {line["path"]: line for line in run_json("ls", url, "--json")}
    assert set(listed) == {"note", "data.bin", *(f"run/{name}" for name in names)}
    assert listed["data.bin"]["logical_bytes"] == 300_000
    assert "note" in run("ls", url).stdout and "--at @" in run("status", url).stdout
    assert "no damage in its newest state" in run("verify", url).stdout
    assert "no damage in this state" in run("verify", url, "--at", "0s").stdout
    done = run("pull", url, mount / "inside", check=False)
    assert done.returncode == 1 and "lies in the stepfs mount" in done.stderr and not (mount / "inside").exists()
    place = mount.base / "exported"
    run("export", url, "run", place)
    for name in names:
        assert read(place / name) == read(mount / "run" / name), name
    assert run("cat", url, "note").stdout == "small"
    done = run("pull", url, mount.base / "none.store", "nothing", check=False)
    assert done.returncode == 1 and "nothing is not on" in done.stderr and not (mount.base / "none.store").exists()
    done = run("pull", f"{url}-not", mount.base / "none.store", check=False)
    assert done.returncode == 1 and "no mirror" in done.stderr and not (mount.base / "none.store").exists()


def test_another_store_is_refused_in_words(mirror, mounts):
    first = mounts(mirror)
    (first / "x").write_text("first")
    first.mirrored()
    base = make_base()
    try:
        done = run("mount", base / "store", base / "mnt", "--mirror", mirror.url, check=False)
        assert done.returncode == 1 and "another store" in done.stderr, done.stderr
        assert not (base / "store").exists()
        # Its own name beside it.
        second = Mount(base)
        run("mount", second.store, second.dir, "--mirror", f"{mirror.url}-2")
        (second.dir / "x").write_text("second")
        second.sync(mirror=True)
        assert run("cat", f"{mirror.url}-2", "x").stdout == "second" and run("cat", mirror.url, "x").stdout == "first"
        run("umount", second.dir)
    finally:
        run("umount", base / "mnt", check=False)
        remove_base(base)


def test_what_cannot_work_is_refused_in_words(mounts):
    base = make_base()
    try:
        run("mount", base / "store", base / "mnt")
        done = run("sync", "--mirror", base / "mnt", check=False)
        assert done.returncode == 1 and "without a mirror" in done.stderr
        run("umount", base / "mnt")
        for url, words in [("ftp://x/y", "s3://BUCKET/PREFIX"), ("s3://bucket", "s3://BUCKET/PREFIX"),
                           ("s3://key:secret@bucket/x", "AWS_"), (f"file://{base}/store/mirror", "in one another")]:
            done = run("mount", base / "store", base / "mnt", "--mirror", url, check=False)
            assert done.returncode == 1 and words in done.stderr, (url, done.stderr)
            # A URL that is refused is written nowhere: it may hold a secret, and would stay in the way of a right one.
            text = (base / "store/stepfs.toml").read_text()
            assert "\n[mirror]" not in text and "secret" not in text + done.stderr, url
    finally:
        remove_base(base)


def test_no_secret_is_written(mirror, mounts):
    mount = mounts(mirror)
    (mount / "x.bin").write_bytes(noise(1, 100_000))
    mount.mirrored()
    secret = mirror.environment.get("AWS_SECRET_ACCESS_KEY", "very-secret-word")
    mount.umount()
    for path in mount.base.rglob("*"):
        if path.is_file():
            assert secret.encode() not in read(path), path


def test_damage_is_named_and_the_rest_comes(mirror, mounts):
    if mirror.url.startswith("s3"):
        pytest.skip("the test damages a file")
    mount = mounts(mirror)
    for name, size in (("good", 300_000), ("bad", 500_000)):
        (mount / name).write_bytes(noise(size, size))
    mount.mirrored()
    mount.umount()
    bad = next(mirror.root / name for name, size in mirror.names().items() if size > 400_000)
    content = read(bad)
    bad.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    store = pull(mirror.other_url, mirror.base, code=DAMAGE)
    assert run("cat", store, "good", text=False).stdout == noise(300_000, 300_000)
    assert run("verify", mirror.url, check=False).returncode == DAMAGE
    bad.write_bytes(content)
    pull(mirror.other_url, mirror.base)
    assert run("cat", store, "bad", text=False).stdout == noise(500_000, 500_000)
    # Lost for good: the store has the bytes, and puts them again.
    bad.unlink()
    mount.mount()
    mount.mirrored()
    assert run("cat", mirror.other_url, "bad", text=False).stdout == noise(500_000, 500_000)


def test_an_unmount_does_not_wait_for_a_large_file(mirror, mounts):
    mount = mounts(mirror, "bandwidth_mib = 1")
    (mount / "large.bin").write_bytes(noise(1, 64 << 20))
    wait_until(lambda: mount.progress()["files"] == 1, 30, "it is on its way")
    time.sleep(3)
    begun = time.monotonic()
    mount.umount()
    # Without a stop it takes a minute.
    assert time.monotonic() - begun < 20


def test_interrupted_commands_leave_nothing_and_go_on(mirror, mounts):
    mount = mounts(mirror)
    for number in range(40):
        (mount / f"{number}.bin").write_bytes(noise(number, 1 << 20))
    mount.mirrored()
    place = Path(tempfile.mkdtemp())
    try:
        for wait in (0.1, 0.3, 0.6):
            command = [BIN, "export", mirror.url, ".", place / f"{wait}"]
            environment = {**os.environ, "TMPDIR": str(place)}
            process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            time.sleep(wait)
            process.send_signal(signal.SIGINT)
            process.wait(60)
            assert not list(place.glob("stepfs-mirror-*"))
        for wait in (0.1, 0.2, 0.4):
            process = subprocess.Popen([BIN, "pull", mirror.url, place / "store"], stderr=subprocess.PIPE, text=True)
            time.sleep(wait)
            process.send_signal(signal.SIGINT)
            words = process.communicate(timeout=60)[1]
            assert process.returncode == 0 or process.returncode < 0 or "goes on from there" in words, words
        run("pull", mirror.url, place / "store")
        for number in range(40):
            assert run("cat", place / "store", f"{number}.bin", text=False).stdout == noise(number, 1 << 20)
    finally:
        remove_base(place)


@pytest.mark.waits
def test_a_mirror_that_is_away_delays_nobody_and_catches_up():
    base = make_base()
    mirror = Directory(base)
    mount = Mirrored(make_base(), mirror)
    try:
        mount.mount()
        (mount / "before").write_bytes(b"1" * 100_000)
        mount.mirrored()
        mirror.go_away()
        # With nothing new: the mirror is asked nevertheless.
        done = run("sync", "--mirror", mount.dir, check=False, timeout=300)
        assert done.returncode == 1 and "not on the mirror" in done.stderr, done.stderr
        slowest = 0
        for step, state in enumerate(walk(20)):
            begun = time.monotonic()
            with open(mount / f"step_{step:04d}.pt", "wb") as f:
                torch.save(state, f)
                f.flush()
                os.fsync(f.fileno())
            slowest = max(slowest, time.monotonic() - begun)
        assert slowest < 10, f"a save took {slowest:.1f} s"
        wait_until(lambda: mount.progress()["failing"], 20, "status says that the mirror is away")
        done = run("sync", "--mirror", mount.dir, check=False, timeout=300)
        assert done.returncode == 1, done.stderr
        mirror.come_back()
        mount.mirrored()
        assert mount.progress()["failing"] is None
        for name in ("step_0019.pt", "step_0000.pt"):
            assert run("cat", mirror.url, name, text=False).stdout == read(mount / name)
    finally:
        mount.close()
        remove_base(base)


@pytest.mark.waits
def test_a_file_that_fails_ends_a_sync_while_saves_go_on():
    base = make_base()
    mirror = Directory(base)
    mount = Mirrored(make_base(), mirror)
    over = threading.Event()

    def save():
        number = 0
        while not over.wait(0.3):
            number += 1
            (mount / f"{number % 5}.bin").write_bytes(noise(number, 200_000))

    saves = threading.Thread(target=save)
    try:
        mount.mount()
        before = set(mirror.names())
        (mount / "refused").write_bytes(noise(7, 3000))
        mount.mirrored()
        blob = next(n for n, size in mirror.names().items() if n not in before and n.startswith("blobs/") and size >= 3000)
        os.remove(mount / "refused")
        mount.umount()
        # A directory has its place: only these bytes cannot be put.
        (mirror.root / blob).unlink()
        (mirror.root / blob / "x").mkdir(parents=True)
        mount.mount()
        saves.start()
        (mount / "refused").write_bytes(noise(7, 3000))
        done = run("sync", "--mirror", mount.dir, check=False, timeout=150)
        assert done.returncode == 1 and "refused" in done.stderr, done.stderr
        shutil.rmtree(mirror.root / blob)
        # Saves go on.
        mount.mirrored(60)
        assert run("cat", mirror.url, "refused", text=False).stdout == noise(7, 3000)
    finally:
        over.set()
        if saves.is_alive():
            saves.join()
        mount.close()
        remove_base(base)


@pytest.mark.waits
def test_credentials_that_expire_are_read_anew(monkeypatch):
    pytest.importorskip("moto")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    mirror = Expiring()
    mount = Mirrored(make_base(), mirror)
    try:
        for name, value in mirror.environment.items():
            monkeypatch.setenv(name, value)
        mount.mount()
        for number in range(4):
            (mount / f"{number}.bin").write_bytes(noise(number, 10 << 20))
            mount.mirrored()
            time.sleep(2 * mirror.LIFE)
        assert len(mirror.used) >= 4
        assert run("cat", mirror.url, "3.bin", text=False).stdout == noise(3, 10 << 20)
    finally:
        mount.close()
        mirror.close()


def test_an_unmounted_file_system_is_an_error():
    base = make_base()
    mirror = Directory(base)
    mount = Mirrored(make_base(), mirror)
    real = Path(base) / "real"
    real.mkdir()
    mirror.root.mkdir()
    subprocess.run(["mount", "--bind", real, mirror.root], check=True)
    try:
        mount.mount()
        (mount / "one.bin").write_bytes(noise(1, 100_000))
        mount.mirrored()
        subprocess.run(["umount", "-l", mirror.root], check=True)
        (mount / "two.bin").write_bytes(noise(2, 100_000))
        done = run("sync", "--mirror", mount.dir, check=False, timeout=120)
        assert done.returncode == 1 and "mounted" in done.stderr, done.stderr
        assert list(mirror.root.iterdir()) == [], "bytes lie below the mount point"
        subprocess.run(["mount", "--bind", real, mirror.root], check=True)
        mount.mirrored()
        assert run("cat", mirror.url, "two.bin", text=False).stdout == noise(2, 100_000)
    finally:
        mount.close()
        subprocess.run(["umount", "-l", mirror.root], check=False)
        remove_base(base)


@pytest.mark.waits
def test_a_full_mirror_gets_room_by_removing():
    base = make_base()
    mirror = Directory(base)
    mount = Mirrored(make_base(), mirror, 'keep_manifests = "1s"')
    mirror.root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", mirror.root], check=True)
    try:
        mount.mount()
        for number in range(3):
            (mount / f"{number}.bin").write_bytes(noise(number, 10 << 20))
        mount.mirrored()
        (mount / "3.bin").write_bytes(noise(3, 15 << 20))
        done = run("sync", "--mirror", mount.dir, check=False, timeout=120)
        assert done.returncode == 1 and "no room" in done.stderr, done.stderr
        os.remove(mount / "0.bin")
        os.remove(mount / "1.bin")
        wait_until(lambda: mount.progress()["files"] == 0, 120, "there is room again")
        assert run("cat", mirror.url, "3.bin", text=False).stdout == noise(3, 15 << 20)
    finally:
        mount.close()
        subprocess.run(["umount", "-l", mirror.root], check=False)
        remove_base(base)
