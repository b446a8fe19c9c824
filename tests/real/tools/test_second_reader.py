"""tools/read_store.py, written from docs/FORMAT.md alone, reads what stepfs writes: the same bytes as the mount, and of a damaged
store what is left. The tests in frameworks/ compare it on their files (`harness.compare_readers`).
"""

import io
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter

import harness
import numpy as np
import pytest
import read_store
import safetensors.torch
import torch
from harness import ROOT, Mount, make_base, objects, remove_base, run
from series import walk

pytestmark = pytest.mark.stepfs
PROGRAM = ROOT / "tools/read_store.py"
GOLDEN = sorted(path.name for path in (ROOT / "tests/golden").iterdir() if path.is_dir())


def reader(store, *words):
    return subprocess.run([sys.executable, str(PROGRAM), str(store), *map(str, words)], capture_output=True, text=True, timeout=300)


def all_types(step):
    """Every element type; floats move a little, integers in places."""
    rng = torch.Generator().manual_seed(5)
    floats, moved = torch.randn(12_000, generator=rng).double(), torch.randn(12_000, generator=torch.Generator().manual_seed(step))
    whole = torch.randint(-100, 100, (12_000,), generator=rng) + step * (torch.arange(12_000) % 7 == 0)
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
    state = {f"at.{kind}": (floats * (1 + step / 1000) + step / 1000 * moved).to(kind) for kind in kinds}
    kinds = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
    state |= {f"at.{kind}": whole.to(kind) for kind in kinds}
    return {**state, "mask": whole > 0, "complex": torch.complex(floats, floats + step).to(torch.complex64), "odd": torch.ones(70_001)}


def opaque(step):
    """A text that repeats, bytes that do not, and few symbols."""
    rng = np.random.default_rng(3)
    return b"".join([b"HEAD%d" % step, b"a text that repeats. " * 3000, rng.bytes(50_000), np.random.default_rng(step).bytes(5000),
                     rng.integers(0, 9, 100_000).astype("u1").tobytes(), np.zeros(40_000, "u1").tobytes()])


def save(folder):
    """A series of each; all but the newest are released."""
    for step in range(1, 5):
        safetensors.torch.save_file(all_types(step), folder / f"types_step_{step}.safetensors")
        torch.save({**all_types(step), "complex128": torch.complex(torch.ones(2000).double(), torch.randn(2000).double())},
                   folder / f"types_step_{step}.pt")
        (folder / f"own_{step}.bin").write_bytes(opaque(step))


@pytest.fixture(scope="module")
def made():
    """A store that is not mounted any more, with the bytes that its mount gave for each file."""
    mount = Mount(make_base())
    try:
        mount.mount()
        save(mount.dir)
        mount.sync()
        given = {path.name: path.read_bytes() for path in mount.dir.iterdir()}
        assert len(mount.released()) == 9, mount.states()
        mount.umount()
        yield mount.store, given
    finally:
        mount.close()
        remove_base(mount.base)


@pytest.fixture
def store(made):
    """A copy to damage, with the bytes of each file."""
    base = make_base()
    shutil.copytree(made[0], base / "store", symlinks=True)
    yield base / "store", made[1]
    remove_base(base)


def gets(path, name, out):
    """Exit code, lines and bytes of one file."""
    done = reader(path, "get", name, out)
    found = out.read_bytes() if out.exists() else None
    out.unlink(missing_ok=True)
    return done.returncode, done.stderr, found


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_stores_give_the_bytes_of_the_mount(name):
    base = make_base()
    shutil.copytree(ROOT / "tests/golden" / name, base / "store")
    mount = Mount(base)
    try:
        mount.mount()
        assert len(mount.released()) == len((ROOT / "tests/golden" / name / "hashes.txt").read_text().splitlines())
        harness.compare_readers(mount)
    finally:
        mount.close()
        remove_base(base)


def test_every_type_and_coding_gives_the_bytes_of_the_mount(made, tmp_path, monkeypatch):
    """Together with the golden stores these files have every coding, and every mode of every payload."""
    path, given = made
    met = Counter()

    def count(name, number):
        real = getattr(read_store, name)
        monkeypatch.setattr(read_store, name, lambda *args: met.update([(name, number(*args))]) or real(*args))

    count("symbols", lambda data, n: data[0] if n else None)
    count("lossless", lambda data, length, kind, parent: data[0] if length else None)
    count("published", lambda body, *_: body.data[0])
    count("ints", lambda data, n, halved=True: bool(n) and halved and data[:1] == b"\0")
    for name, expected in given.items():
        assert read_store.get(read_store.Store(str(path)), name, str(tmp_path / "out")) == 0, name
        assert (tmp_path / "out").read_bytes() == expected, name
        (tmp_path / "out").unlink()
    for store in [path, *(ROOT / "tests/golden" / name for name in GOLDEN)]:
        known = read_store.Store(str(store))
        for name in read_store.object_names(known):
            obj = known.object(name)
            met.update(("coding", tensor.coding) for tensor in obj.tensors)
            met.update(("type", tensor.kind) for tensor in obj.tensors)
            assert store == path or read_store.decode(known, obj) == []
    wanted = {"coding": {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 128, 129, 130, 131, 138}, "type": set(range(17)),
              "symbols": {0, 1, 2, 3, 4}, "lossless": {0, 1, 2, 3, 4}, "ints": {False, True}}
    missed = {kind: sorted(all_of - {value for what, value in met if what == kind}) for kind, all_of in wanted.items()}
    assert not any(missed.values()), missed
    assert {value for what, value in met if what == "published"} >= {1, 3, 5, 10, 20, 30, 31, 32}


@pytest.mark.slow
def test_large_tensors_and_their_copies_give_the_bytes_of_the_mount(mount):
    """Tensors of several tiles. Of those above 8 MiB the skeleton has the first and last bytes, and the same elements of a copy."""
    shapes = {"wide.weight": (1100, 2048), "wide.bias": (2048,), "odd.weight": (333, 777)}
    for step, state in enumerate(walk(3, seed=4, shapes=shapes)):
        state["half"] = {name: value.bfloat16() for name, value in state["model"].items()}
        torch.save(state, mount / f"large_step_{step}.pt")
    mount.sync()
    assert len(mount.released()) == 2
    known = read_store.Store(str(mount.store))
    tensors = [tensor for name in read_store.object_names(known) for tensor in known.object(name).tensors]
    assert {tensor.way for tensor in tensors if tensor.skip} >= {1, 3, 4} and any(tensor.way == 9 for tensor in tensors)
    harness.compare_readers(mount)


@pytest.mark.slow
def test_each_command_says_what_it_found(made, tmp_path):
    path, given = made
    listed = reader(path, "ls")
    assert listed.returncode == 0 and not listed.stderr
    assert re.search(r"^ +\d+  types_step_1.pt  \w+, profile \w+, object [0-9a-f]{32}$", listed.stdout, re.M), listed.stdout
    assert re.search(r"types_step_4.pt  plain$", listed.stdout, re.M) and len(listed.stdout.splitlines()) == len(given)
    checked = reader(path, "verify")
    assert (checked.returncode, checked.stderr) == (0, "") and checked.stdout.endswith(", 0 faults\n"), checked
    (tmp_path / "there").write_text("mine")
    for words, code, said in [
        ((), 2, "read_store.py STORE verify"),
        (("look",), 2, "read_store.py STORE verify"),
        (("get", "types_step_1.pt"), 2, "read_store.py STORE verify"),
        (("get", "no.pt", tmp_path / "o"), 2, "No such file"),
        (("get", "../stepfs.toml", tmp_path / "o"), 2, "is not a path inside"),
        (("get", "/etc/passwd", tmp_path / "o"), 2, "is not a path inside"),
        (("get", "types_step_1.pt", tmp_path / "there"), 2, "File exists"),
        (("get", "0" * 32, tmp_path / "o"), 2, "object " + "0" * 32),
    ]:
        done = reader(path, *words)
        assert done.returncode == code and said in done.stderr, (words, done)
        assert "Traceback" not in done.stderr and not (tmp_path / "o").exists()
    assert reader(tmp_path, "ls").returncode == 2 and "is no store" in reader(tmp_path, "ls").stderr
    assert (tmp_path / "there").read_text() == "mine"
    # The program leaves no trace in the store.
    assert not list(path.glob("**/__pycache__"))


def test_each_store_has_the_program_and_what_to_do_with_it(made, tmp_path):
    path, given = made
    text = (path / "README").read_text()
    assert len(text.splitlines()) == 10 and "read_store.py" in text
    # As a person would who has only this directory.
    moved = tmp_path / "found"
    shutil.copytree(path, moved)
    command = next(line for line in text.splitlines() if " get " in line).split("  ")
    words = next(part for part in command if part).strip().split()[1:]
    words = [{"DIRECTORY": str(moved), "PATH": "types_step_1.pt", "OUT": "out"}.get(word, word) for word in words]
    done = subprocess.run([sys.executable, *words], cwd=moved, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and (moved / "out").read_bytes() == given["types_step_1.pt"], done


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_store_on_a_nearly_full_disk_is_made_without_the_program(tmp_path):
    disk, own = tmp_path / "disk", tmp_path / "own.txt"
    disk.mkdir()
    own.write_text("mine")
    harness.shell(f"mount -t tmpfs -o size=32k tmpfs {disk}")
    try:
        run("import", disk / "store", own)
        assert (disk / "store/stepfs.toml").exists() and not (disk / "store/read_store.py").exists()
        assert not list((disk / "store/tmp").iterdir())
        harness.shell(f"mount -o remount,size=1m {disk}")
        run("import", disk / "store", PROGRAM)
        assert (disk / "store/read_store.py").read_text() == PROGRAM.read_text() and (disk / "store/tree/own.txt").read_text() == "mine"
    finally:
        harness.shell(f"umount {disk}")


def differs(one, other):
    return np.flatnonzero(np.frombuffer(one, "u1") != np.frombuffer(other, "u1"))


@pytest.mark.slow
def test_a_damaged_object_is_read_as_far_as_it_goes(store, tmp_path):
    """Of a flipped byte in each third of an object, only the parts that need it are missing, and each is named."""
    path, given = store
    known = read_store.Store(str(path))
    rng = random.Random(1)
    for name in ["types_step_1.pt", "types_step_2.safetensors", "own_2.bin"]:
        obj = known.object(read_store.object_of(known, str(path / "tree" / name), os.lstat(path / "tree" / name)))
        end = max(at + size for at, size in zip(obj.offsets, obj.stored))
        file = path / "objects" / obj.id[:2] / obj.id
        whole = bytearray(file.read_bytes())
        for third in range(3):
            at = 192 + (end - 192) * third // 3 + rng.randrange((end - 192) // 3)
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1:])
            out = io.BytesIO()
            fresh = read_store.Store(str(path))
            said = read_store.decode(fresh, fresh.object(obj.id), out)
            found = out.getvalue()
            assert said and len(found) == len(given[name]), said
            ranges = [(int(a), int(b)) for a, b in re.findall(r"^bytes (\d+) to (\d+), ", "\n".join(said), re.M)]
            assert len(ranges) == len(said), said
            for wrong in differs(found, given[name]):
                assert any(first <= wrong <= last for first, last in ranges), (name, wrong, ranges)
            # A file of an unknown format is one run or a few.
            assert name == "own_2.bin" or sum(last - first + 1 for first, last in ranges) < len(found), said
        if name == "types_step_1.pt":
            code, words, again = gets(path, name, tmp_path / "out")
            assert (code, again) == (1, found) and f"missing: {said[0]}\n" in words and "has zeros in place" in words, words
            checked = reader(path, "verify")
            assert checked.returncode == 1 and f"object {obj.id} ({name}): {said[0]}\n" in checked.stdout, checked
        file.write_bytes(whole)


def test_a_lost_object_is_named_by_all_who_need_it(store, tmp_path):
    path, given = store
    known = read_store.Store(str(path))
    first = read_store.object_of(known, str(path / "tree/types_step_1.pt"), os.lstat(path / "tree/types_step_1.pt"))
    (path / "objects" / first[:2] / first).unlink()
    code, said, found = gets(path, "types_step_1.pt", tmp_path / "out")
    assert code == 2 and first in said and found is None
    code, said, found = gets(path, "types_step_2.pt", tmp_path / "out")
    assert code == 1 and f"object {first}: No such file" in said and "at.torch.float32" in said, said
    assert gets(path, "types_step_4.pt", tmp_path / "out") == (0, "", given["types_step_4.pt"])
    assert "DAMAGED" in reader(path, "ls").stdout


def test_a_lost_name_does_not_lose_the_object(store, tmp_path):
    """Without stub, with a stub of zeros or a damaged one, and without settings: by the object's id."""
    path, given = store
    stub = path / "tree/types_step_1.pt"
    known = read_store.Store(str(path))
    name = read_store.object_of(known, str(stub), os.lstat(stub))
    whole, info = stub.read_bytes(), os.stat(stub)
    for text in [bytes(4096), whole[:40] + b"x" + whole[41:4096]]:
        stub.write_bytes(text)
        os.truncate(stub, len(whole))
        os.utime(stub, ns=(info.st_atime_ns, info.st_mtime_ns))
        assert gets(path, "types_step_1.pt", tmp_path / "out")[0] == 2
        listed = reader(path, "ls")
        assert listed.returncode == 1 and "types_step_1.pt  DAMAGED" in listed.stdout and name in listed.stdout
    stub.unlink()
    (path / "stepfs.toml").unlink()
    assert re.search(rf"\(no name\)  object {name} of types_step_1.pt", reader(path, "ls").stdout)
    code, said, found = gets(path, name, tmp_path / "out")
    assert (code, found) == (0, given["types_step_1.pt"]) and "stepfs.toml" in said
    assert gets(path, "types_step_2.pt", tmp_path / "out")[::2] == (0, given["types_step_2.pt"])


def test_an_old_program_leaves_a_newer_store_untouched_and_names_the_next_step(store):
    path, _ = store
    settings = path / "stepfs.toml"
    settings.write_text(settings.read_text().replace("format = 2", "format = 3"))
    state = lambda: {file: (file.lstat().st_mtime_ns, file.lstat().st_ino) for file in path.rglob("*")}
    before = state()
    done = reader(path, "ls")
    assert done.returncode == 2 and "format 3" in done.stderr and "read_store.py" in done.stderr
    (path.parent / "mnt").mkdir()
    for words in [("mount", path, path.parent / "mnt"), ("ls", path), ("status", path), ("verify", path), ("verify", "--repair", path),
                  ("why", path), ("gc", path), ("import", path, PROGRAM), ("export", path, "own_1.bin", path.parent / "out"),
                  ("cat", path, "own_1.bin")]:
        done = run(*words, check=False)
        said = "the store has format 3, this stepfs reads format 2 only; use a newer stepfs; without one, the store's own read_store.py"
        assert done.returncode == harness.FAILURE and said in done.stderr, (words, done)
    assert state() == before and not (path.parent / "out").exists()


def test_parents_in_a_circle_end(store, tmp_path):
    """Two objects that name each other, with right checksums."""
    path, _ = store
    known = read_store.Store(str(path))
    obj = next(known.object(name) for name in read_store.object_names(known) if known.object(name).parent)
    file = path / "objects" / obj.id[:2] / obj.id
    data = bytearray(file.read_bytes())
    # The parent's id stands behind magic, format, id and the 1 of its presence.
    assert data[29:45].hex() == obj.parent
    data[29:45] = bytes.fromhex(obj.id)
    data[184:192] = read_store.xxh3_64(bytes(data[:184])).to_bytes(8, "little")
    file.write_bytes(data)
    done = reader(path, "get", obj.id, tmp_path / "out")
    assert done.returncode == 1 and "is too long, or has no end" in done.stderr, done


def test_no_payload_makes_it_crash_or_hang(made, monkeypatch):
    """Payloads and indexes that are changed where no checksum tells: each is read as something, or is damage. Of the golden stores,
    since these have every coding and are small."""
    monkeypatch.setattr(read_store.Object, "check", lambda self, number, decoded: decoded)
    real, rng = read_store.Object.payload, random.Random(7)

    def changed(self, number):
        data = bytearray(real(self, number))
        for _ in range(rng.randrange(3)):
            if data:
                at = min(rng.randrange(len(data)), rng.choice([6, 40, len(data)]))
                data[min(at, len(data) - 1)] = rng.randrange(256)
        return bytes(data[:rng.choice([len(data), len(data), rng.randrange(len(data) + 1)])])

    monkeypatch.setattr(read_store.Object, "payload", changed)
    unzstd = read_store.unzstd

    def changed_index(frame, length, prefix=None):
        data = bytearray(unzstd(frame, length, prefix))
        if in_index:
            data[rng.randrange(len(data))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        return bytes(data)

    monkeypatch.setattr(read_store, "unzstd", changed_index)
    damaged = 0
    for in_index in [False, True]:
        for name in GOLDEN:
            known = read_store.Store(str(ROOT / "tests/golden" / name))
            for object_name in read_store.object_names(known):
                try:
                    obj = known.object(object_name)
                except read_store.Damage:
                    damaged += 1
                    continue
                with np.errstate(all="ignore"):
                    for what, size, raw, fault in itertools.islice(known.pieces(obj), 200):
                        damaged += fault is not None
                        assert in_index or raw is None or len(raw) == size, (object_name, what)
    assert damaged > 100


def test_its_length_and_its_imports():
    """At most 900 lines that are not blank, of one file; nothing but numpy and zstandard beside Python itself."""
    text = PROGRAM.read_text()
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 900
    imported = set(re.findall(r"^(?:import|from) (.*?)(?: import .*| as .*)?$", text, re.M))
    names = {word for line in imported for word in line.split(", ")}
    assert names - set(sys.stdlib_module_names) == {"numpy", "zstandard"}
