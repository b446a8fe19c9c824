"""Everyday tools on resident and released files. Bytes change once, at release, and never again."""

import errno
import io
import mmap as mapping
import os
import shutil
import tarfile
import time

import pytest
import torch
from harness import du, shell, wait_until
from series import bits_equal, difference, flatten, save_walk, tensors_of, walk


class Released:
    """Four checkpoints, three of them released, and the bytes that every reader must see from now on."""

    def __init__(self, mount):
        self.mount, self.dir = mount, mount.dir
        os.mkdir(mount / "run")
        self.names = ["run/" + name for name in save_walk(mount / "run", 4, seed=21)]
        self.newest = self.names[-1]
        mount.sync()
        mount.require_released(*self.names[:-1])
        self.bytes = {name: (mount / name).read_bytes() for name in self.names}

    def check(self, *names):
        for name in names or self.names:
            assert (self.dir / name).read_bytes() == self.bytes[name], name

    def check_copy(self, copy, name):
        """A copy inside the mount is a file of its own: exact, or within its stated bound."""
        data, expected = (self.dir / copy).read_bytes(), self.bytes[name]
        if data != expected:
            limit = self.mount.entry(copy)["max_abs_error"]
            was, reads = (torch.load(io.BytesIO(b)) for b in (expected, data))
            assert flatten(was).keys() == flatten(reads).keys() and len(data) == len(expected)
            was, reads = tensors_of(was), tensors_of(reads)
            assert all(bits_equal(was[k], reads[k]) or difference(was[k], reads[k]) <= limit for k in was), f"{copy}: not within {limit}"


@pytest.fixture
def released(mount):
    return Released(mount)


@pytest.fixture
def released_both(both):
    return Released(both)


def test_reading_twice_gives_the_same(released_both):
    released_both.check()
    released_both.check()


def test_cp(released_both, plain):
    shell(f"cp {released_both.dir}/run/*.pt {plain}/")
    for name in released_both.names:
        assert (plain / os.path.basename(name)).read_bytes() == released_both.bytes[name]


def test_cp_inside_the_mount(released_both):
    r = released_both
    shell("cp -r run copy && cp --sparse=always run/step_0001.pt sparse.pt && cp --reflink=auto run/step_0002.pt ref.pt", cwd=r.dir)
    r.mount.sync()
    for name in r.names:
        r.check_copy(name.replace("run/", "copy/"), name)
    r.check_copy("sparse.pt", r.names[0])
    r.check_copy("ref.pt", r.names[1])
    r.check()


def test_cp_archive_keeps_metadata(released, plain):
    shell(f"cp -a {released.dir}/run {plain}/run")
    for name in released.names:
        there, here = os.stat(plain / name), os.stat(released.dir / name)
        assert (there.st_mode, there.st_mtime_ns, there.st_size, there.st_uid) == (here.st_mode, here.st_mtime_ns, here.st_size, here.st_uid)
    assert os.stat(plain / "run").st_mtime_ns == os.stat(released.dir / "run").st_mtime_ns


def test_mv_inside(released_both):
    r = released_both
    before = os.stat(r.dir / r.names[0])
    shell("mv run/step_0001.pt moved.pt && mkdir sub && mv run/step_0002.pt sub/ && mv -n moved.pt sub/other.pt", cwd=r.dir)
    after = os.stat(r.dir / "sub/other.pt")
    assert (before.st_mtime_ns, before.st_mode, before.st_ino) == (after.st_mtime_ns, after.st_mode, after.st_ino)
    r.mount.sync()
    assert (r.dir / "sub/other.pt").read_bytes() == r.bytes[r.names[0]]
    assert (r.dir / "sub/step_0002.pt").read_bytes() == r.bytes[r.names[1]]
    r.check(*r.names[2:])


def test_mv_out_and_in(released, plain):
    shell(f"mv {released.dir}/run/step_0001.pt {plain}/ && mv {plain}/step_0001.pt {released.dir}/run/")
    released.mount.sync()
    released.check_copy(released.names[0], released.names[0])
    released.check(*released.names[1:])


def test_rename_over_a_released_file(released):
    (released.dir / "new").write_bytes(b"short")
    os.replace(released.dir / "new", released.dir / released.names[1])
    assert (released.dir / released.names[1]).read_bytes() == b"short"
    os.replace(released.dir / released.names[0], released.dir / released.names[1])
    assert (released.dir / released.names[1]).read_bytes() == released.bytes[released.names[0]]
    released.mount.sync()
    released.check(*released.names[2:])


def test_rename_of_a_directory(released_both):
    r = released_both
    os.rename(r.dir / "run", r.dir / "elsewhere")
    r.mount.sync()
    for name in r.names:
        assert (r.dir / name.replace("run/", "elsewhere/")).read_bytes() == r.bytes[name]
    os.rename(r.dir / "elsewhere", r.dir / "run")
    r.check()


def test_rsync(released_both, plain):
    r = released_both
    shell(f"rsync -a {r.dir}/run {plain}/")
    assert not shell(f"rsync -ai --checksum {r.dir}/run {plain}/").stdout
    # And back in, over the released files: same size and time, so that rsync leaves them; with -c it compares bytes.
    assert not shell(f"rsync -ai {plain}/run {r.dir}/").stdout
    assert not shell(f"rsync -aic {plain}/run {r.dir}/").stdout
    shell(f"rsync -a {plain}/run/ {r.dir}/in/")
    for name in r.names:
        r.check_copy(name.replace("run/", "in/"), name)


def test_rsync_inplace_over_released_files(released, plain):
    r = released
    content = os.urandom(1 << 20) + r.bytes[r.names[0]][1 << 20 :]
    (plain / "step_0001.pt").write_bytes(content)
    shell(f"rsync --inplace --ignore-times --no-whole-file {plain}/step_0001.pt {r.dir}/run/")
    r.mount.sync()
    assert (r.dir / r.names[0]).read_bytes() == content
    r.check(*r.names[1:])


def test_tar(released_both, plain):
    r = released_both
    shell(f"tar cf {plain}/run.tar -C {r.dir} run && mkdir {r.dir}/x && tar xf {plain}/run.tar -C {r.dir}/x")
    with tarfile.open(plain / "run.tar") as tar:
        for name in r.names:
            assert tar.extractfile(name).read() == r.bytes[name]
            assert tar.getmember(name).size == len(r.bytes[name])
    r.mount.sync()
    for name in r.names:
        r.check_copy("x/" + name, name)
        assert int(os.stat(r.dir / "x" / name).st_mtime) == int(os.stat(r.dir / name).st_mtime)


def test_tar_sparse_does_not_take_a_released_file_for_empty(released, plain):
    """A file with few blocks and no holes: tools that skip holes must still see its bytes."""
    shell(f"tar cSf {plain}/run.tar -C {released.dir} run && tar xf {plain}/run.tar -C {plain}")
    for name in released.names:
        assert (plain / name).read_bytes() == released.bytes[name]


def test_seek_data_and_hole(released):
    for name in released.names:
        size = len(released.bytes[name])
        with open(released.dir / name, "rb") as f:
            assert os.lseek(f.fileno(), 0, os.SEEK_DATA) == 0
            assert os.lseek(f.fileno(), 0, os.SEEK_HOLE) == size
            with pytest.raises(OSError) as error:
                os.lseek(f.fileno(), size, os.SEEK_DATA)
            assert error.value.errno == errno.ENXIO


def test_copytree_and_sendfile(released_both, plain):
    r = released_both
    shutil.copytree(r.dir / "run", plain / "tree")
    shutil.copytree(plain / "tree", r.dir / "back")
    for name in r.names:
        r.check_copy(name.replace("run/", "back/"), name)


def test_dd(released_both, plain):
    r, name = released_both, released_both.names[1]
    shell(f"dd if={r.dir}/{name} of={plain}/part bs=4096 skip=100 count=50 status=none")
    assert (plain / "part").read_bytes() == r.bytes[name][409_600:614_400]
    shell(f"dd if={r.dir}/{name} of={plain}/odd bs=777 skip=3 count=501 status=none")
    assert (plain / "odd").read_bytes() == r.bytes[name][2331 : 2331 + 501 * 777]
    shell(f"dd if={r.dir}/{name} of={r.dir}/fsynced bs=1M conv=fsync status=none")
    assert (r.dir / "fsynced").read_bytes() == r.bytes[name]


@pytest.mark.stepfs
def test_du_shows_the_cost_and_ls_the_size(released):
    r = released
    for name in r.names[1:-1]:
        path = r.dir / name
        size = len(r.bytes[name])
        assert int(shell(f"du --apparent-size --block-size=1 {path}").stdout.split()[0]) == size
        assert int(shell(f"ls -l {path}").stdout.split()[4]) == size
        stored = r.mount.entry(name)["stored_bytes"]
        assert 0 < stored < size
        assert abs(du(path) - stored) <= 8192, f"du {du(path)}, ls says {stored}"


@pytest.mark.stepfs
def test_the_store_itself_shrinks(released):
    size = sum(map(len, released.bytes.values()))
    # The fixture has read the files; their decoded bytes are a cache.
    store = released.mount.store
    assert du(store) - du(store / "cache") < 0.95 * size
    # The fixture has read the files, and the daemon notes that as restores.
    wait_until(lambda: released.mount.status()["queued"] == 0, 10, "nothing is waiting")
    status = released.mount.status()
    assert status["files"] == 4 and status["logical_bytes"] == size
    assert status["stored_bytes"] < 0.95 * size


def test_chmod_chown_utime_after_release(released_both):
    r, path = released_both, released_both.dir / released_both.names[0]
    os.chmod(path, 0o640)
    os.utime(path, ns=(1_600_000_000_123_456_789, 1_500_000_000_987_654_321))
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    for _ in range(2):
        stat = os.stat(path)
        assert stat.st_mode & 0o7777 == 0o640
        assert stat.st_mtime_ns == 1_500_000_000_987_654_321
        assert os.geteuid() != 0 or (stat.st_uid, stat.st_gid) == (1234, 4321)
        assert stat.st_size == len(r.bytes[r.names[0]])
        r.check()
        r.mount.sync()
    if r.mount.pid:
        assert r.mount.state(r.names[0]) == "released"


def test_mmap_of_a_released_file(released_both):
    for name in released_both.names:
        with open(released_both.dir / name, "rb") as f:
            private = mapping.mmap(f.fileno(), 0, flags=mapping.MAP_PRIVATE, prot=mapping.PROT_READ)
            shared = mapping.mmap(f.fileno(), 0, flags=mapping.MAP_SHARED, prot=mapping.PROT_READ)
        assert private[-5000:] == shared[-5000:] == released_both.bytes[name][-5000:]
        assert private[:] == shared[:] == released_both.bytes[name]
        private.close()
        shared.close()


def test_mapped_and_open_files_do_not_change_under_the_reader(mount):
    """Mapped while newest: the mapping keeps the exact bytes while newer ones arrive; so does an open handle."""
    states = list(walk(4, seed=31))
    torch.save(states[0], mount / "a_1.pt")
    # Before there is a newer one: on a busy machine it would be released before the open.
    held = open(mount / "a_1.pt", "rb")
    torch.save(states[1], mount / "a_2.pt")
    before = {n: (mount / f"a_{n}.pt").read_bytes() for n in (1, 2)}
    with open(mount / "a_2.pt", "rb") as f:
        mapped = mapping.mmap(f.fileno(), 0, prot=mapping.PROT_READ)
    for n, state in enumerate(states[2:], 3):
        torch.save(state, mount / f"a_{n}.pt")
    mount.sync()
    assert mapped[:] == before[2] and held.read() == before[1]
    if mount.pid:
        assert "a_2.pt" not in mount.released() and "a_1.pt" not in mount.released()
    mapped.close()
    held.close()
    mount.sync()
    mount.require_released("a_1.pt", "a_2.pt")


def test_writing_into_a_released_file_recalls_it(released_both):
    r, name = released_both, released_both.names[1]
    with open(r.dir / name, "r+b") as f:
        f.seek(70_000)
        f.write(b"changed")
    expected = r.bytes[name][:70_000] + b"changed" + r.bytes[name][70_007:]
    assert (r.dir / name).read_bytes() == expected
    r.bytes[name] = expected
    r.mount.sync()
    # This file is now the one written last, so the former newest may have been released.
    r.check(*r.names[:-1])
    r.check_copy(r.newest, r.newest)


def test_opening_for_writing_without_writing_changes_nothing(released):
    name = released.names[0]
    before = os.stat(released.dir / name).st_mtime_ns
    with open(released.dir / name, "r+b"):
        pass
    released.mount.sync()
    released.check()
    assert os.stat(released.dir / name).st_mtime_ns == before


def test_append(released_both):
    r, name = released_both, released_both.names[0]
    with open(r.dir / name, "ab") as f:
        f.write(b"tail")
    r.bytes[name] += b"tail"
    r.check()
    r.mount.sync()
    r.check()


def test_truncate(released_both):
    r = released_both
    os.truncate(r.dir / r.names[0], 100_000)
    os.truncate(r.dir / r.names[1], len(r.bytes[r.names[1]]) + 5000)
    with open(r.dir / r.names[2], "wb"):
        pass
    r.bytes[r.names[0]] = r.bytes[r.names[0]][:100_000]
    r.bytes[r.names[1]] += bytes(5000)
    r.bytes[r.names[2]] = b""
    r.check()
    r.mount.sync()
    r.check()


def test_save_over_a_released_name(released):
    state = next(walk(1, seed=99))
    torch.save(state, released.dir / released.names[0])
    released.bytes[released.names[0]] = (released.dir / released.names[0]).read_bytes()
    assert torch.equal(torch.load(released.dir / released.names[0])["model"]["wte.weight"], state["model"]["wte.weight"])
    released.mount.sync()
    released.check(*released.names[:-1])
    released.check_copy(released.newest, released.newest)


def test_unlink_while_open(released_both):
    r = released_both
    for name in (r.names[0], r.newest):
        with open(r.dir / name, "rb") as f:
            first = f.read(1000)
            os.unlink(r.dir / name)
            assert not os.path.exists(r.dir / name)
            assert first + f.read() == r.bytes[name]
    with open(r.dir / "fresh", "w+b") as f:
        f.write(b"x" * 100_000)
        os.unlink(r.dir / "fresh")
        f.seek(0)
        assert f.read() == b"x" * 100_000
    r.mount.sync()
    r.check(*r.names[1:-1])
    assert sorted(os.listdir(r.dir / "run")) == ["step_0002.pt", "step_0003.pt"]


@pytest.mark.parametrize("index", range(4))
def test_any_name_can_go(released, index):
    """Deleting any file, a base of others or not, harms no other, also after a remount."""
    gone = released.names.pop(index)
    os.unlink(released.dir / gone)
    released.mount.sync()
    released.check()
    if released.mount.pid:
        released.mount.remount()
        released.check()


def test_deleting_all_frees_all(released):
    shutil.rmtree(released.dir / "run")
    released.mount.sync()
    assert os.listdir(released.dir) == []
    if released.mount.pid:
        assert released.mount.status()["stored_bytes"] <= 65_536
        assert du(released.mount.store) < 400_000


def test_hard_links(released_both):
    r = released_both
    os.link(r.dir / r.names[0], r.dir / "second")
    os.link(r.dir / r.newest, r.dir / "best-link")
    assert os.stat(r.dir / "second").st_nlink == 2 and os.stat(r.dir / r.names[0]).st_nlink == 2
    assert os.stat(r.dir / "second").st_ino == os.stat(r.dir / r.names[0]).st_ino
    os.unlink(r.dir / r.names[0])
    r.mount.sync()
    assert (r.dir / "second").read_bytes() == r.bytes[r.names[0]]
    assert (r.dir / "best-link").read_bytes() == r.bytes[r.newest]
    assert os.stat(r.dir / "second").st_nlink == 1


def test_symbolic_links(released_both):
    r = released_both
    os.symlink("run/step_0001.pt", r.dir / "latest")
    os.symlink(str(r.dir / "run"), r.dir / "link")
    assert os.readlink(r.dir / "latest") == "run/step_0001.pt"
    assert (r.dir / "latest").read_bytes() == r.bytes[r.names[0]]
    assert sorted(os.listdir(r.dir / "link")) == sorted(os.path.basename(n) for n in r.names)
    os.unlink(r.dir / "latest")
    r.check()


def test_extended_attributes_stay(released):
    path = released.dir / released.names[0]
    try:
        os.setxattr(path, "user.note", b"kept")
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            pytest.skip("the disk below has no user xattrs")
        raise
    released.mount.sync()
    assert os.getxattr(path, "user.note") == b"kept"
    if released.mount.pid:
        released.mount.remount()
    assert os.getxattr(path, "user.note") == b"kept" and "user.note" in os.listxattr(path)
    os.removexattr(path, "user.note")
    assert "user.note" not in os.listxattr(path)
    released.check()


def test_unusual_names(mount, plain):
    names = ["with space.pt", "tab\there.pt", "Prüfung-検査.pt", "-dash.pt", "n" * 250 + ".pt", "new\nline.pt"]
    save_walk(plain, 1)
    content = (plain / "step_0001.pt").read_bytes()
    for name in names:
        (mount / name).write_bytes(content)
    mount.sync()
    assert sorted(os.listdir(mount.dir)) == sorted(names)
    for name in names:
        assert (mount / name).read_bytes() == content
    if mount.pid:
        assert sorted(row["path"].lstrip("/") for row in mount.ls()) == sorted(names)


def test_writes_through_every_name_of_a_released_file_arrive(released_both):
    """A reader that is served from the decoded file keeps the old inode; the other name must not write to it unseen."""
    r = released_both
    f, g = r.dir / r.names[1], r.dir / "run/link"
    os.link(f, g)
    f.read_bytes()
    with open(f, "rb") as reader:
        reader.read(4)
        os.stat(f), os.stat(g)
        with open(g, "ab") as writer:
            writer.write(b"FIRST")
    with open(f, "r+b") as writer:
        writer.seek(0, os.SEEK_END)
        writer.write(b"SECOND")
        writer.flush()
        os.fsync(writer.fileno())
    expected = r.bytes[r.names[1]] + b"FIRSTSECOND"
    assert f.read_bytes() == expected and g.read_bytes() == expected
    time.sleep(1.5)
    assert f.read_bytes() == expected and g.read_bytes() == expected

