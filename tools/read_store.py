#!/usr/bin/env python3
"""Reads a store of stepfs, of format 2, without stepfs: plain, slow, one file. It never changes the store.

    read_store.py STORE ls              the files of the store, and what each is
    read_store.py STORE verify          decodes everything, and names each fault
    read_store.py STORE get PATH OUT    writes the file PATH, as the mount gives it, to the new file OUT
    read_store.py STORE get OBJECT OUT  the same for an object whose name is lost (32 hexadecimal digits)

It needs Python 3.9 or newer, and the packages numpy and zstandard. Missing parts are zeros in OUT, and each is named.
The exit status is 0 if all is well, 1 if a part is damaged or missing, 2 if nothing could be done.

docs/FORMAT.md of stepfs describes the format. The sections here have its order, and its names for things.
"""
import hashlib, math, mmap, os, re, shutil, stat, struct, sys, tempfile
from collections import OrderedDict, namedtuple

import numpy as np
import zstandard

FORMAT = 2
TILE = 524288  # decoded bytes of a tile
SMALLEST = 65536  # smaller files are never released
DEEPEST = 33  # objects in a chain
MOST_FACTORS = 1 << 25  # rows and columns of a tensor with factors; more would need too much memory


class Damage(Exception):
    """The store breaks a rule of the format; the text says which."""


def need(condition, text):
    """Rules that the checksum of the decoded bytes does not imply. The others are not checked one by one."""
    if not condition:
        raise Damage(text)


# --- XXH3 with seed 0. The specification of its author: github.com/Cyan4973/xxHash, doc/xxhash_spec.md

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
XP32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
XP64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e")
KEYS = np.lib.stride_tricks.sliding_window_view(np.frombuffer(SECRET, "<u8"), 8)[:16]  # of the 16 stripes of a block


def le(data, at, size=8):
    return int.from_bytes(data[at:at + size], "little")


def fold(a, b):
    return a * b & M64 ^ a * b >> 64


def avalanche(x, shift=37, factor=0x165667919E3779F9, last=32):
    x = ((x ^ x >> shift) & M64) * factor & M64
    return x ^ x >> last


def mix16(data, at, secret):
    return fold(le(data, at) ^ le(SECRET, secret), le(data, at + 8) ^ le(SECRET, secret + 8))


def xxh3_64(data):
    n = len(data)
    if n > 240:
        return Xxh3().update(data).digest() & M64
    if n > 128:
        h = n * XP64[0] + sum(mix16(data, 16 * i, 16 * i) for i in range(8))
        h = avalanche(h & M64) + sum(mix16(data, 16 * i, 16 * i - 125) for i in range(8, n // 16))
        return avalanche(h + mix16(data, n - 16, 119) & M64)
    if n > 16:
        return avalanche(n * XP64[0] + sum(mix16(data, 16 * i, 32 * i) + mix16(data, n - 16 * i - 16, 32 * i + 16)
                                           for i in range((n + 31) // 32)) & M64)
    if n > 8:
        low, high = le(data, 0) ^ le(SECRET, 24) ^ le(SECRET, 32), le(data, n - 8) ^ le(SECRET, 40) ^ le(SECRET, 48)
        return avalanche(n + le(low.to_bytes(8, "big"), 0) + high + fold(low, high) & M64)
    if n > 3:
        h = le(data, n - 4, 4) + (le(data, 0, 4) << 32) ^ le(SECRET, 8) ^ le(SECRET, 16)
        h ^= (h << 49 | h >> 15) & M64 ^ (h << 24 | h >> 40) & M64
        h = h * 0x9FB21C651E98DF25 & M64
        return avalanche(h ^ (h >> 35) + n, 64, 0x9FB21C651E98DF25, 28)
    h = le(SECRET, 56) ^ le(SECRET, 64)
    if n:
        h = le(SECRET, 0, 4) ^ le(SECRET, 4, 4) ^ (data[0] << 16 | data[n >> 1] << 24 | data[n - 1] | n << 8)
    return avalanche(avalanche(h, 33, XP64[1], 29), 64, XP64[2], 32)


class Xxh3:
    """The hash of more than 240 bytes, that come in pieces."""

    def __init__(self):
        self.lanes = np.array([XP32[2], *XP64[:4], XP32[1], XP64[4], XP32[0]], "<u8")
        self.length, self.rest, self.tail = 0, b"", b""

    @staticmethod
    def stripes(data, keys):
        """What stripes of eight lanes add."""
        keyed = data ^ keys
        product = (keyed & np.uint64(M32)) * (keyed >> np.uint64(32))
        return (product + data[..., [1, 0, 3, 2, 5, 4, 7, 6]]).sum(axis=-2, dtype="<u8")

    def update(self, data):
        self.length += len(data)
        data = self.rest + bytes(data)
        blocks = max(len(data) - 1, 0) // 1024  # the last block stays in the rest, even a whole one
        if blocks:
            last, prime = np.frombuffer(SECRET, "<u8", 8, 128), np.uint64(XP32[0])
            for one in self.stripes(np.frombuffer(data, "<u8", blocks * 128).reshape(blocks, 16, 8), KEYS):
                lanes = self.lanes + one
                self.lanes = (lanes ^ lanes >> np.uint64(47) ^ last) * prime
            self.tail = data[blocks * 1024 - 64:blocks * 1024]
        self.rest = data[blocks * 1024:]
        return self

    def digest(self):
        """The hash of 128 bits; its lower half is the one of 64."""
        whole, out = (len(self.rest) - 1) // 64, 0
        lanes = self.lanes + self.stripes(np.frombuffer(self.rest, "<u8", whole * 8).reshape(whole, 8), KEYS[:whole])
        final = np.frombuffer((self.tail + self.rest)[-64:], "<u8").reshape(1, 8)
        lanes = (lanes + self.stripes(final, np.frombuffer(SECRET, "<u8", 8, 121))).tolist()
        for half, at, h in ((0, 11, self.length * XP64[0]), (64, 117, ~(self.length * XP64[1]))):
            h += sum(fold(lanes[i] ^ le(SECRET, at + 8 * i), lanes[i + 1] ^ le(SECRET, at + 8 * i + 8))
                     for i in range(0, 8, 2))
            out |= avalanche(h & M64) << half
        return out


# --- Types and records


class Cursor:
    """Takes fields from bytes, one after the other."""

    def __init__(self, data, at=0):
        self.data, self.at = data, at

    def take(self, size):
        need(0 <= size <= len(self.data) - self.at, "it ends in the middle of a field")
        self.at += size
        return self.data[self.at - size:self.at]

    def rest(self):
        return self.take(len(self.data) - self.at)

    def end(self):
        need(self.at == len(self.data), "bytes are left over behind the last field")

    def number(self, size):
        return int.from_bytes(self.take(size), "little")

    def varint(self, most=M64):
        value = 0
        for shift in range(0, 7 + most.bit_length(), 7):
            byte = self.number(1)
            value |= (byte & 127) << shift
            if byte < 128:
                break
        need(byte < 128 and value <= most, "a number is too large")
        return value

    def zigzag(self):
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def sized(self):
        return self.take(self.varint())

    def array(self, kind, count):
        return np.frombuffer(self.take(count * np.dtype(kind).itemsize), kind)


def record(data, magic):
    """The fields of a record, behind its magic and format."""
    need(data[:8] == magic, "it does not begin with " + magic.decode())
    need(len(data) > 20 and xxh3_64(data[:-8]) == le(data, len(data) - 8), "the checksum of its record is wrong")
    fields = Cursor(data[:-8], 8)
    version = fields.number(4)
    need(version == FORMAT, f"its format is {version}, and this program reads format {FORMAT}")
    return fields


def unzstd(frame, length, prefix=None):
    """One zstd frame of exactly `length` bytes."""
    try:
        need(length and zstandard.frame_content_size(frame) in (-1, length), "a zstd frame has another length")
        prefix = prefix and zstandard.ZstdCompressionDict(prefix, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        reader = zstandard.ZstdDecompressor(dict_data=prefix)
        data = reader.decompress(frame, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Damage(f"zstd: {error}") from None
    need(len(data) == length, "a zstd frame has another length")
    return data


def unpack(data, count, width):
    """`count` numbers of `width` bits, from the lowest bit of each byte on."""
    need(len(data) == (count * width + 7) // 8, "packed bits have another length")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:count * width]
    return bits.reshape(count, width) @ (1 << np.arange(width, dtype=np.int64))


# --- Element types

SIZES = (1, 1, 1, 2, 2,  # U8, I8, BOOL, I16, U16
         4, 4, 8, 8, 2,  # I32, U32, I64, U64, F16
         2, 4, 8, 1, 1,  # BF16, F32, F64, F8_E4M3, F8_E5M2
         8, 16)  # C64, C128
U16, F16, BF16, F32, F64, COMPLEX = 4, 9, 10, 11, 12, 15  # the first of two complex types
NUMPY = {F16: "<f2", F32: "<f4", F64: "<f8"}
# Of types with lossy codings: smallest positive value (of F64: smallest normal), and largest finite one.
RANGES = {F16: (2.0**-24, 65504.0), BF16: (2.0**-133, (2 - 2.0**-7) * 2.0**127),
          F32: (2.0**-149, (2 - 2.0**-23) * 2.0**127), F64: (2.0**-1022, sys.float_info.max)}


def widen(raw, kind):
    """Elements as f64."""
    if kind == BF16:
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").astype("<f8")
    return np.frombuffer(raw, NUMPY[kind]).astype("<f8")


def narrow(values, kind):
    """fl: rounds f64 once to the element type. Returns bytes."""
    with np.errstate(all="ignore"):
        if kind != BF16:
            return values.astype(NUMPY[kind]).tobytes()
        # First to f32 toward zero, with the last bit set if anything was lost: so the second rounding is right.
        near = values.astype("<f4")
        bits = near.view("<u4").copy()
        bits[np.abs(near.astype("<f8")) > np.abs(values)] -= 1
        bits |= bits.view("<f4").astype("<f8") != values
        rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
        return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype("<u2").tobytes()


# --- Payloads: symbols and integers


def huffman_table(lengths, longest):
    """By the next `longest` bits: word << 4 | length of its code."""
    used = sorted((length, word) for word, length in enumerate(lengths) if length)
    need(sum(2.0**-length for length, _ in used) == 1, "a Huffman code is not complete")
    table, code, last = [0] * (1 << longest), 0, 0
    for length, word in used:
        code, last = code << length - last, length
        first = int(f"{code:0{length}b}"[::-1], 2)  # the most significant bit of a code comes first
        table[first::1 << length] = [word << 4 | length] * (1 << longest - length)
        code += 1
    return table


def huffman_words(data, count, table):
    """`count` words of one stream, and the number of bits that they take."""
    mask, words, bits, have, at = len(table) - 1, [], 0, 0, 0
    for _ in range(count):
        if have < 11:
            bits |= le(data, at, 16) << have
            at, have = at + 16, have + 128
        entry = table[bits & mask]
        words.append(entry >> 4)
        bits >>= entry & 15
        have -= entry & 15
    return words, 8 * at - have


def huffman(data, count):
    """A Huffman body of `count` words."""
    body = Cursor(data)
    first, last = body.number(1), body.number(1)
    present = last - first + 1
    if present <= 16:
        lengths = unpack(body.take((present + 1) // 2), present, 4).tolist()
    else:  # first the code of the lengths, 36 bits, then the lengths
        bits = le(data, 2, 400)
        table = huffman_table([bits >> 3 * i & 7 for i in range(12)], 7)
        lengths, taken = huffman_words((bits >> 36).to_bytes(400, "little"), present, table)
        body.take((36 + taken + 7) // 8)
    table = huffman_table([0] * first + lengths, 11)
    sizes = [body.number(4) for _ in range(3)] if count >= 2048 else []
    each, words = -(-count // (len(sizes) + 1)), []
    for stream in [body.take(size) for size in sizes] + [body.rest()]:
        some, taken = huffman_words(stream, min(each, count - len(words)), table)
        need(len(stream) == (taken + 7) // 8, "a Huffman stream has another length")
        words += some
    return np.array(words, np.int64)


def symbols(data, n):
    """`bytes`: n byte symbols, as i64."""
    if n == 0:
        need(not data, "symbols where there are none")
        return np.zeros(0, np.int64)
    body = Cursor(data)
    mode = body.number(1)
    if mode == 0:
        out = body.array("u1", n)
    elif mode == 1:
        out = np.full(n, body.number(1))
    elif mode == 2:
        out = huffman(body.rest(), n)
    elif mode == 3:  # blocks of k digits
        first, m, k = body.number(1), body.number(1), body.number(1)
        m, escape = m & 127, m > 127
        need(m >= 2 and 2 <= k <= 8 and m**k <= 256, "blocks of a size that is not allowed")
        words = huffman(body.sized(), -(-n // k))
        digits = np.stack([words // m**i % m for i in range(k)], axis=1).reshape(-1)[:n]
        out = digits + first & 255
        if escape:
            places = digits == m - 1
            out[places] = symbols(body.rest(), int(places.sum()))
    else:  # runs of a common symbol; a literal behind each but the longest
        need(mode == 4, "symbols in a mode that is not known")
        common = body.number(1)
        count = body.varint(n)
        gaps = symbols(body.sized(), count)
        literal = gaps < 240
        lengths = np.where(literal, gaps + 1, 240 << np.maximum(gaps - 240, 0))
        places = (np.cumsum(lengths) - 1)[literal]
        need(int(lengths.sum()) <= n, "runs of symbols are too long")
        out = np.full(n, common)
        out[places] = symbols(body.rest(), len(places))
    body.end()
    return out.astype(np.int64)


def ints(data, n, halved=True):
    """`ints`: n values of 32 bits with sign, as i64."""
    body = Cursor(data)
    classes = body.sized()
    if n and not classes and halved:
        width, units = body.number(1), -(-n // 512)
        words = body.array("<u4", 16 * width * units).reshape(units, width, 16)  # unit, word, lane
        bits = np.unpackbits(words.transpose(0, 2, 1).reshape(-1).view("u1"), bitorder="little")
        low = bits.reshape(units, 16, 32, width) @ (1 << np.arange(width, dtype=np.int64))  # unit, lane, place in it
        return (ints(body.rest(), n, False) << width) + low.transpose(0, 2, 1).reshape(-1)[:n]
    classes = symbols(classes, n)
    j = np.maximum(classes - 31, 0)
    extra = np.where(classes > 30, j // 8 + 2, 0)
    start = np.cumsum(extra) - extra
    packed = body.rest()
    need(len(packed) == (int(extra.sum()) + 7) // 8, "the extra bits of integers have another length")
    window, x = np.frombuffer(packed + bytes(8), "u1").astype(np.int64), np.zeros(n, np.int64)
    for i in range(5):  # five bytes have all bits of a value: at most 7 before it, and its 30
        x |= window[(start >> 3) + i] << 8 * i
    magnitude = (4 + j // 2 % 4 << extra) + (x >> (start & 7) & (1 << extra) - 1)
    return np.where(classes > 30, np.where(j & 1, -magnitude, magnitude), classes - 15)


# --- Payloads: tiles


# A decoded tile: its bytes, and the values that differences to it need. A lattice has k (f64) and a (i64), a
# logarithmic tile q (i64), a published system levels (i64).
Tile = namedtuple("Tile", "raw k a q levels", defaults=(None,) * 4)
ZERO = 1 << 40  # stands for the q of a zero


def order(words, floats):
    top = words.dtype.type(1 << 8 * words.itemsize - 1)
    return np.where(words & top, ~words, words | top) if floats else words


def disorder(words, floats):
    """The x of an order(x)."""
    top = words.dtype.type(1 << 8 * words.itemsize - 1)
    return np.where(words & top, words ^ top, ~words) if floats else words


def lossless(data, length, kind, parent):
    """A lossless tile of `length` bytes; `parent` is the parent's decoded tile, or None."""
    if not length:
        need(not data, "bytes where there are none")
        return b""
    body = Cursor(data)
    mode = body.number(1)
    size, floats = SIZES[kind], kind >= F16
    if length % size:
        size, floats = 1, False
    elif kind >= COMPLEX:
        size //= 2
    unsigned = np.dtype(f"<u{size}")
    if mode in (1, 2, 4):
        need(parent is not None and len(parent) == length, "it needs a parent's tile of its length")
        before = np.frombuffer(parent, unsigned)
    if mode in (0, 1):
        planes = [symbols(body.sized(), length // size) for _ in range(size)]
        words = np.stack(planes, axis=1).astype("u1").reshape(-1).view(unsigned)
        one = unsigned.type(1)
        if mode == 1:
            words = disorder(order(before, floats) + (words >> one ^ ~(words & one) + one), floats)
        elif floats:
            words = words >> one | words << unsigned.type(8 * size - 1)
    elif mode == 2:
        shift, most = {F16: (10, 31), BF16: (7, 255), F32: (23, 255)}[kind]
        section = np.clip(body.number(1) - (before >> shift & most).astype(np.int64), 0, 15)
        difference = np.zeros(len(before), np.int64)
        for i in range(16):
            places, part = np.flatnonzero(section == i), body.sized()
            if len(places):
                difference[places] = ints(part, len(places))
        difference = np.where(before >> 8 * size - 1, -difference, difference).astype(unsigned)
        words = disorder(order(before, True) + difference, True)
    else:
        need(mode in (3, 4) and size == 1, "a lossless tile in a mode that is not known")
        return unzstd(body.rest(), length, parent if mode == 4 else None)
    body.end()
    return words.astype(unsigned).tobytes()


def exceptions(body, raw, size):
    """A lossy tile's elements that are replaced."""
    count, place = body.varint(len(raw) // size), -1
    need(not count or body.number(1) == size, "exceptions of another width")
    raw = bytearray(raw)
    for _ in range(count):
        place += 1 + body.varint(TILE)
        need(place < len(raw) // size, "an exception behind the tile's end")
        raw[place * size:place * size + size] = body.take(size)
    body.end()
    return bytes(raw)


def lattice(body, tensor, start, length, parent, before):
    """A lattice tile (coding 1) or a tile by rows (2). `before` is the parent's tensor."""
    n, ratio, a = length // SIZES[tensor.kind], 1.0, np.zeros(length // SIZES[tensor.kind], np.int64)
    if parent is None:
        inner = body.sized()
        k = widen(lossless(inner, length, tensor.kind, None), tensor.kind) if inner else np.zeros(n)
    elif parent.a is None:
        k = widen(parent.raw, tensor.kind)
    else:
        k, a, ratio = parent.k, parent.a, before.step / tensor.step
    if tensor.way == 2 and ratio != 1.0:
        ratio = 2.0 ** (math.frexp(ratio * math.sqrt(2.0))[1] - 1)
    a = np.rint(a * ratio).astype(np.int64)
    if tensor.way == 1:
        a = a + ints(body.sized(), n)
    else:
        row = (start + np.arange(n)) // tensor.width
        code = symbols(body.sized(), int(row[-1] - row[0]) + 1)[row - row[0]]
        coded = np.flatnonzero(code)
        e = code[coded] - 1
        a[coded] = ((a[coded] + (1 << e >> 1) >> e) + ints(body.sized(), len(coded))) << e
    need(int(np.abs(a).max()) <= 1 << 30, "an A is too large")
    raw = narrow(k + tensor.step * a, tensor.kind)
    return Tile(exceptions(body, raw, SIZES[tensor.kind]), k, a)


def factor_values(given, kind, shift):
    """The factors of all rows or columns, and which are flagged."""
    flagged = (given == 0) & (kind > 1)
    if kind > 1:
        given = given - (given > 0)
    if kind & 1:
        given = np.cumsum(given)
    return np.where(flagged, 0, given << shift), flagged


def factors_of(data, rows, columns):
    """The prediction of one tensor: base, and the factors of rows and columns."""
    body = Cursor(data)
    head, base = body.number(1), body.varint(32767)
    some = ints(body.sized(), rows) if head else np.zeros(rows, np.int64)
    others = ints(body.rest(), columns) if head else np.zeros(columns, np.int64)
    body.end()
    shift = head >> 1 & 3
    return base, factor_values(some, head >> 3 & 3, shift), factor_values(others, head >> 5 & 3, shift)


def predict(factors, start, n, width):
    """P of n elements, and which of them have a flagged factor."""
    base, (rows, no_rows), (columns, no_columns) = factors
    row, column = np.divmod(start + np.arange(n), width)
    return 4096 * np.clip(base + rows[row] + columns[column], 0, 32767), no_rows[row] | no_columns[column]


def inverse(l, kind):
    """The values of pseudo-logarithms, which are the upper 28 bits of an f64."""
    low, high = (np.array([x]).view("<i8")[0] >> 36 for x in RANGES[kind])
    return (np.clip(l, low, high) << 36).view("<f8")


def logarithmic(body, tensor, start, length, parent, factors):
    p, flagged = predict(factors, start, length // SIZES[tensor.kind], tensor.width)
    need(parent is None or parent.q is not None, "the parent is not logarithmic")
    before = np.where(flagged, ZERO, 0) if parent is None else parent.q
    s = ints(body.rest(), len(p))
    q = np.where(before != ZERO, np.where(s == 15, ZERO, before + s - (s > 15)), np.where(s == 0, ZERO, s - (s > 0)))
    values = inverse(p + tensor.unit * np.where(q == ZERO, 0, q), tensor.kind)
    return Tile(narrow(np.where(q == ZERO, 0.0, values), tensor.kind), q=q)


def moment(body, tensor, start, length, companion, factors):
    """First moments: codings 4 to 8. `companion` has the decoded elements beside."""
    n, kind = length // SIZES[tensor.kind], tensor.kind
    if tensor.way > 6:
        d = widen(narrow(inverse(predict(factors, start, n, tensor.width)[0], kind), kind), kind)
    else:
        d = widen(companion, kind)
        need(bool((np.isfinite(d) & (d >= 0)).all()), "a companion is negative or not finite")
        if tensor.way != 5:
            d = np.sqrt(d if kind == F64 else d.astype("<f4")).astype("<f8")
    values = tensor.step * ints(body.sized(), n) * d
    least, most = RANGES[kind]
    if tensor.way == 8:
        values = np.where((values != 0) & (np.abs(values) < least), np.copysign(least, values), values)
    return Tile(exceptions(body, narrow(np.clip(values, -most, most), kind), SIZES[kind]))


# --- Payloads: published systems (coding 10)


def exact_values(body, count):
    kind = (F32, BF16, F16)[body.number(1)]
    return widen(body.take(count * SIZES[kind]), kind)


def runs(body, n):
    """The places of elements in runs."""
    at, places = 0, [np.zeros(0, np.int64)]
    for _ in range(body.varint(n)):
        at += body.varint(n)
        size = body.varint(n - min(at, n))
        places.append(np.arange(at, at + size))
        at += size
    return np.concatenate(places)


def clamped32(values):
    """f64 to f32, clamped to the finite ones."""
    return np.clip(values, -RANGES[F32][1], RANGES[F32][1]).astype("<f4").astype("<f8")


def levels_of(body, n, before):
    mode, cycle = body.number(1), body.number(1) + 1
    mode, differences = mode & 127, mode > 127
    need(not differences or before is not None, "the parent has no levels")
    out, groups = np.zeros(n, np.int64), [np.arange(n)]
    if mode == 2 and differences:
        groups = [np.flatnonzero(before == level) for level in np.unique(before)]
    for group in groups:
        count = body.varint(len(group))
        d = given = symbols(body.sized(), count)
        if mode:
            d, long = [], given == cycle + 14
            long = iter(ints(body.sized(), int(long.sum())).tolist() if long.any() else [])
            for symbol in given.tolist():
                if symbol >= cycle:  # in all so often
                    times = next(long) if symbol == cycle + 14 else symbol - cycle + 2
                    need(d and times <= n - len(d) + 1, "a run of levels is too long")
                    d += d[-1:] * (times - 1)
                else:
                    d.append(symbol)
        out[group] = d
    return (before + out) % cycle if differences else out


def published(body, tensor, length, parent):
    n, system, levels = length // SIZES[tensor.kind], body.number(1), None
    value = np.zeros(n) if parent is None else widen(parent.raw, tensor.kind).astype("<f4").astype("<f8")
    before = parent and parent.levels
    if system == 0:
        raw = lossless(body.sized(), length, tensor.kind, parent and parent.raw)
        rest = body.rest()
        levels = np.frombuffer(lossless(rest, 2 * n, U16, None), "<u2").astype(np.int64) if rest else None
        return Tile(raw, levels=levels)
    if system in (1, 2):  # LC-Checkpoint
        k = body.varint(511)
        table = np.concatenate([np.zeros(1, "<f4"), body.array("<f4", k)])
        high = symbols(body.sized(), n) if k > 255 else 0
        index = symbols(body.rest(), n) + 256 * high
        value = np.where(index, (value.astype("<f4") + table[index]).astype("<f8"), value)
    elif system in (3, 4):  # SCAR
        places = runs(body, n)
        value[places] = exact_values(body, len(places))
    elif system == 5:  # TOPN
        width, column = body.varint(M32), body.varint(M32)
        counts = body.array("<u4", -(-(column + n) // width)).astype(np.int64)
        columns = body.array("<u4", int(counts.sum())).astype(np.int64)
        places = np.repeat(np.arange(len(counts)), counts) * width + columns - column
        value[places] = exact_values(body, len(places))
    elif system in range(10, 15):  # Check-N-Run
        head, width, first = body.number(1), body.varint(1 << 48), body.varint(1 << 48)
        need(1 <= first <= width, "rows of a width that is not allowed")
        bits, row = head & 15, (np.arange(n) - first + width) // width
        present = symbols(body.sized(), int(row[-1]) + 1) if head & 128 else np.ones(int(row[-1]) + 1, np.int64)
        some = int(present.sum())
        zero = body.array("<f4", some).astype("<f8")
        if head & 16:
            scale, zero = (2 * zero / (2**bits - 1)).astype("<f4").astype("<f8"), -zero
        else:
            scale = body.array("<f4", some).astype("<f8")
        places = np.flatnonzero(present[row])
        number = (np.cumsum(present) - 1)[row][places]
        value[places] = clamped32(zero[number] + scale[number] * unpack(body.rest(), len(places), bits))
    elif system in (20, 21):  # Inshrinkerator
        table = np.concatenate([np.zeros(2), body.array("<f4", body.number(1) - 2).astype("<f8")])
        levels = levels_of(body, n, before)
        value = table[levels]
        value[levels == 1] = exact_values(body, int((levels == 1).sum()))
    elif system == 30:  # QD-Compressor
        body.number(1)  # bins
        zero, scale = body.array("<f4", 2).astype("<f8")
        levels = levels_of(body, n, before)
        value = clamped32(zero + scale * levels)
    elif system == 31:  # Delta-DNN
        step = body.array("<f8", 1)[0]
        value = clamped32(value + step * ints(body.rest(), n))
    elif system == 32:  # GOBO
        bits, count = body.number(1), body.number(1) + 1
        table = body.array("<f4", count).astype("<f8")
        outliers = runs(body, n)
        value[outliers] = exact_values(body, len(outliers))
        others = np.setdiff1d(np.arange(n), outliers)
        value[others] = table[unpack(body.rest(), len(others), bits)]
    else:
        raise Damage(f"published system {system} is not known")
    body.end()
    return Tile(narrow(value, tensor.kind), levels=levels)


# --- Objects


def open_plain(path):
    """Opens a file: no link, and no pipe that would wait."""
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


class Tensor:
    """A row of the index. `way` is the coding without the bit of a difference."""
    __slots__ = ("path kind role coding dimensions way shape gap length parent beside step unit start elements width "
                 "skip factors first tiles").split()


class Object:
    """An archived state of one file."""

    def __init__(self, path, name):
        self.file = open_plain(path)
        size = os.fstat(self.file.fileno()).st_size
        head = record(self.read(0, 192), b"stepfsCK")
        self.id = head.take(16).hex()
        need(self.id == name, f"it is object {self.id} under another name")
        self.parent = head.take(16).hex() if head.number(1) else None
        self.lossy, self.ordered = head.number(1), head.number(1)
        _depth, _position, self.size = head.varint(), head.varint(), head.varint()
        self.hash = head.varint((1 << 128) - 1)
        _fingerprints = head.varint(), head.varint()
        self.sha256, self.modified = head.take(32), head.zigzag()
        foot = record(self.read(size - 80, 80), b"stepfsIX")
        end, packed, unpacked, check = foot.varint(), foot.varint(1 << 28), foot.varint(1 << 28), foot.varint()
        need(foot.take(16).hex() == self.id and end + packed == size - 80, "its footer is of another object")
        data = self.read(end, packed)
        need(xxh3_64(data) == check, "the checksum of its index is wrong")
        body = Cursor(unzstd(data, unpacked))
        self.tensors_of(body)
        self.tiles_of(body, end)
        while body.at < len(body.data):
            need(body.varint() % 2 == 0, "its index has a field that a reader must know: take a newer program")
            body.sized()

    def read(self, at, size):
        data = os.pread(self.file.fileno(), size, at) if at >= 0 else b""
        need(len(data) == size, "the object's file is too short")
        return data

    def tensors_of(self, body):
        text = lambda: body.sized().decode("utf-8", "replace")
        self.origin, self.profile, _container, _note = text(), text(), text(), text()
        body.varint(), body.take(4)  # generations, error_updates
        self.tensors = tensors = [Tensor() for _ in range(body.varint(1 << 22))]

        def column(name, take, codings=None):
            for number, t in enumerate(tensors):
                setattr(t, name, take(t, number) if codings is None or t.coding & 127 in codings else None)

        column("path", lambda t, number: text())
        for name in ("kind", "role", "coding", "dimensions"):
            column(name, lambda t, number: body.number(1))
        column("way", lambda t, number: t.coding & 127)
        need(all(t.kind < len(SIZES) and t.way <= 10 for t in tensors), "a type or coding is not known")
        column("shape", lambda t, number: [body.varint() for _ in range(t.dimensions)])
        column("gap", lambda t, number: body.varint())
        column("length", lambda t, number: body.varint())
        column("parent", lambda t, number: number + body.zigzag() if t.coding > 127 else None)
        column("beside", lambda t, number: number + body.zigzag(), (4, 5, 6, 9))
        column("step", lambda t, number: struct.unpack("<d", body.take(8))[0], (1, 2, 4, 5, 6, 7, 8))
        column("unit", lambda t, number: body.varint(1 << 20), (3,))
        body.take(12 * sum(t.way > 0 for t in tensors))  # bound, error
        end = 0
        for t in tensors:
            t.start = end + t.gap
            end = t.start + t.length
            t.elements = math.prod(t.shape)
            t.width = max(math.prod(t.shape[1:]) if len(t.shape) > 1 else t.elements, 1)
            has_edges = t.elements * SIZES[t.kind] - t.length == 12288
            t.skip = 8192 // SIZES[t.kind] if has_edges else 0  # elements before the first tile
            need(end <= self.size, f"{t.path}: it ends behind the file")
            need(not t.way or t.kind in RANGES, f"{t.path}: a lossy coding of type {t.kind}")
            need(t.step is None or 0 < t.step < math.inf, f"{t.path}: its step is not positive")

    def tiles_of(self, body, end):
        self.skeleton, at = Tensor(), 0
        self.skeleton.length = self.size - sum(t.length for t in self.tensors)
        for t in self.tensors:
            t.factors = at
            at += t.way in (3, 7, 8)
        for t in self.tensors + [self.skeleton]:
            t.first, t.tiles = at, -(-t.length // TILE)
            at += t.tiles
        need(at * 14 <= len(body.data) - body.at, "more tiles than the index has room for")
        self.stored = [body.varint() for _ in range(at)]
        self.offsets, last = [], 192
        for size in self.stored:
            self.offsets.append(last + body.zigzag())
            last = self.offsets[-1] + size
            need(192 <= self.offsets[-1] and last <= end, "a payload lies outside of the object")
        self.payload_sums, self.decoded_sums = body.array("<u4", at), body.array("<u8", at)

    def payload(self, number):
        data = self.read(self.offsets[number], self.stored[number])
        need(xxh3_64(data) & M32 == int(self.payload_sums[number]), "the checksum of its payload is wrong")
        return data

    def check(self, number, decoded):
        need(xxh3_64(decoded) == int(self.decoded_sums[number]), "the checksum of its decoded bytes is wrong")
        return decoded


class Store:
    """The directory, and what was read lately."""

    def __init__(self, path):
        self.path, self.tree, self.id, self.notes = path, os.path.join(path, "tree"), None, []
        need(os.path.isdir(self.tree) or os.path.isdir(os.path.join(path, "objects")), f"{path} is no store of stepfs")
        try:
            settings = open_plain(os.path.join(path, "stepfs.toml")).read(1 << 20).decode("utf-8", "replace")
            version = re.search(r"^\s*format\s*=\s*(\d+)", settings, re.M)
            need(not version or int(version[1]) == FORMAT, f"the store has format {version and version[1]}, and this"
                 f" program reads format {FORMAT}: take the read_store.py that lies in the store")
            identity = re.search(r"^\s*store\s*=\s*[\"']([0-9a-f]{32})[\"']", settings, re.M)
            self.id = identity and identity[1]
        except OSError as error:
            self.notes.append(f"stepfs.toml: {error.strerror}")
        if self.id is None:
            self.notes.append("the store's id is unknown, so every stub counts as one of this store")
        self.objects, self.tiles, self.predictions = OrderedDict(), OrderedDict(), OrderedDict()

    @staticmethod
    def keep(cache, key, most, make):
        """A value that was made lately, or a new one."""
        if key not in cache:
            cache[key] = make()
        cache.move_to_end(key)
        if len(cache) > most:
            cache.popitem(last=False)
        return cache[key]

    def object(self, name):
        try:
            path = os.path.join(self.path, "objects", name[:2], name)
            return self.keep(self.objects, name, DEEPEST + 8, lambda: Object(path, name))
        except (Damage, OSError) as error:
            raise Damage(f"object {name}: {getattr(error, 'strerror', error)}") from None

    def tile(self, obj, number, i, above=0):
        """Tile i of a tensor, by its number. Tiles of so many objects above need it."""
        return self.keep(self.tiles, (obj.id, number, i), 16, lambda: self.decode(obj, number, i, above))

    def decode(self, obj, number, i, above):
        tensor = obj.tensors[number]
        start = tensor.skip + i * (TILE // SIZES[tensor.kind])
        length = min(TILE, tensor.length - i * TILE)
        parent = before = factors = companion = None
        if tensor.coding > 127:
            need(obj.parent is not None, "a difference in an object without a parent")
            need(above + 1 < DEEPEST, "the chain of objects is too long, or has no end")
            base = self.object(obj.parent)
            need(0 <= tensor.parent < len(base.tensors), "the parent has no such tensor")
            before = base.tensors[tensor.parent]
            need(all(getattr(before, x) == getattr(tensor, x) for x in ("path", "kind", "shape", "length")) and
                 (tensor.way != 3 or before.unit == tensor.unit), "the parent's tensor is of another kind")
            parent = self.tile(base, tensor.parent, i, above + 1)
        if tensor.beside is not None:
            companion = self.companion(obj, tensor, i, length, above)
        body = Cursor(obj.payload(tensor.first + i))
        try:
            if tensor.way in (3, 7, 8):
                factors = self.keep(self.predictions, (obj.id, number), 4, lambda: self.factors(obj, tensor))
            if tensor.way == 0:
                tile = Tile(lossless(body.data, length, tensor.kind, parent and parent.raw))
            elif tensor.way in (1, 2):
                tile = lattice(body, tensor, start, length, parent, before)
            elif tensor.way == 3:
                tile = logarithmic(body, tensor, start, length, parent, factors)
            elif tensor.way == 9:
                tile = Tile(companion)
            elif tensor.way == 10:
                tile = published(body, tensor, length, parent)
            else:
                tile = moment(body, tensor, start, length, companion, factors)
        except (LookupError, ValueError, ArithmeticError, StopIteration) as error:
            raise Damage(f"its payload makes no sense ({error})") from None
        obj.check(tensor.first + i, tile.raw)
        return tile

    def companion(self, obj, tensor, i, length, above):
        """The decoded elements beside; of a copy (coding 9) those of its original, rounded to its type."""
        need(0 <= tensor.beside < len(obj.tensors), "the object has no such companion")
        beside = obj.tensors[tensor.beside]
        size, own = SIZES[beside.kind], SIZES[tensor.kind]
        at, end, parts = i * TILE // own, (i * TILE + length) // own, []
        need(beside.kind in RANGES and beside.way != 9 and beside.length // size == tensor.length // own and
             (tensor.way == 9 or beside.kind == tensor.kind and beside.beside is None), "its companion does not fit")
        while at < end:
            tile, inside = divmod(at * size, TILE)
            raw = self.tile(obj, tensor.beside, tile, above).raw
            parts.append(widen(raw, beside.kind)[inside // size:inside // size + end - at])
            at += len(parts[-1])
        return narrow(np.concatenate(parts), tensor.kind)

    @staticmethod
    def factors(obj, tensor):
        rows = tensor.elements // tensor.width
        need(tensor.elements <= (tensor.length + 12288) // SIZES[tensor.kind], "its shape does not fit its length")
        need(rows + tensor.width <= MOST_FACTORS, "it has more rows and columns than this program can hold")
        return factors_of(obj.check(tensor.factors, obj.payload(tensor.factors)), rows, tensor.width)

    def chunk(self, obj, i):
        number = obj.skeleton.first + i
        return obj.check(number, unzstd(obj.payload(number), min(TILE, obj.skeleton.length - i * TILE)))

    def pieces(self, obj):
        """The decoded file in order. Of each piece: what it is, its length, its bytes or None, and the fault."""
        def piece(what, size, make):
            try:
                return what, size, make(), None
            except (Damage, OSError) as error:
                return what, size, None, str(error)

        def skeleton(at, end):
            while at < end:
                i, inside = divmod(at, TILE)
                size = min(end - at, TILE - inside)
                yield piece("bytes outside of tensors", size, lambda: self.keep(
                    self.tiles, (obj.id, i), 16, lambda: self.chunk(obj, i))[inside:inside + size])
                at += size

        outside = 0
        for number, t in enumerate(obj.tensors):
            yield from skeleton(outside, outside + t.gap)
            outside += t.gap
            for i in range(t.tiles):
                yield piece(t.path, min(TILE, t.length - i * TILE), lambda: self.tile(obj, number, i).raw)
        yield from skeleton(outside, obj.skeleton.length)


# --- Rows in the order of their ids: files of ElasticDL


def fields_of(data, place):
    """Fields of a protobuf message: their number, and a number or the place of their bytes."""
    body = Cursor(data, place[0])
    while body.at < place[1]:
        head = body.varint()
        need(head & 7 in (0, 2), "a field of a type that ElasticDL does not write")
        value = body.varint()
        if head & 7 == 2:
            value = body.at, body.at + value
            need(value[1] <= place[1], "a field is longer than its message")
            body.at = value[1]
        yield head >> 3, value


def table_of(data, entry):
    """A table's values and packed ids, as places. `entry` is one of the message's map of tables."""
    slices = dict(fields_of(data, dict(fields_of(data, entry))[2]))
    return dict(fields_of(data, slices[1]))[4], slices[2]


def file_order(path, out):
    """Writes a file with its rows where it has their ids. In the file `path` they are in ascending order of these."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        shutil.copyfileobj(file, out)
        for entry in [place for field, place in fields_of(data, (0, len(data))) if field == 4]:
            values, packed = table_of(data, entry)
            body, ids = Cursor(data[packed[0]:packed[1]]), []
            while body.at < len(body.data):
                ids.append(body.varint())
            row = (values[1] - values[0]) // len(ids)
            for k, place in enumerate(sorted(range(len(ids)), key=ids.__getitem__)):
                out.seek(values[0] + place * row)
                out.write(data[values[0] + k * row:values[0] + k * row + row])


# --- Commands


def printable(name):
    """A name without control characters, which could make a terminal lie."""
    return "".join(c if c.isprintable() else f"\\x{ord(c) & 255:02x}" for c in name)


def object_names(store):
    for folder, folders, names in os.walk(os.path.join(store.path, "objects")):
        folders.sort()
        yield from (x for x in sorted(names) if re.fullmatch("[0-9a-f]{32}", x) and x[:2] == os.path.basename(folder))


def object_of(store, path, info):
    """The id of the object that has a file's bytes, or None for a plain file."""
    if info.st_size < SMALLEST:
        return None
    with open_plain(path) as file:
        head = file.read(4096)
    if not any(head) and info.st_blocks <= 8:  # no more room than a stub takes
        found = []
        for name in object_names(store):
            try:
                obj = store.object(name)
                found += [name] if (obj.size, obj.modified) == (info.st_size, info.st_mtime_ns) else []
            except Damage:
                pass
        need(not found, f"a stub that became zeros, perhaps of object {', '.join(found)}")
    if head[:8] != b"stepfsST":
        return None
    try:
        if "user.stepfs.plain" in os.listxattr(path, follow_symlinks=False):
            return None  # a program wrote these bytes
    except OSError:
        pass  # a file system without extended attributes
    fields = record(head, b"stepfsST")
    owner, name = fields.take(16).hex(), fields.take(16).hex()
    if store.id not in (None, owner):
        return None  # another store's stub is an ordinary file
    need(fields.varint() == info.st_size, "the stub has another length than its file")
    return name


def decode(store, obj, out=None):
    """Decodes an object, also to a file if there is one. Returns a line for each missing part."""
    missing, whole, sha, at = [], Xxh3(), hashlib.sha256(), 0  # of a missing part: what, fault, first byte, end
    for what, size, raw, fault in store.pieces(obj):
        if fault:
            if missing and missing[-1][:2] == [what, fault] and missing[-1][3] == at:
                missing[-1][3] += size
            else:
                missing.append([what, fault, at, at + size])
            raw = bytes(size)
        if not missing:
            whole.update(raw)
            sha.update(raw)
        if out:
            out.write(raw)
        at += size
    if missing:
        return [f"bytes {start} to {end - 1}, {printable(x)}: {printable(fault)}" for x, fault, start, end in missing]
    if whole.digest() != obj.hash:
        return ["the checksum of the whole file is wrong"]
    if not (obj.lossy or obj.ordered) and sha.digest() != obj.sha256:
        return ["it is called exact, but has another SHA-256 than the written file"]
    return []


def survey(store, deep):
    """`ls`, and if `deep`, `verify`. Returns the number of faults."""
    users, faults, sound = {}, 0, 0
    for folder, folders, names in os.walk(store.tree, onerror=lambda error: store.notes.append(str(error))):
        folders.sort()
        for full in (os.path.join(folder, name) for name in sorted(names)):
            path, info, what = printable(os.path.relpath(full, store.tree)), os.lstat(full), "plain"
            if not stat.S_ISREG(info.st_mode):
                continue
            try:
                name = object_of(store, full, info)
                if name is not None:
                    obj = store.object(name)
                    users.setdefault(name, []).append(path)
                    need(obj.size == info.st_size, f"object {name} is of a file of another length")
                    what = f"{'lossy' if obj.lossy else 'exact'}, profile {printable(obj.profile)}, object {name}"
            except (Damage, OSError) as error:
                what, faults = f"DAMAGED: {error}", faults + 1
            if what.startswith("DAMAGED") or not deep:
                print(f"{info.st_size:>15}  {path}  {what}")
    for name in object_names(store):
        try:
            obj = store.object(name)
            lines = decode(store, obj) if deep else []
            if not deep and name not in users:
                print(f"{obj.size:>15}  (no name)  object {name} of {printable(obj.origin)}")
        except Damage as error:
            lines = [str(error)]
        sound += not lines
        faults += len(lines)
        for line in lines:
            print(f"object {name} ({', '.join(users.get(name, ['no name']))}): {line}")
    if deep:
        print(f"{sound} objects are sound, {sum(map(len, users.values()))} names are of objects, {faults} faults")
    return faults


def get(store, path, out):
    name, full = path if re.fullmatch("[0-9a-f]{32}", path) else None, os.path.join(store.tree, path)
    if name is None:
        inside = os.path.realpath(os.path.dirname(full)) + "/"
        need(inside.startswith(os.path.realpath(store.tree) + "/"), f"{path} is not a path inside of {store.tree}")
        info = os.lstat(full)
        need(stat.S_ISREG(info.st_mode), f"{printable(path)} is no regular file")
        name = object_of(store, full, info)
    obj = name and store.object(name)
    need(obj is None or path == name or obj.size == info.st_size, "its object is of a file of another length")
    with open(out, "xb") as file:
        if name is None:
            with open_plain(full) as source:
                shutil.copyfileobj(source, file, 1 << 20)
            return 0
        if not obj.ordered:
            lines = decode(store, obj, file)
        else:
            with tempfile.NamedTemporaryFile(dir=os.path.dirname(os.path.abspath(out))) as ordered:
                lines = decode(store, obj, ordered)
                ordered.flush()
                try:
                    file_order(ordered.name, file)
                except (Damage, LookupError, ValueError, ArithmeticError, TypeError) as error:
                    lines.append(f"the order of its tables' rows; they are in the order of their ids ({error})")
    for line in lines:
        print(f"missing: {line}", file=sys.stderr)
    if lines:
        print(f"{printable(out)} has zeros in place of missing bytes", file=sys.stderr)
    return len(lines)


def main(arguments):
    np.seterr(all="ignore")  # wrong values have a wrong checksum
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    if len(arguments) not in (2, 4) or arguments[1:] not in (["ls"], ["verify"], ["get", *arguments[2:]]):
        print(__doc__, end="", file=sys.stderr)
        return 2
    try:
        store = Store(arguments[0])
        faults = get(store, *arguments[2:]) if arguments[2:] else survey(store, arguments[1] == "verify")
    except (Damage, OSError, MemoryError) as error:
        print(f"read_store.py: {error}", file=sys.stderr)
        return 2
    for note in store.notes:
        print(f"note: {note}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
