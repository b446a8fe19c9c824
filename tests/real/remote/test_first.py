"""What a user meets first: a fresh mount, renames on another node, an owner that was away, and Ctrl-C."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from harness import BIN, remove_base, run, wait_until
from remotes import Directory
from series import save_walk

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]


def read(path):
    with open(path, "rb") as f:
        return f.read()


def noise(seed, length=70_000):
    return np.random.default_rng(seed).bytes(length)


def bytes_below(top):
    return {str(path.relative_to(top)): read(path) for path in sorted(Path(top).rglob("*")) if path.is_file()}


def exported(source):
    """The files that a store or a remote exports."""
    with tempfile.TemporaryDirectory() as place:
        run("export", source, ".", f"{place}/all")
        return bytes_below(f"{place}/all")


def everywhere(nodes, wanted, remote):
    """Each node, and a fresh one, show these files and no others."""
    for node in nodes:
        wait_until(lambda: bytes_below(node.dir) == wanted, 30, f"{node.dir} has the files")
    assert exported(remote.url) == wanted


def test_a_fresh_mount_shows_all_names_at_once(remote, nodes):
    first = nodes()
    for number in range(30):
        os.makedirs(first / f"run_{number % 3}", exist_ok=True)
        (first / f"run_{number % 3}/step_{number}.bin").write_bytes(noise(number))
    first.pushed()
    wanted = set(bytes_below(first.dir))
    fresh = nodes()
    assert {str(path.relative_to(fresh.dir)) for path in Path(fresh.dir).rglob("*.bin")} == wanted


def test_a_mount_says_why_the_remote_does_not_answer(remote, nodes):
    if isinstance(remote, Directory):
        remote.root.mkdir(parents=True)
        remote.root.joinpath("nodes").write_bytes(b"")
        url, words = remote.url, "nodes"
    else:
        url, words = "s3://no-such-bucket/run", "bucket is missing"
    os.environ.update(remote.environment)
    store, place = remote.base / "store", remote.base / "mnt"
    done = run("mount", store, place, "--remote", url)
    try:
        assert words in done.stderr, done.stderr
        (place / "x").write_text("training goes on")
    finally:
        run("umount", place)


def test_another_nodes_file_takes_the_place_of_another(remote, nodes):
    a, b = nodes('node = "a"'), nodes('node = "b"')
    os.mkdir(a / "best")
    (a / "best/x").write_bytes(noise(4))
    os.mkdir(a / "new")
    (a / "new/x").write_bytes(noise(5))
    for number in (1, 2, 3):
        (a / f"a{number}").write_bytes(noise(number))
    (a / "small").write_text("small")
    (a / "other").write_text("other")
    a.pushed()
    b.sees("other")
    wait_until(lambda: len(bytes_below(b.dir)) == 7, 20, "b has all")
    os.rename(b / "a1", b / "a2")
    os.rename(b / "small", b / "other")
    shutil.rmtree(b / "best")
    os.rename(b / "new", b / "best")
    b.pushed()
    wanted = {"a2": noise(1), "a3": noise(3), "other": b"small", "best/x": noise(5)}
    everywhere([a, b], wanted, remote)
    # Two names are exchanged faster than anybody looks.
    os.rename(b / "a2", b / "t")
    os.rename(b / "a3", b / "a2")
    os.rename(b / "t", b / "a3")
    b.pushed()
    everywhere([a, b], {**wanted, "a2": noise(3), "a3": noise(1)}, remote)


def test_an_owner_that_was_away_shows_what_others_did(remote, nodes):
    a, b = nodes('node = "a"'), nodes('node = "b"')
    for number in (1, 2, 3):
        (a / f"a{number}").write_bytes(noise(number))
    a.pushed()
    wait_until(lambda: len(bytes_below(b.dir)) == 3, 20, "b has all")
    a.umount()
    os.remove(b / "a1")
    (b / "a2").write_text("new")
    os.rename(b / "a3", b / "c")
    b.pushed()
    a.mount()
    everywhere([a, b], {"a2": b"new", "c": noise(3)}, remote)


def test_a_lossy_file_is_called_so_before_it_is_read(remote, nodes):
    a = nodes()
    names = save_walk(a.dir, 5)
    a.sync()
    a.pushed()
    lossy = {name for name in names if os.getxattr(a / name, "user.stepfs.lossy") != b"0"}
    assert lossy
    b = nodes()
    assert {name for name in names if os.getxattr(b / name, "user.stepfs.lossy") != b"0"} == lossy
    shown = {line["path"]: line["lossy"] for line in b.ls()}
    assert {name for name in names if shown[name] != "0"} == lossy
    b.umount()
    done = run("verify", b.store)
    assert "only on the remote" in done.stdout, done.stdout
    done = run("cat", b.store, names[0], check=False)
    assert done.returncode == 1 and "only the remote has it" in done.stderr, done.stderr


def test_an_unmount_does_not_wait_for_a_large_file(remote, nodes):
    a = nodes("bandwidth_mib = 1")
    (a / "large.bin").write_bytes(noise(1, 64 << 20))
    wait_until(lambda: a.progress()["files"] == 1, 20, "it is to be pushed")
    time.sleep(3)
    begun = time.monotonic()
    a.umount()
    # Without a stop it takes a minute.
    assert time.monotonic() - begun < 20


def test_reads_go_on_while_a_put_waits_for_its_bandwidth(remote, nodes):
    a = nodes()
    (a / "data.bin").write_bytes(noise(2, 1 << 20))
    a.pushed()
    b = nodes("bandwidth_mib = 1")
    (b / "large.bin").write_bytes(noise(1, 64 << 20))
    wait_until(lambda: b.progress()["files"] == 1, 20, "it is to be pushed")
    time.sleep(3)
    begun = time.monotonic()
    assert read(b / "data.bin") == noise(2, 1 << 20)
    assert time.monotonic() - begun < 4
    assert b.progress()["files"] == 1, "the put is over, so this shows nothing"


def test_ctrl_c_leaves_no_copy_of_a_remote(remote, nodes):
    a = nodes()
    for number in range(40):
        (a / f"{number}.bin").write_bytes(noise(number, 1 << 20))
    a.pushed()
    place = Path(tempfile.mkdtemp())
    try:
        for wait in (0.1, 0.3, 0.6):
            command = [BIN, "export", remote.url, ".", place / f"{wait}"]
            environment = {**os.environ, "TMPDIR": str(place)}
            process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            time.sleep(wait)
            process.send_signal(signal.SIGINT)
            process.wait(60)
            assert not list(place.glob("stepfs-remote-*"))
    finally:
        remove_base(place)


def test_a_pull_brings_what_was_renamed_here(remote, nodes):
    a, b = nodes('node = "a"'), nodes('node = "b"')
    os.mkdir(a / "run")
    names = save_walk(a / "run", 3)
    (a / "run/data.bin").write_bytes(noise(1, 300_000))
    a.sync()
    a.pushed()
    wanted = {f"run2/{name}": data for name, data in bytes_below(a / "run").items()}
    wait_until(lambda: len(list(Path(b.dir).rglob("*"))) == len(names) + 2, 20, "b has all names")
    os.rename(b / "run", b / "run2")
    b.pushed()
    wait_until(lambda: os.path.exists(a / "run2"), 20, "a sees the name")
    b.umount()
    run("pull", b.store)
    a.kill()
    assert exported(b.store) == wanted
