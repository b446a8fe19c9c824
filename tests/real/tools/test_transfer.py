"""`import`, `export`, `cat` and `verify`: what a user meets who is interrupted, or names another place than a store."""

import os
import resource
import signal
import subprocess

import pytest
from harness import BIN, FAILURE, run, run_json, wait_until
from series import save_walk


def run_with_little_room(*args):
    """`stepfs ARGS...`, killed in the middle of the first file above 1 MiB."""
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = subprocess.run([BIN, *map(str, args)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, preexec_fn=limit)
    assert done.returncode == -signal.SIGXFSZ, (done.returncode, done.stderr)


def names_below(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.fixture
def pair(plain):
    """A small file and one that needs several writes."""
    (plain / "small").write_bytes(os.urandom(1000))
    (plain / "large").write_bytes(os.urandom(4 << 20))
    return plain / "small", plain / "large"


@pytest.mark.stepfs
def test_a_killed_import_goes_on(plain, pair):
    store = plain / "store"
    run_with_little_room("import", store, *pair)
    assert names_below(store / "tree") == ["small"], "no half file has a name"
    assert "1 copied, 1 already there" in run("import", store, *pair).stdout
    assert names_below(store / "tree") == ["large", "small"] and os.listdir(store / "tmp") == []
    for path in pair:
        assert run("cat", store, path.name, text=False).stdout == path.read_bytes()


@pytest.mark.stepfs
def test_an_import_knows_what_it_has_made_lossy(plain):
    (plain / "in").mkdir()
    names = save_walk(plain / "in", 4, seed=71)
    run("import", plain / "store", plain / "in")
    assert any(row["state"] == "released" and row["lossy"] != "0" for row in run_json("ls", "--json", plain / "store"))
    assert f"0 copied, {len(names)} already there" in run("import", plain / "store", plain / "in").stdout


@pytest.mark.stepfs
def test_an_import_leaves_other_files_of_its_names(plain, pair):
    small, large = pair
    store = plain / "store"
    run("import", store, large)
    written = large.read_bytes()
    large.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    done = run("import", store, small, large, check=False)
    assert done.returncode == FAILURE and "another large" in done.stderr and "--to" in done.stderr, done.stderr
    assert names_below(store / "tree") == ["large"], "nothing is copied before all names are looked at"
    assert run("cat", store, "large", text=False).stdout == written


@pytest.mark.stepfs
def test_the_next_export_removes_what_a_killed_one_left(plain, pair):
    store, out = plain / "store", plain / "out"
    run("import", store, *pair)
    run_with_little_room("export", store, ".", out)
    assert "large.stepfs-export" in os.listdir(out) and "large" not in os.listdir(out)
    (out / "large").write_bytes(b"mine")
    assert run("export", store, ".", out, check=False).returncode == FAILURE
    assert names_below(out) == ["large"] and (out / "large").read_bytes() == b"mine"
    (out / "large.stepfs-export").mkdir()
    done = run("export", store, ".", out, "--force", check=False)
    assert done.returncode == FAILURE and "large.stepfs-export is in the way" in done.stderr
    (out / "large.stepfs-export").rmdir()
    run("export", store, ".", out, "--force")
    assert names_below(out) == ["large", "small"]


@pytest.mark.stepfs
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing(plain, pair, how):
    store, out = plain / "store", plain / "out"
    run("import", store, *pair)
    # Sparse: it takes a while to copy, and no room before.
    with open(store / "tree/huge", "wb") as file:
        file.truncate(1 << 30)
    child = subprocess.Popen([BIN, "export", store, "huge", out], stderr=subprocess.PIPE, text=True)
    wait_until((plain / "out.stepfs-export").exists, 20, "the export begins")
    child.send_signal(how)
    assert "interrupted" in child.communicate(timeout=60)[1] and child.returncode == 128 + how
    assert not out.exists() and not (plain / "out.stepfs-export").exists()


@pytest.mark.stepfs
def test_an_export_goes_on_where_it_was_interrupted(plain, pair):
    store, out = plain / "store", plain / "out"
    run("import", store, *pair)
    run("export", store, ".", out)
    os.unlink(out / "large")
    inode = os.stat(out / "small").st_ino
    assert "2 files written" in (done := run("export", store, ".", out).stdout) and "1 of them before" in done
    assert names_below(out) == ["large", "small"] and os.stat(out / "small").st_ino == inode
    # Another file of that name is nobody's to replace.
    (out / "small").write_text("mine")
    done = run("export", store, ".", out, check=False)
    assert done.returncode == 1 and "small exists already" in done.stderr and (out / "small").read_text() == "mine"


@pytest.mark.stepfs
def test_a_mount_stands_for_its_store(mount, plain):
    os.mkdir(mount / "run")
    names = save_walk(mount / "run", 3, seed=72)
    mount.sync()
    bytes_of = {name: (mount / "run" / name).read_bytes() for name in names}
    for place, path in [(mount.dir, f"run/{names[0]}"), (mount.dir / "run", names[0]), (mount.dir, mount / "run" / names[0])]:
        assert run("cat", place, path, text=False).stdout == bytes_of[names[0]]
        run("export", place, path, plain / "one", "--force")
        assert (plain / "one").read_bytes() == bytes_of[names[0]]
    run("export", mount.dir / "run", ".", plain / "all")
    assert {path.name: path.read_bytes() for path in (plain / "all").iterdir()} == bytes_of
    assert run_json("verify", mount.dir, "--json")["files"] == 3
    done = run("verify", mount.dir / "run", check=False)
    assert done.returncode == FAILURE and f"stepfs verify {mount.store}" in done.stderr, done.stderr
    done = run("import", mount.dir / "run", plain / "one", check=False)
    assert done.returncode == FAILURE and "cp -a" in done.stderr and not (mount / "run/stepfs.toml").exists(), done.stderr


@pytest.mark.stepfs
def test_paths_outside_of_a_store_are_explained(plain, pair):
    store = plain / "store"
    run("import", store, *pair)
    for path in ["/small", "../small"]:
        for command in (["export", store, path, plain / "out"], ["cat", store, path]):
            done = run(*command, check=False)
            assert done.returncode == FAILURE and f"{path} is not inside" in done.stderr and f"stepfs ls {store}" in done.stderr, done.stderr
    assert run("cat", store, "./small", text=False).stdout == pair[0].read_bytes()


@pytest.mark.stepfs
def test_pin_says_what_is_lossy_already(mount):
    os.mkdir(mount / "run")
    names = save_walk(mount / "run", 4, seed=73)
    mount.sync()
    mount.require_released(*(f"run/{name}" for name in names[:-1]))
    done = run("pin", mount / "run" / names[0])
    assert "is lossy already" in done.stderr and "retention" in done.stderr
    assert run("pin", mount / "run" / names[-1]).stderr == ""
    assert f"3 of 4 files in {mount / 'run'}" in run("pin", mount / "run").stderr


@pytest.mark.stepfs
def test_a_mount_that_fails_leaves_nothing(plain):
    done = run("mount", plain / "store", plain / "a/b", "--mirror", "nonsense://x", check=False)
    assert done.returncode == FAILURE and os.listdir(plain) == [], (done.stderr, names_below(plain))
    # Below its own mount point: only the daemon finds that out.
    done = run("mount", plain / "a" / "store", plain / "a", check=False)
    assert done.returncode == FAILURE and os.listdir(plain) == [], (done.stderr, names_below(plain))


@pytest.mark.stepfs
def test_a_mount_that_fails_leaves_what_was_there(plain, pair):
    (plain / "a").mkdir()
    run("import", plain / "used", pair[0])
    (plain / "empty").mkdir()
    for store in ("used", "empty"):
        done = run("mount", plain / store, plain / "a/b", "--mirror", "nonsense://x", check=False)
        assert done.returncode == FAILURE and os.listdir(plain / "a") == []
    assert (plain / "used/tree/small").read_bytes() == pair[0].read_bytes() and (plain / "empty").is_dir()


@pytest.mark.stepfs
def test_json_tells_names_apart_that_are_not_text(plain):
    (plain / "in").mkdir()
    odd = [b"a\xff.pt", b"a\xfe.pt"]
    for name in odd:
        with open(os.fsencode(plain / "in") + b"/" + name, "wb") as file:
            file.write(name)
    run("import", plain / "store", plain / "in")
    rows = run_json("ls", plain / "store", "--json")
    assert {bytes.fromhex(row["path_bytes"]) for row in rows} == {b"in/" + name for name in odd}
    manifest = subprocess.run(["sha256sum", *odd], cwd=plain / "in", capture_output=True, check=True).stdout
    (plain / "manifest").write_bytes(manifest)
    mount_of_all = run_json("verify", plain / "store", "--against", plain / "manifest", "--json", check=False)
    assert {bytes.fromhex(row["name_bytes"]) for row in mount_of_all["files"]} == set(odd)
    (plain / "plain.bin").write_bytes(b"x")
    run("import", plain / "store", plain / "plain.bin")
    assert ["path_bytes" in row for row in run_json("ls", plain / "store", "--json")].count(False) == 1
