"""Lying files, damaged objects, full disks: nothing hangs, nothing is lost, and unknown bytes stay exact."""

import errno
import io
import os
import pickle
import re
import struct
import subprocess
import time
import zipfile

import harness
import pytest
import torch
from harness import DAMAGE, Mount, empty_cache, objects, require_clean, shell, verify, wait_until
from series import bits_equal, difference, save_walk, tensors_of, walk

# --- inputs, each made from a real checkpoint so that its twin looks like the next one of the same lineage


def checkpoint(step):
    buffer = io.BytesIO()
    for state in walk(step, seed=41):
        pass
    torch.save(state, buffer)
    return bytearray(buffer.getvalue())


GOOD = {}


def good(step):
    if step not in GOOD:
        GOOD[step] = bytes(checkpoint(step))
    return bytearray(GOOD[step])


def directory(data):
    """(offset, size) of the zip's central directory, from the last 22 bytes."""
    size, offset = struct.unpack("<II", data[-10:-2])
    return offset, size


def members(data):
    """(position of the central entry, name, local header offset) of each member."""
    at, size = directory(data)
    end, found = at + size, []
    while at < end:
        name, extra, comment = struct.unpack("<HHH", data[at + 28 : at + 34])
        found.append((at, bytes(data[at + 46 : at + 46 + name]), struct.unpack("<I", data[at + 42 : at + 46])[0]))
        at += 46 + name + extra + comment
    return found


def truncated(data):
    return data[: len(data) * 2 // 3]


def directory_cut(data):
    return data[:-60]


def overlapping(data):
    """Every tensor's entry points at the first one's local header."""
    entries = [m for m in members(data) if b"/data/" in m[1]]
    for at, _, _ in entries[1:]:
        data[at + 42 : at + 46] = struct.pack("<I", entries[0][2])
    return data


def sizes_that_lie(data):
    for at, name, _ in members(data):
        if b"/data/" in name:
            data[at + 20 : at + 28] = struct.pack("<II", 0x7FFFFFF0, 0x7FFFFFF0)
    return data


def entries_that_lie(data):
    """2^64 - 1 entries in the Zip64 end record, 65535 in the old one."""
    zip64 = data.rfind(b"PK\x06\x06")
    data[zip64 + 24 : zip64 + 40] = b"\xff" * 16
    data[-14:-10] = b"\xff" * 4
    return data


def directory_far_away(data):
    zip64 = data.rfind(b"PK\x06\x06")
    data[zip64 + 40 : zip64 + 56] = struct.pack("<QQ", 1 << 60, 1 << 60)
    return data


def checksum_wrong(data):
    """A payload byte changed after the save, so that the zip's own CRC reports damage."""
    at = next(m[2] for m in members(data) if m[1].endswith(b"/data/0"))
    data[at + 4096] ^= 0x40
    return data


def bytes_before(data):
    return b"#!/bin/sh\n" + bytes(100) + data


def bytes_after(data):
    return data + b"trailing text\n" * 10


def with_pickle(payload):
    """A zip like torch's with another data.pkl."""

    def make(data):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("archive/data.pkl", payload)
            archive.writestr("archive/byteorder", "little")
            archive.writestr("archive/data/0", bytes(data[: 512 << 10]))
            archive.writestr("archive/version", "3\n")
        return buffer.getvalue()

    return make


class Calls:
    def __reduce__(self):
        return os.system, (f"touch {MARK}",)


MARK = f"/tmp/stepfs-code-was-run-{os.getpid()}"
DEEP = b"\x80\x02" + b"(" * 300_000 + b"l" * 300_000 + b"."
NESTED = b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."
RECURSIVE = b"\x80\x02]q\x00h\x00a."
BOMB = b"\x80\x02]q\x00" + b"".join(b"(" + b"h" + bytes([i]) + (b"h" + bytes([i])) * 50 + b"lq" + bytes([i + 1]) for i in range(60)) + b"."
LONG_STRING = b"\x80\x02X\xff\xff\xff\x7fabc."
LONG_BINARY = b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"abc."
BIG_FRAME = b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N."
BIG_MEMO = b"\x80\x02Nr\xff\xff\xff\xffj\xff\xff\xff\xff."
NO_STOP = b"\x80\x02}q\x00X\x01\x00\x00\x00a"
HUGE_SHAPE = pickle.dumps({"w": [2**62] * 64}, 2)


def safetensors(header, size=None):
    def make(data):
        text = header if isinstance(header, bytes) else header.encode()
        return struct.pack("<Q", len(text) if size is None else size) + text + bytes(data[: 256 << 10])

    return make


def tensor_entry(dtype, shape, begin, end):
    return f'{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}}}'


CASES = {
    "truncated zip": truncated,
    "directory cut off": directory_cut,
    "overlapping members": overlapping,
    "sizes that lie": sizes_that_lie,
    "entry counts that lie": entries_that_lie,
    "directory at 2^60": directory_far_away,
    "bytes before the zip": bytes_before,
    "bytes after the zip": bytes_after,
    "text": lambda data: (b"epoch %d, loss 0.1\n" % data[-1]) * 20_000,
    "random bytes": lambda data: os.urandom(len(data)),
    "zeros": lambda data: bytes(len(data)),
    "zip of nothing": lambda data: bytes(80_000) + b"PK\x05\x06" + bytes(18),
    "pickle: deep": with_pickle(DEEP),
    "pickle: nested": with_pickle(NESTED),
    "pickle: contains itself": with_pickle(RECURSIVE),
    "pickle: bomb": with_pickle(BOMB),
    "pickle: long string": with_pickle(LONG_STRING),
    "pickle: long binary": with_pickle(LONG_BINARY),
    "pickle: big frame": with_pickle(BIG_FRAME),
    "pickle: big memo": with_pickle(BIG_MEMO),
    "pickle: no end": with_pickle(NO_STOP),
    "pickle: huge shape": with_pickle(HUGE_SHAPE),
    "pickle: calls": with_pickle(pickle.dumps(Calls(), 2)),
    "pickle: random": with_pickle(b"\x80\x02" + bytes(i * 37 % 256 for i in range(5000))),
    "safetensors: header of 2^60": safetensors("{}", 1 << 60),
    "safetensors: header of 2^64": safetensors("{}", (1 << 64) - 1),
    "safetensors: not JSON": safetensors("{" * 5000),
    "safetensors: deep JSON": safetensors('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "safetensors: beyond the end": safetensors(tensor_entry("F32", "[1099511627776]", 0, 1 << 42)),
    "safetensors: offsets reversed": safetensors(tensor_entry("F32", "[1024]", 4096, 0)),
    "safetensors: shape overflows": safetensors(tensor_entry("F32", "[4294967296,4294967296,4]", 0, 4096)),
    "safetensors: shape lies": safetensors(tensor_entry("F32", "[1000]", 0, 262144)),
    "safetensors: unknown type": safetensors(tensor_entry("F5_X", "[1000]", 0, 4000)),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_file_reads_back_bit_exact(mount, case):
    content = {f"{step}.pt": bytes(CASES[case](good(step))) for step in (1, 2, 3)}
    for name, data in content.items():
        (mount / name).write_bytes(data)
    mount.sync(timeout=120)
    for name, data in content.items():
        assert (mount / name).read_bytes() == data, f"{name}, {mount.state(name)}"
    if mount.pid:
        assert harness.is_alive(mount.pid)
        mount.umount()
        empty_cache(mount.store)
        require_clean(mount.store)
        mount.mount()
        for name, data in content.items():
            assert (mount / name).read_bytes() == data, f"{name}, after a remount"
    assert not os.path.exists(MARK), "code from a checkpoint was run"


def test_small_and_empty_files(both):
    content = {"empty.pt": b"", "one.pt": b"x", "text.pt": b"not a checkpoint\n", "k.safetensors": bytes(7), "zip.pt": b"PK\x03\x04",
               "tiny.pt": bytes(good(1)[:65_535]), "edge.pt": bytes(good(1)[:65_536])}
    for name, data in content.items():
        (both / name).write_bytes(data)
        (both / f"new-{name}").write_bytes(data[::-1])
    both.sync()
    for name, data in content.items():
        assert (both / name).read_bytes() == data and (both / f"new-{name}").read_bytes() == data[::-1]
    if both.pid:
        both.remount()
        for name, data in content.items():
            assert (both / name).read_bytes() == data


def test_bad_files_among_good_ones(mount, plain):
    """A truncated checkpoint in the middle of a series is kept as it is, and harms neither neighbour."""
    names = save_walk(plain, 5, seed=43)
    for name in names:
        data = (plain / name).read_bytes()
        (mount / name).write_bytes(data[: len(data) // 2] if name == names[2] else data)
    mount.sync()
    data = (plain / names[2]).read_bytes()
    assert (mount / names[2]).read_bytes() == data[: len(data) // 2]
    for name in names[:2] + names[3:]:
        limit = mount.entry(name)["max_abs_error"] or 0.0
        exact, read = (tensors_of(torch.load(folder / name)) for folder in (plain, mount.dir))
        assert all(bits_equal(exact[k], read[k]) or difference(exact[k], read[k]) <= limit for k in exact)


def test_checksums_switched_off(mount, plain):
    """torch can write zips without CRCs; they load, before and after."""
    from torch.serialization import get_crc32_options, set_crc32_options

    before = get_crc32_options()
    set_crc32_options(False)
    try:
        names = save_walk(plain, 3, seed=45)
    finally:
        set_crc32_options(before)
    for name in names:
        (mount / name).write_bytes((plain / name).read_bytes())
    mount.sync()
    for name in names:
        limit = mount.entry(name)["max_abs_error"] or 0.0
        exact, read = (tensors_of(torch.load(folder / name)) for folder in (plain, mount.dir))
        assert all(bits_equal(exact[k], read[k]) or difference(exact[k], read[k]) <= limit for k in exact)


def test_wrong_checksum_stays_wrong(mount):
    """A tensor whose bytes contradict the zip's CRC is kept exactly, CRC included: damage must not be covered up."""
    content = {f"{step}.pt": bytes(checksum_wrong(good(step))) for step in (1, 2, 3)}
    for name, data in content.items():
        (mount / name).write_bytes(data)
    mount.sync()
    for name, data in content.items():
        read = (mount / name).read_bytes()
        at = next(m[2] for m in members(data) if m[1].endswith(b"/data/0"))
        assert read[: at + 100_000] == data[: at + 100_000]
        with zipfile.ZipFile(io.BytesIO(read)) as archive:
            assert archive.testzip().endswith("/data/0")
        limit = mount.entry(name)["max_abs_error"] or 0.0
        exact, now = (tensors_of(torch.load(io.BytesIO(b))) for b in (data, read))
        assert all(bits_equal(exact[k], now[k]) or difference(exact[k], now[k]) <= limit for k in exact)


def test_file_that_changes_while_it_is_archived(mount):
    """An old checkpoint is reopened and changed again and again while newer ones make stepfs archive it."""
    names = save_walk(mount.dir, 3, seed=47)
    for i, state in enumerate(walk(12, seed=48)):
        with open(mount / names[0], "r+b") as f:
            # Until it is opened it may be released, and lose as much as its profile allows.
            base = f.read()
            f.seek(90_000 + 1000 * i)
            f.write(b"%016d" % i)
            expected = base[: 90_000 + 1000 * i] + b"%016d" % i + base[90_016 + 1000 * i :]
            f.seek(0)
            same = f.read() == expected
            assert same, f"write {i} is not all that changed"
        base = (mount / names[0]).read_bytes()
        assert base[90_000 + 1000 * i :][:16] == b"%016d" % i
        torch.save(state, mount / f"other_{i}.pt")
    with open(mount / names[0], "r+b") as f:
        f.write(base)
    mount.sync()
    read = (mount / names[0]).read_bytes()
    assert len(read) == len(base)
    if mount.state(names[0]) != "released":
        assert read == base


# --- damage


def released_series(mount, count=5, seed=51):
    names = save_walk(mount.dir, count, seed=seed)
    mount.sync()
    mount.require_released(*names[:-1])
    return names, {name: (mount / name).read_bytes() for name in names}


def object_of(mount, name):
    """The object of a released file."""
    number = mount.entry(name)["object"]
    found = [path for path in objects(mount.store) if path.name.split(".")[0].endswith(number[2:])]
    assert len(found) == 1, f"object {number} of {name}: {found} of {objects(mount.store)}"
    return found[0]


def flip(path, where=0.5, count=64):
    """Change bytes of an object in place, as a failing disk does."""
    mode = path.stat().st_mode
    os.chmod(path, 0o600)
    with open(path, "r+b") as f:
        at = int(path.stat().st_size * where)
        f.seek(at)
        old = f.read(count)
        f.seek(at)
        f.write(bytes(b ^ 0xFF for b in old))
        os.fsync(f.fileno())
    os.chmod(path, mode)


def fails_with_eio(path):
    with pytest.raises(OSError) as error:
        path.read_bytes()
    assert error.value.errno == errno.EIO, error.value


def check_only_one_is_damaged(mount, names, content, victim):
    fails_with_eio(mount / victim)
    for name in names:
        if name != victim:
            assert (mount / name).read_bytes() == content[name], f"{name} was harmed"
    assert os.stat(mount / victim).st_size == len(content[victim])
    assert harness.is_alive(mount.pid)


@pytest.mark.stepfs
@pytest.mark.parametrize("when", ["while unmounted", "while mounted"])
def test_damaged_object(mount, when):
    names, content = released_series(mount)
    victim = names[-2]  # nothing is stored as a difference to the last released one
    path = object_of(mount, victim)
    mount.umount()
    empty_cache(mount.store)
    require_clean(mount.store)
    if when == "while unmounted":
        flip(path)
        mount.mount()
    else:
        mount.mount()
        flip(path)
    check_only_one_is_damaged(mount, names, content, victim)
    log = mount.log.read_text(errors="replace")
    assert path.name.split(".")[0] in log.replace("/", ""), "the log does not name the object"

    mount.umount()
    code, text = verify(mount.store)
    assert code == DAMAGE, text
    assert path.name.split(".")[0] in text.replace("/", ""), f"the object is not named:\n{text}"
    assert re.search(r"weight|bias|exp_avg|skeleton", text), f"no tensor is named:\n{text}"
    assert victim in text, f"the file is not named:\n{text}"


@pytest.mark.stepfs
@pytest.mark.parametrize("where", [0.0, 0.02, 0.25, 0.75, 0.999], ids=str)
def test_damage_anywhere_is_noticed(mount, where):
    names, content = released_series(mount, 3, seed=53)
    path = object_of(mount, names[-2])
    mount.umount()
    empty_cache(mount.store)
    flip(path, where, 8)
    code, text = verify(mount.store)
    assert code == DAMAGE, text
    mount.mount()
    check_only_one_is_damaged(mount, names, content, names[-2])
    # A damaged file can be deleted, and the job continues.
    os.unlink(mount / names[-2])
    save_walk(mount.dir, 5, seed=53)
    mount.sync()


@pytest.mark.stepfs
@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "garbage"])
def test_object_lost(mount, how):
    names, content = released_series(mount, 3, seed=55)
    path = object_of(mount, names[-2])
    mount.umount()
    empty_cache(mount.store)
    size = path.stat().st_size
    path.unlink()
    if how != "missing":
        path.write_bytes({"empty": b"", "truncated": bytes(size // 2), "garbage": os.urandom(size)}[how])
    code, text = verify(mount.store)
    assert code == DAMAGE, text
    mount.mount()
    check_only_one_is_damaged(mount, names, content, names[-2])


@pytest.mark.stepfs
def test_damaged_stub(mount):
    names, content = released_series(mount, 3, seed=57)
    stub = mount.store / "tree" / names[-2]
    mount.umount()
    empty_cache(mount.store)
    stat = stub.stat()
    with open(stub, "r+b") as f:
        head = f.read(256)
        f.seek(0)
        f.write(head[:8] + bytes(b ^ 0x55 for b in head[8:]))
    os.utime(stub, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    code, text = verify(mount.store)
    assert code == DAMAGE and names[-2] in text, text
    mount.mount()
    for name in names:
        if name != names[-2]:
            assert (mount / name).read_bytes() == content[name]
    fails_with_eio(mount / names[-2])


# --- a full disk


@pytest.fixture
def small_disk(plain):
    """A mount whose store lies on a tmpfs of 64 MB."""
    if os.geteuid() != 0:
        pytest.skip("a small disk of its own needs root")
    disk = plain / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True)
    mount = (harness.PlainMount if harness.PLAIN else Mount)(plain / "base", store=disk / "store")
    if harness.PLAIN:
        mount.dir = disk / "store"
        mount.dir.mkdir()
    mount.disk = disk
    try:
        mount.mount()
        yield mount
    finally:
        mount.close()
        subprocess.run(["umount", disk], check=True)


def fill(disk, leave):
    """Fill the disk up to `leave` bytes."""
    stat = os.statvfs(disk)
    with open(disk / "filler", "wb") as f:
        remaining = stat.f_bavail * stat.f_bsize - leave
        while remaining > 0:
            remaining -= f.write(bytes(min(remaining, 1 << 20)))


def check_nothing_lost(mount, originals):
    for name, original in originals.items():
        limit = mount.entry(name)["max_abs_error"] or 0.0
        exact, read = (tensors_of(torch.load(path)) for path in (original, mount / name))
        assert all(bits_equal(exact[k], read[k]) or difference(exact[k], read[k]) <= limit for k in exact), name


def test_full_disk(small_disk, plain):
    mount, disk = small_disk, small_disk.disk
    (plain / "exact").mkdir()
    names = save_walk(plain / "exact", 6, seed=61, scale=2)
    size = os.path.getsize(plain / "exact" / names[0])
    for name in names[:2]:
        shell(f"cp {plain / 'exact' / name} {mount / name}")
    mount.sync()
    fill(disk, int(2.5 * size))
    # Two more files fit, but perhaps not their objects. One of the next does not fit, and its writer gets an error.
    written = {name: plain / "exact" / name for name in names[:2]}
    with pytest.raises(OSError) as error:
        for name in names[2:] * 3:
            data, following = (plain / "exact" / name).read_bytes(), f"step_{len(written) + 1:04d}.pt"
            with open(mount / following, "wb", buffering=0) as f:
                for at in range(0, len(data), 1 << 20):
                    f.write(data[at : at + (1 << 20)])
                os.fsync(f.fileno())
            written[following] = plain / "exact" / name
    assert error.value.errno == errno.ENOSPC
    assert len(written) >= 4
    failed = set(os.listdir(mount.dir)) - set(written)
    for name in failed:
        os.unlink(mount / name)
    time.sleep(1)
    assert mount.pid == 0 or harness.is_alive(mount.pid)
    check_nothing_lost(mount, written)

    os.unlink(disk / "filler")
    if mount.pid:
        # Without a call of sync.
        wait_until(lambda: len(mount.released()) >= len(written) - 1, 90, f"all but the newest released, have {mount.states()}")
    check_nothing_lost(mount, written)
    if mount.pid:
        mount.umount()
        require_clean(mount.store)


def test_recall_without_room(small_disk, plain):
    """Opening a released file for writing needs room for it: ENOSPC without, and the file stays as it was."""
    mount, disk = small_disk, small_disk.disk
    names = save_walk(mount.dir, 4, seed=63, scale=2)
    mount.sync()
    before = {name: (mount / name).read_bytes() for name in names}
    if mount.pid:
        mount.require_released(*names[:-1])
        mount.umount()
        empty_cache(mount.store)
        mount.mount()
    fill(disk, 256 << 10)
    if mount.pid:
        with pytest.raises(OSError) as error:
            open(mount / names[0], "r+b").close()
        assert error.value.errno == errno.ENOSPC
    # Reading is possible on a full disk.
    for name in names:
        assert (mount / name).read_bytes() == before[name]
    os.unlink(disk / "filler")
    with open(mount / names[0], "r+b") as f:
        f.seek(5)
        f.write(b"!")
    assert (mount / names[0]).read_bytes() == before[names[0]][:5] + b"!" + before[names[0]][6:]
