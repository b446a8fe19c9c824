"""ElasticDL's version directories on a mount: several servers, variables and rows in another order at every save; and `stepfs
reshard`.
"""

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path

import elasticdl_files as elasticdl
import numpy as np
import pytest
from harness import BIN, FAILURE, USAGE, require_clean, run, shell

VERSIONS = [10, 20, 30, 40, 50, 60]


def save_series(folders, shuffled=True, servers=2, ending="ckpt", name="version-{}", **options):
    """Writes the same files into each folder; returns their paths, those of the newest version last."""
    rng = np.random.default_rng(7) if shuffled else None
    for version, state in zip(VERSIONS, elasticdl.train(len(VERSIONS), **options)):
        first = folders[0] / name.format(version)
        elasticdl.save(first, version, state, servers, rng, ending)
        for other in folders[1:]:
            shutil.copytree(first, other / name.format(version))
    return [f"{name.format(version)}/variables-{server}-of-{servers}.{ending}" for version in VERSIONS for server in range(servers)]


def stored(mount, names):
    rows = {row["path"].removeprefix(str(mount.dir)).strip("/"): row for row in mount.ls()}
    return sum(rows[name]["stored_bytes"] for name in names) / sum(rows[name]["logical_bytes"] for name in names)


def settled(mount, names, servers=2):
    mount.sync()
    mount.require_released(*names[:-servers])
    return names[:-servers]


def test_the_example_of_the_format():
    """The beginning of a file of the client 0.2.0rc3."""
    start = bytes.fromhex("08281212 0a03") + b"emb" + bytes.fromhex("1003 1a07") + b"uniform" + bytes.fromhex("2001 1a9e01 0a0a")
    start += b"out/kernel" + bytes.fromhex("128f01 0801 1208 12020808 12020804 228001")
    kernel = np.ones((8, 4), dtype=np.float32)
    assert elasticdl.model(40, {"emb": 3}, {"out/kernel": kernel}, {}) == start + kernel.tobytes()
    places = {name: [elasticdl.server_of(name, n) for n in (2, 3, 7)] for name in ("dense/kernel", "dense/bias", "out/kernel", "out/bias")}
    assert places == {"dense/kernel": [0, 1, 5], "dense/bias": [1, 0, 2], "out/kernel": [0, 0, 4], "out/bias": [1, 1, 1]}


@pytest.mark.stepfs
@pytest.mark.parametrize("style", [("version-{}", "ckpt"), ("version_{}", "chkpt")], ids=["code", "document"])
def test_series_in_any_order(both, plain, style):
    names = save_series([plain, both.dir], name=style[0], ending=style[1])
    for name in settled(both, names):
        assert elasticdl.check_file(both, plain, name) >= 2, f"{name}: too little of it is quantized"
        about = {tensor["path"]: tensor["role"] for tensor in both.tensors(name)}
        assert about["embedding_tables/emb"] == "weight"
    for name in names[-2:]:
        shell(f"cmp {both / name} {plain / name}")
    both.umount()
    require_clean(both.store)
    # Without a mount, too: decoded again, with bytes in the file's order.
    both.mount()
    for name in names[:2]:
        assert run("cat", both.store, name, text=False).stdout == (both / name).read_bytes()
        run("export", both.store, name, both.base / "exported", "--force")
        shell(f"cmp {both.base / 'exported'} {both / name}")


@pytest.mark.stepfs
def test_order_costs_little(mount, plain):
    """Rows in a changing order take little more than rows in a fixed order: their ids, which are exact."""
    for kind in ("shuffled", "fixed"):
        os.makedirs(plain / kind)
        os.makedirs(mount / kind)
    names = {kind: [f"{kind}/{name}" for name in save_series([plain / kind, mount / kind], kind == "shuffled", dim=32)]
             for kind in ("shuffled", "fixed")}
    mount.sync()
    # The first of each is a keyframe.
    share = {kind: stored(mount, names[kind][2:-2]) for kind in names}
    ids = 6000 * 2.5 / os.path.getsize(plain / names["fixed"][0]) / 2
    print(share, ids)
    assert share["shuffled"] < share["fixed"] + 1.2 * ids
    assert share["shuffled"] < 0.15


@pytest.mark.stepfs
def test_exact_is_bit_exact(mount, plain):
    run("profile", mount.dir, "--set", "exact")
    names = save_series([plain, mount.dir])
    older = settled(mount, names)
    for name in names:
        shell(f"cmp {mount / name} {plain / name}")
    assert stored(mount, older[2:]) < 0.6, "most rows did not move"


@pytest.mark.stepfs
def test_tables_grow(mount, plain):
    """New rows come with every state. The files are of one lineage all the same, and within their bounds."""
    names = save_series([plain, mount.dir], growth=150)
    quantized = sum(elasticdl.check_file(mount, plain, name) for name in settled(mount, names))
    assert quantized >= 2 * (len(names) - 2), "tables that grow are quantized"
    print(stored(mount, names[2:-2]))


@pytest.mark.stepfs
def test_any_piece_of_a_released_file(both, plain):
    names = save_series([plain, both.dir])
    name = settled(both, names)[-1]
    whole = run("cat", both.store, name, text=False).stdout
    both.remount()
    rng = random.Random(3)
    with open(both / name, "rb", buffering=0) as file:
        for _ in range(60):
            at, length = rng.randrange(len(whole)), rng.choice([1, 7, 64, 5000, 70_000])
            assert os.pread(file.fileno(), length, at) == whole[at:at + length]
    # After a recall it is the same file.
    run("recall", both / name)
    assert (both / name).read_bytes() == whole
    both.sync()
    assert (both / name).read_bytes() == whole


@pytest.mark.stepfs
def test_a_copy_is_stored_once(mount, plain):
    """A copy of a released file is recognised, whatever order its rows have."""
    name = settled(mount, save_series([plain, mount.dir]))[3]
    os.makedirs(mount / "copies")
    shutil.copyfile(mount / name, mount / "copies/best.ckpt")
    mount.sync()
    mount.require_released("copies/best.ckpt")
    attribute = lambda path: os.getxattr(path, "user.stepfs.object")
    assert attribute(mount / "copies/best.ckpt") == attribute(mount / name)
    shell(f"cmp {mount / 'copies/best.ckpt'} {mount / name}")


@pytest.mark.stepfs
def test_without_room_in_the_cache(mount, plain):
    """Each read decodes only the tiles that it needs, and gives the same bytes."""
    names = save_series([plain, mount.dir])
    name = settled(mount, names)[3]
    whole = run("cat", mount.store, name, text=False).stdout
    mount.umount()
    settings = mount.store / "stepfs.toml"
    settings.write_text(re.sub(r"cache_mib = \d+", "cache_mib = 0", settings.read_text()))
    mount.mount()
    assert (mount / name).read_bytes() == whole
    with open(mount / name, "rb", buffering=0) as file:
        for at in (0, 1, 70_001, len(whole) // 2, len(whole) - 3):
            assert os.pread(file.fileno(), 40_000, at) == whole[at:at + 40_000]


@pytest.mark.stepfs
def test_what_stays_keeps_its_bytes(mount, plain):
    """Versions go, and the remaining ones get new bases: their rows stay in place."""
    names = save_series([plain, mount.dir])
    older = settled(mount, names)
    before = {name: (mount / name).read_bytes() for name in older}
    for version in (10, 20, 40):
        shutil.rmtree(mount / f"version-{version}")
    mount.sync()
    mount.remount()
    left = [name for name in older if (mount / name).exists()]
    assert len(left) == 4
    for name in left:
        assert (mount / name).read_bytes() == before[name]
        assert elasticdl.check_file(mount, plain, name) >= 2
    mount.umount()
    require_clean(mount.store)


@pytest.mark.stepfs
@pytest.mark.parametrize("damage", ["cut", "longer", "name", "id", "noise"])
def test_what_is_no_model_is_kept_as_it_is(mount, plain, damage):
    """A file that is cut short, or only looks like a version, is plain bytes."""
    names = save_series([plain])
    rng = np.random.default_rng(1)
    for name in names:
        content = bytearray((plain / name).read_bytes())
        if damage == "cut":
            del content[-len(content) // 3:]
        elif damage == "longer":
            content += b"\0\0\0\0"
        elif damage == "name":
            content[6] = 0xFF
        elif damage == "id":
            content[-1] |= 0x80
        else:
            at = rng.integers(0, len(content), 2000)
            for place in at:
                content[place] = rng.integers(0, 256)
        (plain / name).write_bytes(content)
        os.makedirs((mount / name).parent, exist_ok=True)
        (mount / name).write_bytes(content)
    mount.sync()
    for name in names:
        if damage != "noise" or mount.tensors(name) == []:
            shell(f"cmp {mount / name} {plain / name}")


# --- reshard

@pytest.mark.stepfs
@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_reshard_is_what_a_restore_takes(plain, servers):
    """Each file holds exactly the values that ElasticDL's restore to so many servers takes from all files."""
    save_series([plain])
    source, target = plain / "version-40", plain / "new" / "version-40"
    os.makedirs(target.parent)
    said = run("reshard", source, servers, target).stdout
    assert "version 40" in said and "6000 rows" in said
    assert sorted(os.listdir(target)) == sorted(f"variables-{i}-of-{servers}.ckpt" for i in range(servers))
    assert os.listdir(target.parent) == ["version-40"]
    for server in range(servers):
        version, infos, dense, tables = elasticdl.parse((target / f"variables-{server}-of-{servers}.ckpt").read_bytes())
        rows = {(name, i): row for name, (ids, values) in tables.items() for i, row in zip(ids, values)}
        assert infos == {"emb": 16}
        assert elasticdl.same((version, dense, rows), elasticdl.restore(source, server, servers))
        assert elasticdl.same(elasticdl.restore(target, server, servers), elasticdl.restore(source, server, servers))
    # And to any other number after that.
    back = plain / "back"
    run("reshard", target, 2, back)
    assert elasticdl.same(elasticdl.everything(back), elasticdl.everything(source))
    assert elasticdl.is_valid(back)


@pytest.mark.stepfs
def test_reshard_from_a_store(mount, plain):
    """From the store and through the mount, released versions and the newest: the result equals the values read."""
    names = save_series([mount.dir, plain])
    settled(mount, names)
    for at, version in enumerate((10, 50, 60)):
        expected = elasticdl.everything(mount / f"version-{version}")
        run("reshard", f"{mount.store}:version-{version}", 3, plain / f"a{at}")
        run("reshard", f"{mount.dir}:version_{version}", 3, plain / f"b{at}")
        run("reshard", mount / f"version-{version}", 3, mount / f"c{at}")
        for result in (plain / f"a{at}", plain / f"b{at}", mount / f"c{at}"):
            assert elasticdl.same(elasticdl.everything(result), expected)
    mount.umount()
    run("reshard", f"{mount.store}:version-50", 5, plain / "d")
    assert elasticdl.same(elasticdl.everything(plain / "a1"), elasticdl.everything(plain / "d"))
    assert elasticdl.same(elasticdl.everything(plain / "a2"), elasticdl.everything(plain / "version-60"))


@pytest.mark.stepfs
def test_reshard_refuses(plain):
    """All or nothing: any error is reported, and leaves no files behind."""
    save_series([plain], rows=200)
    version = plain / "version-40"

    def refused(what, *words, servers=3, target=plain / "target", code=FAILURE):
        before = sorted(os.listdir(plain)), sorted(os.listdir(target)) if target.is_dir() else None
        done = run("reshard", what, servers, target, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        for word in words:
            assert word in done.stderr, done.stderr
        assert (sorted(os.listdir(plain)), sorted(os.listdir(target)) if target.is_dir() else None) == before

    def changed(change):
        folder = plain / f"version-{next(counter)}"
        shutil.copytree(version, folder)
        change(folder)
        return folder

    counter = itertools.count(1000)
    refused(version, servers=0, code=USAGE)
    refused(version, servers=-1, code=USAGE)
    refused(plain / "version-41", "no such file or directory")
    refused(f"{plain}:version-41", "version-41")
    refused(f"{plain}:../x", "..")
    refused(version, "not empty", target=plain / "version-50")
    refused(version, "No such", target=plain / "a" / "b")
    refused(changed(lambda f: (f / "variables-1-of-2.ckpt").unlink()), "1 of 2", "variables-1-of-2.ckpt is missing")
    refused(changed(lambda f: (f / "notes.txt").write_text("x")), "notes.txt")
    refused(changed(lambda f: [p.unlink() for p in f.iterdir()]), "empty")
    refused(changed(lambda f: (f / "variables-0-of-3.ckpt").write_bytes(b"")), "belong to different checkpoints")
    refused(changed(lambda f: shutil.copy(plain / "version-50/variables-1-of-2.ckpt", f)), "version 40", "version 50")
    refused(changed(lambda f: shutil.copy(f / "variables-0-of-2.ckpt", f / "variables-1-of-2.ckpt")), "both in")
    refused(changed(lambda f: (f / "variables-1-of-2.ckpt").write_bytes(b"\x80\x02hello")), "no model")
    refused(changed(lambda f: os.truncate(f / "variables-1-of-2.ckpt", 1000)), "no model", "variables-1-of-2.ckpt")

    def negative(folder):
        rows = np.ones((2, 16), dtype=np.float32)
        (folder / "variables-1-of-2.ckpt").write_bytes(elasticdl.model(40, {}, {}, {"emb": ([-3, 99999], rows)}))

    refused(changed(negative), "negative id")
    run("reshard", version, 3, plain / "target")
    empty = plain / "empty"
    empty.mkdir()
    run("reshard", version, 3, empty)
    assert elasticdl.same(elasticdl.everything(empty), elasticdl.everything(plain / "target"))


@pytest.mark.slow
@pytest.mark.stepfs
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_reshard_leaves_nothing(plain, how):
    values = np.zeros((32 << 20,), dtype=np.float32)
    elasticdl.save(plain / "version-40", 40, ({f"w{i}": values for i in range(3)}, {}), 2)
    done = subprocess.Popen([BIN, "reshard", plain / "version-40", "3", plain / "new"], stderr=subprocess.PIPE, text=True)
    while len(os.listdir(plain)) < 2 and done.poll() is None:
        pass
    done.send_signal(how)
    said = done.communicate(timeout=60)[1]
    assert done.returncode == 128 + how and "interrupted" in said, said
    assert os.listdir(plain) == ["version-40"]


@pytest.mark.stepfs
@pytest.mark.skipif("STEPFS_ELASTICDL_PYTHON" not in os.environ, reason="needs ElasticDL's client, see elasticdl_client.py")
def test_the_real_client(mount, plain):
    client = Path(__file__).with_name("elasticdl_client.py")
    done = subprocess.run([os.environ["STEPFS_ELASTICDL_PYTHON"], client, BIN, mount.dir, mount.store, plain],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    mount.require_released(*(f"ckpt/version-{v}/variables-{i}-of-2.ckpt" for v in (10, 20, 30) for i in (0, 1)))
