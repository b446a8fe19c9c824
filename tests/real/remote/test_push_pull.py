"""`stepfs push` and `stepfs pull`: a whole store to a remote, and a whole remote into a store, without a mount."""

import os
import signal
import subprocess

import numpy as np
import pytest
from harness import BIN, DAMAGE, Mount, make_base, remove_base, require_clean, run, wait_until
from series import save_walk

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]


def read(path):
    with open(path, "rb") as f:
        return f.read()


def noise(seed, size):
    return np.random.default_rng(seed).bytes(size)


@pytest.fixture
def stores(remote):
    """Plain mounts, for stores that have no remote yet."""
    made = []

    def make():
        made.append(Mount(make_base()))
        return made[-1]

    os.environ.update(remote.environment)
    yield make
    for mount in made:
        mount.close()
        remove_base(mount.base)


def objects(store):
    return {path.name: path.stat().st_mtime_ns for path in (store / "objects").rglob("*") if path.is_file()}


def test_a_store_is_pushed_and_pulled_and_needs_the_remote_no_more(remote, stores):
    first, second = stores(), stores()
    first.mount()
    os.mkdir(first / "run")
    names = [f"run/{name}" for name in save_walk(first / "run", 4)]
    (first / "data.bin").write_bytes(noise(1, 300_000))
    (first / "note").write_text("small")
    os.symlink("run", first / "latest")
    first.sync()
    wanted = {name: read(first / name) for name in [*names, "data.bin", "note"]}
    first.umount()
    done = run("push", first.store, check=False)
    assert done.returncode == 1 and "--remote" in done.stderr
    run("push", first.store, "--remote", remote.url)
    there = remote.names()
    # Nothing travels again; the store knows its remote.
    run("push", first.store)
    assert {n for n in remote.names() if "/objects/" in n} == {n for n in there if "/objects/" in n}
    run("pull", second.store, "--remote", remote.other_url)
    before = objects(second.store)
    # From now on the remote is not needed: a mount without it reads everything.
    text = (second.store / "stepfs.toml").read_text()
    (second.store / "stepfs.toml").write_text(text.split("\n[remote]\n")[0])
    second.mount()
    assert {name: read(second / name) for name in wanted} == wanted
    assert os.readlink(second / "latest") == "run"
    second.umount()
    (second.store / "stepfs.toml").write_text(text)
    require_clean(second.store)
    # A second pull brings nothing again, and follows the remote.
    first.mount()
    os.remove(first / "data.bin")
    (first / "note").write_text("changed")
    run("push", first.dir)
    run("pull", second.store)
    assert {name: time for name, time in objects(second.store).items() if name in before} == before
    assert read(second.store / "tree/note") == b"changed" and not (second.store / "tree/data.bin").exists()


def test_a_pull_that_is_interrupted_goes_on(remote, stores):
    first, second = stores(), stores()
    first.mount()
    for number in range(24):
        (first / f"file_{number:02}").write_bytes(noise(number, 3_000_000))
    first.sync()
    first.umount()
    # A push, too.
    process = subprocess.Popen([BIN, "push", first.store, "--remote", remote.url], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: sum("/objects/" in name for name in remote.names()) >= 3 or process.poll() is not None, 30, "it pushes")
    process.send_signal(signal.SIGINT)
    words = process.communicate(timeout=60)[1]
    assert process.returncode == 0 or "goes on from there" in words, words
    before = {name for name in remote.names() if "/objects/" in name}
    run("push", first.store)
    assert before <= set(remote.names())
    assert sum("/objects/" in name for name in remote.names()) <= 25, "at most one object went in vain"
    process = subprocess.Popen([BIN, "pull", second.store, "--remote", remote.other_url], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(objects(second.store)) >= 3 or process.poll() is not None, 30, "it pulls")
    process.send_signal(signal.SIGINT)
    words = process.communicate(timeout=60)[1]
    assert process.returncode == 0 or "goes on from there" in words, words
    came = objects(second.store)
    run("pull", second.store)
    assert len(objects(second.store)) == 24
    assert {name: objects(second.store)[name] for name in came} == came, "nothing came twice"
    for number in range(24):
        assert run("cat", second.store, f"file_{number:02}", text=False).stdout == noise(number, 3_000_000)


def test_a_pull_names_what_cannot_come_and_brings_the_rest(remote, stores):
    if remote.url.startswith("s3"):
        pytest.skip("the test damages a file")
    first, second = stores(), stores()
    first.mount()
    for name, size in (("good", 300_000), ("bad", 500_000)):
        (first / name).write_bytes(noise(size, size))
    first.sync()
    first.umount()
    run("push", first.store, "--remote", remote.url)
    bad = next(remote.root / name for name, size in remote.names().items() if "/objects/" in name and size > 400_000)
    content = read(bad)
    bad.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    done = run("pull", second.store, "--remote", remote.other_url, check=False)
    assert done.returncode == DAMAGE and "bad: " in done.stderr and "good" not in done.stderr, done.stderr
    assert run("cat", second.store, "good", text=False).stdout == noise(300_000, 300_000)
    bad.write_bytes(content)
    run("pull", second.store)
    assert run("cat", second.store, "bad", text=False).stdout == noise(500_000, 500_000)


def test_a_mount_pulls_one_directory(remote, nodes):
    first, second = nodes(), nodes()
    for name in ("a", "b"):
        os.mkdir(first / name)
        (first / name / "file").write_bytes(noise(len(name), 2_000_000))
    first.pushed()
    second.sees("a/file"), second.sees("b/file")
    run("pull", second.dir, "a")
    assert (second.state("a/file"), second.state("b/file")) == ("released", "remote")


def test_a_pull_says_what_there_is_not(remote, stores):
    first, second = stores(), stores()
    first.mount()
    (first / "data.bin").write_bytes(noise(2, 200_000))
    first.sync()
    first.umount()
    run("push", first.store, "--remote", remote.url)
    # A store's own files are there already.
    run("pull", first.store)
    # Another prefix, and a path that nothing has. Neither becomes the store's remote.
    wrong = run("pull", second.store, "--remote", f"{remote.url}-of-nobody", check=False)
    assert wrong.returncode == 1 and "-of-nobody" in wrong.stderr
    assert not (second.store / "stepfs.toml").exists() or "-of-nobody" not in (second.store / "stepfs.toml").read_text()
    nothing = run("pull", second.store, "run/stpe_100", "--remote", remote.url, check=False)
    assert nothing.returncode == 1 and "run/stpe_100" in nothing.stderr
    # Another file has the place of one of the remote's.
    (second.store / "tree/data.bin").write_bytes(noise(3, 100_000))
    taken = run("pull", second.store, check=False)
    assert taken.returncode == DAMAGE and "data.bin" in taken.stderr
    os.remove(second.store / "tree/data.bin")
    # An empty tree would pass for one that was lost.
    (second.store / "tree/kept").write_bytes(b"here")
    removed = run("pull", second.store, "./data.bin", check=False)
    assert removed.returncode == DAMAGE and "removed in this store" in removed.stderr
