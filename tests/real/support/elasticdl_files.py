"""ElasticDL's checkpoints, written and read by hand: the wire format of its `Model` message, and the rules by which its servers
place and restore variables and embedding rows. Made from its design document and its code, not from stepfs's.
"""

import hashlib
import os

import numpy as np

FLOAT = 1  # tensorflow.DataType.DT_FLOAT


# --- the wire format

def varint(value):
    out = bytearray()
    value &= (1 << 64) - 1
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field, value):
    return varint(field << 3) + varint(value) if value else b""


def block(field, content):
    return varint(field << 3 | 2) + varint(len(content)) + content


def read_varint(message, at):
    """The number at an offset, and the offset behind it."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def fields(message):
    """(number, value) of each field; a value is an int or bytes."""
    at = 0
    while at < len(message):
        tag, at = read_varint(message, at)
        value, at = read_varint(message, at)
        if tag & 7 == 2:
            value, at = bytes(message[at:at + value]), at + value
            assert at <= len(message)
        else:
            assert tag & 7 == 0
        yield tag >> 3, value


# --- Model

def tensor(values):
    dims = b"".join(block(2, number(1, dim)) for dim in values.shape)
    return number(1, FLOAT) + block(2, dims) + block(4, values.astype("<f4").tobytes())


def model(version, infos, dense, tables):
    """`infos`: dim by table; `dense`: array by name; `tables`: (ids, rows) by name. In the order of the dicts and rows."""
    out = number(1, version)
    for name, dim in infos.items():
        out += block(2, block(1, name.encode()) + number(2, dim) + block(3, b"uniform") + number(4, FLOAT))
    for name, values in dense.items():
        out += block(3, block(1, name.encode()) + block(2, tensor(values)))
    for name, (ids, rows) in tables.items():
        slices = block(1, tensor(rows)) + block(2, b"".join(varint(int(i)) for i in ids))
        out += block(4, block(1, name.encode()) + block(2, slices))
    return out


def array(message):
    parts = dict(fields(message))
    shape = [dict(fields(dim)).get(1, 0) for _, dim in fields(parts.get(2, b""))]
    assert parts[1] == FLOAT
    return np.frombuffer(parts.get(4, b""), "<f4").reshape(shape)


def numbers(packed):
    values, at = [], 0
    while at < len(packed):
        value, at = read_varint(packed, at)
        values.append(value)
    return values


def parse(content):
    """(version, infos, dense, tables), as `model` takes them."""
    version, infos, dense, tables = 0, {}, {}, {}
    for field, value in fields(content):
        if field == 1:
            version = value
            continue
        parts = dict(fields(value))
        name = parts[1].decode()
        if field == 2:
            infos[name] = parts.get(2, 0)
        elif field == 3:
            dense[name] = array(parts[2])
        elif field == 4:
            slices = dict(fields(parts[2]))
            tables[name] = (numbers(slices.get(2, b"")), array(slices[1]))
        else:
            raise AssertionError(field)
    return version, infos, dense, tables


# --- placement and restore

def server_of(name, servers):
    return int(hashlib.sha256(name.encode()).hexdigest(), base=32) % servers


def save(folder, version, state, servers, rng=None, ending="ckpt"):
    """Each server writes its part into `folder`. With `rng` the order is random, as in hash maps."""
    dense, tables = state
    os.makedirs(folder, exist_ok=True)
    for server in range(servers):
        names = [name for name in dense if server_of(name, servers) == server]
        own = {}
        for name, (ids, rows) in tables.items():
            mine = np.flatnonzero(ids % servers == server)
            if rng is not None:
                rng.shuffle(mine)
            own[name] = (ids[mine], rows[mine])
        if rng is not None:
            rng.shuffle(names)
        infos = {name: rows.shape[1] for name, (_, rows) in tables.items()}
        content = model(version, infos, {name: dense[name] for name in names}, own)
        with open(os.path.join(folder, f"variables-{server}-of-{servers}.{ending}"), "wb") as file:
            file.write(content)


def is_valid(folder):
    """As CheckpointSaver.check_checkpoint_valid."""
    entries = os.listdir(folder)
    return bool(entries) and len(entries) == int(entries[0].split("-of-")[1].split(".")[0])


def restore(folder, server, servers):
    """The part of a version that one of `servers` takes, whoever wrote it: (version, dense, row by table and id)."""
    assert is_valid(folder)
    versions, dense, rows = set(), {}, {}
    for entry in os.listdir(folder):
        with open(os.path.join(folder, entry), "rb") as file:
            version, _, variables, tables = parse(file.read())
        versions.add(version)
        dense.update({name: values for name, values in variables.items() if server_of(name, servers) == server})
        for name, (ids, values) in tables.items():
            rows.update({(name, i): row for i, row in zip(ids, values) if i % servers == server})
    assert len(versions) == 1, f"files of versions {versions}"
    return versions.pop(), dense, rows


def everything(folder):
    return restore(folder, 0, 1)


def same(a, b):
    """Bit for bit, as `restore` returns them."""
    equal = lambda x, y: x.keys() == y.keys() and all(x[k].shape == y[k].shape and x[k].tobytes() == y[k].tobytes() for k in x)
    return a[0] == b[0] and equal(a[1], b[1]) and equal(a[2], b[2])


def train(count, seed=0, rows=6000, dim=16, moved=0.2, growth=0):
    """States of a small recommender: every variable moves a little, and so do some rows of each table; `growth` rows are new each
    time.
    """
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    shapes = {"dense/kernel": (96, 128), "dense/bias": (128,), "out/kernel": (128, 160), "out/bias": (160,)}
    dense = {name: 0.1 * normal(*shape) for name, shape in shapes.items()}
    everyone = rng.permutation(10 * rows).astype(np.int64)
    values = 0.1 * normal(len(everyone), dim)
    have = rows
    for _ in range(count):
        dense = {name: array + np.float32(1e-3) * normal(*array.shape) for name, array in dense.items()}
        chosen = rng.choice(have, int(moved * have), replace=False)
        values[chosen] += np.float32(3e-3) * normal(len(chosen), dim)
        yield dense, {"emb": (everyone[:have].copy(), values[:have].copy())}
        have += growth


# --- a mount

def check_file(mount, plain, name):
    """All but the values is as written, in its place; the values are within their bounds. Returns their number."""
    was, is_now = (plain / name).read_bytes(), (mount / name).read_bytes()
    assert len(was) == len(is_now)
    said = {about["path"]: about for about in mount.tensors(name)}
    _, infos, dense, tables = parse(was)
    _, infos_now, dense_now, tables_now = parse(is_now)
    assert infos == infos_now and list(dense) == list(dense_now) and list(tables) == list(tables_now)
    pairs = [(f"dense_parameters/{key}", dense[key], dense_now[key]) for key in dense]
    for key in tables:
        assert tables[key][0] == tables_now[key][0], "ids are where they were"
        pairs.append((f"embedding_tables/{key}", tables[key][1], tables_now[key][1]))
    quantized = 0
    for path, before, after in pairs:
        bound = said.get(path, {"bound": 0})["bound"]
        error = np.abs(before.astype(np.float64) - after).max()
        assert error <= bound, f"{path}: off by {error}, stated {said.get(path)}"
        quantized += bound > 0
    return quantized
