"""A store and its remote: a plain directory, and moto as S3. Real daemons, real mounts."""

import os
import time

import numpy as np
import pytest
import torch
from harness import DAMAGE, make_base, remove_base, require_clean, run, run_json, wait_until
from remotes import Directory, Node
from series import save_walk, walk

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]


def read(path):
    with open(path, "rb") as f:
        return f.read()


def test_a_fresh_store_shows_and_reads_everything(remote, nodes):
    first = nodes('newest = "exact"')
    os.makedirs(first / "run/empty/deep")
    names = [f"run/{name}" for name in save_walk(first / "run", 5)]
    torch.save(torch.arange(50_000), first / "run/empty/deep/data.bin")
    (first / "config.json").write_text("{}")
    os.chmod(first / "config.json", 0o640)
    os.symlink("run/step_0005.pt", first / "latest")
    (first / "noise.bin").write_bytes(np.random.default_rng(1).bytes(3_000_000))
    first.sync()
    first.pushed()
    assert first.progress()["files"] == 0
    everything = {os.path.relpath(os.path.join(f, n), first.dir) for f, _, files in os.walk(first.dir) for n in files}
    wanted = {name: (read(first / name), os.lstat(first / name)) for name in everything}
    # The machine and its disk are gone.
    first.kill()
    first.close()
    second = nodes('newest = "exact"')
    second.sees("noise.bin")
    for name in everything:
        second.sees(name)
    for name, (content, was) in sorted(wanted.items()):
        now = os.lstat(second / name)
        assert (now.st_size, now.st_mode, now.st_uid) == (was.st_size, was.st_mode, was.st_uid), name
        if name != "latest":
            assert now.st_mtime_ns == was.st_mtime_ns, name
    # Nothing is damaged or lost, although no object is here yet.
    require_clean(second.store)
    assert second.state("run/step_0001.pt") == "remote"
    for name, (content, _) in wanted.items():
        assert read(second / name) == content, name
    assert os.readlink(second / "latest") == "run/step_0005.pt"
    assert second.state("run/step_0001.pt") == "released"
    # Training goes on from the newest, exact; the store archives and pushes what follows.
    state = torch.load(second / names[-1], weights_only=False)
    assert state["step"] == 5
    torch.save(state, second / "run/step_0006.pt")
    second.sync()
    second.pushed()
    second.remount()
    assert read(second / "run/step_0001.pt") == wanted["run/step_0001.pt"][0]
    second.umount()
    require_clean(second.store)


def test_no_secret_is_written(remote, nodes):
    node = nodes()
    (node / "a").write_bytes(b"x" * 100_000)
    node.pushed()
    node.umount()
    secret = remote.environment.get("AWS_SECRET_ACCESS_KEY", "no such word").encode()
    for folder, _, files in os.walk(node.base):
        for name in files:
            with open(os.path.join(folder, name), "rb") as f:
                assert secret not in f.read(), name


def test_four_daemons_see_each_others_files(remote, nodes):
    four = [nodes() for _ in range(4)]
    for rank, node in enumerate(four):
        os.makedirs(node / "run", exist_ok=True)
        (node / f"run/rank_{rank}.json").write_text(f"[{rank}]")
        (node / f"run/rank_{rank}.bin").write_bytes(np.random.default_rng(rank).bytes(300_000))
    for node in four:
        node.pushed()
    for node in four:
        for rank in range(4):
            node.sees(f"run/rank_{rank}.bin")
            node.sees(f"run/rank_{rank}.json")
            assert read(node / f"run/rank_{rank}.json") == f"[{rank}]".encode()
            assert read(node / f"run/rank_{rank}.bin") == np.random.default_rng(rank).bytes(300_000)
    # A name that one rewrites, removes or renames changes everywhere.
    (four[0] / "run/rank_0.json").write_text("[0, 1]")
    os.remove(four[1] / "run/rank_2.json")
    os.rename(four[2] / "run/rank_3.bin", four[2] / "run/three.bin")
    for node in four:
        wait_until(lambda: read(node / "run/rank_0.json") == b"[0, 1]", 20, "the new content everywhere")
        wait_until(lambda: not os.path.exists(node / "run/rank_2.json"), 20, "the removal everywhere")
        node.sees("run/three.bin")
        wait_until(lambda: not os.path.exists(node / "run/rank_3.bin"), 20, "the old name is gone everywhere")
        assert read(node / "run/three.bin") == np.random.default_rng(3).bytes(300_000)
    # A checkpoint that one node rotates away leaves no directory behind.
    for name in os.listdir(four[0] / "run"):
        os.remove(four[0] / "run" / name)
    os.rmdir(four[0] / "run")
    for node in four:
        wait_until(lambda: not os.path.exists(node / "run"), 20, "the directory is gone everywhere")


def test_names_that_were_removed_while_the_remote_was_not_asked_stay_removed(remote, nodes):
    a, b = nodes(), nodes()
    for name in ("one", "two"):
        (a / name).write_bytes(name.encode() * 50_000)
    a.pushed()
    b.sees("one"), b.sees("two")
    wait_until(lambda: (b.store / "remote.shown").exists(), 10, "what is shown is saved")
    b.remount()
    os.remove(b / "one")
    b.remount()
    wait_until(lambda: not os.path.exists(a / "one"), 20, "the removal reaches the owner")
    assert not os.path.exists(b / "one") and read(b / "two") == b"two" * 50_000


def test_a_command_does_not_pass_over_what_cannot_be_read():
    base = make_base()
    remote = Directory(base)
    node = Node(make_base(), remote, 'node = "a"\nnewest = "exact"')
    try:
        node.mount()
        os.mkdir(node / "run")
        names = save_walk(node / "run", 2)
        (node / "small").write_bytes(b"small")
        (node / "first").write_bytes(np.random.default_rng(1).bytes(100_000))
        (node / "lost").write_bytes(np.random.default_rng(2).bytes(500_000))
        node.pushed()
        node.umount()
        run("verify", remote.url)
        whole = {name: read(node.store / "tree" / name) for name in ("first", "small")}
        # One object is gone: its name is told, and all others come.
        lost = next(name for name in remote.names() if "/objects/" in name and 400_000 < remote.names()[name] < 600_000)
        (remote.root / lost).unlink()
        done = run("export", remote.url, ".", base / "out", check=False)
        assert done.returncode == DAMAGE and "lost" in done.stderr and "first" not in done.stderr, done.stderr
        assert {name: read(base / "out" / name) for name in whole} == whole
        assert not (base / "out/lost").exists() and set(os.listdir(base / "out/run")) == set(names)
        assert run("cat", remote.url, "lost", check=False).returncode == 1
        done = run("verify", remote.url, check=False)
        assert done.returncode == DAMAGE and "lost" in done.stderr, (done.stdout, done.stderr)
        for segment in (name for name in remote.names() if "/journal/" in name):
            os.truncate(remote.root / segment, 20)
        for command in (["verify", remote.url], ["export", remote.url, ".", base / "none"]):
            done = run(*command, check=False)
            assert done.returncode == DAMAGE and "node a" in done.stderr, (command, done.stderr)
    finally:
        node.close()
        remove_base(base)


def test_a_remote_that_is_away_delays_nobody_and_catches_up():
    base = make_base()
    remote = Directory(base)
    node = Node(make_base(), remote, 'newest = "exact"')
    try:
        node.mount()
        (node / "before").write_bytes(b"1" * 100_000)
        node.pushed()
        remote.go_away()
        slowest = 0
        for step, state in enumerate(walk(20)):
            begun = time.monotonic()
            with open(node / f"step_{step:04d}.pt", "wb") as f:
                torch.save(state, f)
                f.flush()
                os.fsync(f.fileno())
            slowest = max(slowest, time.monotonic() - begun)
        assert slowest < 10, f"a save took {slowest:.1f} s"
        wait_until(lambda: node.progress()["failing"], 20, "status says that the remote is away")
        assert "remote" in run("status", node.dir).stdout
        wait_until(lambda: node.progress()["files"] >= 19, 30, "status says how many files are left")
        done = run("sync", "--remote", node.dir, check=False, timeout=300)
        assert done.returncode == 1 and "not on the remote yet" in done.stderr, done.stderr
        remote.come_back()
        node.pushed()
        # The thread that shows names tries again after a pause of its own, which grows to a minute.
        wait_until(lambda: node.progress()["failing"] is None, 180, "status says that the remote is there again")
        other = Node(make_base(), remote).mount()
        try:
            other.sees("step_0019.pt")
            other.sees("step_0000.pt")
            assert read(other / "step_0019.pt") == read(node / "step_0019.pt")
            assert read(other / "step_0000.pt") == read(node / "step_0000.pt")
        finally:
            other.close()
    finally:
        node.close()
        remove_base(base)


def test_a_daemon_that_is_killed_while_it_pushes_repeats_nothing_whole(remote, nodes):
    node = nodes('bandwidth_mib = 8')
    for number in range(6):
        (node / f"file_{number}").write_bytes(np.random.default_rng(number).bytes(2_000_000))
    wait_until(lambda: sum("/objects/" in name for name in remote.names()) >= 2, 30, "two objects are there")
    node.kill()
    before = {name for name in remote.names() if "/objects/" in name}
    node.mount()
    node.pushed()
    after = {name for name in remote.names() if "/objects/" in name}
    # At most the object under way was sent in vain.
    assert len(after) <= 7, sorted(after)
    assert len(before & after) >= len(before) - 1


def test_what_cannot_work_is_refused_in_words(remote, nodes):
    base = make_base()
    try:
        # A store that a failed mount has made would go again.
        run("mount", base / "store", base / "mnt")
        run("umount", base / "mnt")
        for url, words in [("ftp://x/y", "s3://BUCKET/PREFIX"), ("s3://bucket", "s3://BUCKET/PREFIX"),
                           ("s3://key:secret@bucket/x", "AWS_"), (f"file://{base}/store/remote", "in one another")]:
            done = run("mount", base / "store", base / "mnt", "--remote", url, check=False)
            assert done.returncode == 1 and words in done.stderr, (url, done.stderr)
            # A URL that is refused is written nowhere: it may hold a secret, and would stay in the way of a right one.
            text = (base / "store/stepfs.toml").read_text()
            assert "\n[remote]" not in text and "secret" not in text + done.stderr, url
    finally:
        remove_base(base)
    # Two stores with one name for their node.
    first = nodes('node = "same"')
    (first / "x").write_text("first")
    first.pushed()
    second = nodes('node = "same"')
    wait_until(lambda: "another store" in (second.progress()["failing"] or ""), 20, "the second is told")
    (second / "y").write_text("second")
    done = run("sync", "--remote", second.dir, check=False, timeout=200)
    assert done.returncode == 1 and "another store" in done.stderr
    assert read(second / "y") == b"second"


def test_commands_read_a_remote_without_a_mount(remote, nodes):
    a, b = nodes('node = "a"\nnewest = "exact"'), nodes('node = "b"')
    os.mkdir(a / "run")
    names = save_walk(a / "run", 3)
    (b / "note").write_text("small")
    (b / "data.bin").write_bytes(np.random.default_rng(2).bytes(300_000))
    for node in (a, b):
        node.pushed()
    url = remote.url
    listed = {line["path"]: line for line in run_json("ls", url, "--json")}
    assert set(listed) == {"note", "data.bin", *(f"run/{name}" for name in names)}
    assert listed["data.bin"]["logical_bytes"] == 300_000 and listed["data.bin"]["node"] == "b"
    assert {node["node"]: node["names"] for node in run_json("status", url, "--json")} == {"a": 3, "b": 2}
    run("verify", url)
    place = a.base / "pulled"
    run("export", url, "run", place)
    for name in names:
        assert read(place / name) == read(a / "run" / name), name
    assert run("cat", url, "note").stdout == "small"
    # A node that is gone for good leaves objects that nothing needs.
    a.kill()
    b.sees(f"run/{names[-1]}")
    os.remove(b / f"run/{names[-1]}")
    b.pushed()
    before = sum("/objects/" in name for name in remote.names())
    done = run("gc", url, "--node", "none", check=False)
    assert done.returncode == 1 and "no node none" in done.stderr
    # Its journal is young, so its daemon may run.
    done = run("gc", url, "--node", "a", check=False)
    assert done.returncode == 1 and "may run" in done.stderr, done.stderr
    assert sum("/objects/" in name for name in remote.names()) == before
    run("gc", url, "--node", "a", "--grace", "0")
    after = sum("/objects/" in name for name in remote.names())
    assert after < before
    run("verify", url)
    # It was not gone after all.
    a.mount()
    (a / "later").write_bytes(b"later" * 50_000)
    a.pushed()
    b.sees("later")
    assert read(b / "later") == b"later" * 50_000
