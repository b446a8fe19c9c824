"""Writes a file in one way after another, while other processes read it all the time. After each write that is finished, every
way to read must give the new bytes. As xfstests' generic/451, for all pairs.

    mixed_io.py FILE ROUNDS      prints a line for each way to write; exits with 1 if a read gave former bytes
"""

import ctypes
import mmap
import os
import platform
import sys

SIZE = 640 * 1024
PIECE = 16 * 1024
READERS = 3
# io_setup, io_submit, io_getevents
CALLS = {"x86_64": (206, 209, 208), "aarch64": (0, 2, 4)}[platform.machine()]

libc = ctypes.CDLL(None, use_errno=True)


class Iocb(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("key", ctypes.c_uint32), ("rw_flags", ctypes.c_int32), ("opcode", ctypes.c_uint16),
                ("prio", ctypes.c_int16), ("fd", ctypes.c_uint32), ("buf", ctypes.c_uint64), ("nbytes", ctypes.c_uint64),
                ("offset", ctypes.c_int64), ("reserved", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("resfd", ctypes.c_uint32)]


class Event(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("obj", ctypes.c_uint64), ("res", ctypes.c_int64), ("res2", ctypes.c_int64)]


def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


class Aio:
    """Writes asynchronously, and returns when all is written."""

    def __init__(self):
        self.context = ctypes.c_ulong(0)
        call(CALLS[0], ctypes.c_long(8), ctypes.byref(self.context))

    def write(self, fd, buffer):
        at = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        request = Iocb(opcode=1, fd=fd, buf=at, nbytes=SIZE)
        call(CALLS[1], self.context, ctypes.c_long(1), ctypes.byref(ctypes.pointer(request)))
        event = Event()
        assert call(CALLS[2], self.context, ctypes.c_long(1), ctypes.c_long(1), ctypes.byref(event), None) == 1
        assert event.res == SIZE, event.res


def filled(byte):
    # A mapping is aligned as O_DIRECT wants it.
    buffer = mmap.mmap(-1, SIZE)
    buffer[:] = bytes([byte]) * SIZE
    return buffer


def all_written(count):
    assert count == SIZE, count


def writers(path):
    """Each way to write, with a function of the bytes and its way to close."""
    aio = Aio()

    def by_descriptor(flags, write):
        fd = os.open(path, flags)
        return lambda buffer: write(fd, buffer), lambda: os.close(fd)

    def whole(fd, buffer):
        all_written(os.pwrite(fd, buffer, 0))

    def mapped():
        fd = os.open(path, os.O_RDWR)
        mapping = mmap.mmap(fd, SIZE)
        os.close(fd)
        return lambda buffer: mapping.__setitem__(slice(None), buffer[:]), mapping.close

    def copied():
        fd, other = os.open(path, os.O_RDWR), os.open(path + ".other", os.O_RDWR | os.O_CREAT)

        def copy(buffer):
            all_written(os.pwrite(other, buffer, 0))
            done = 0
            while done < SIZE:
                done += os.copy_file_range(other, fd, SIZE - done, done, done)

        return copy, lambda: (os.close(fd), os.close(other))

    yield "asynchronous O_DIRECT", by_descriptor(os.O_RDWR | os.O_DIRECT, aio.write)
    yield "asynchronous O_DIRECT, write-only", by_descriptor(os.O_WRONLY | os.O_DIRECT, aio.write)
    yield "O_DIRECT", by_descriptor(os.O_RDWR | os.O_DIRECT, whole)
    yield "O_DIRECT, write-only", by_descriptor(os.O_WRONLY | os.O_DIRECT, whole)
    yield "buffered", by_descriptor(os.O_RDWR, whole)
    yield "buffered, write-only", by_descriptor(os.O_WRONLY, whole)
    yield "asynchronous buffered, write-only", by_descriptor(os.O_WRONLY, aio.write)
    yield "mapped", mapped()
    yield "copy_file_range", copied()


def keep_reading(path, number):
    """A process that reads all of the file in pieces until it is killed. Each begins elsewhere."""
    child = os.fork()
    if child == 0:
        fd = os.open(path, os.O_RDONLY)
        offset = SIZE // READERS * number
        while True:
            os.pread(fd, PIECE, offset)
            offset = (offset + PIECE) % SIZE
    return child


def main(path, rounds):
    with open(path, "wb") as file:
        file.write(bytes(SIZE))
    children = [keep_reading(path, number) for number in range(READERS)]
    stale, byte = 0, 0
    try:
        fd, direct = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY | os.O_DIRECT)
        mapping, aligned = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ), mmap.mmap(-1, SIZE)

        def directly():
            all_written(os.preadv(direct, [aligned], 0))
            return aligned[:]

        readers = {"buffered": lambda: os.pread(fd, SIZE, 0), "mapped": lambda: mapping[:], "O_DIRECT": directly}
        for name, (write, close) in writers(path):
            wrong = dict.fromkeys(readers, 0)
            # In these a former byte is seldom seen.
            for _ in range(rounds * (10 if "asynchronous O_DIRECT" in name or name == "buffered" else 1)):
                byte = byte % 255 + 1
                buffer = filled(byte)
                write(buffer)
                for reader, read in readers.items():
                    wrong[reader] += read() != buffer[:]
            close()
            stale += sum(wrong.values())
            said = ", ".join(f"{count} former bytes, {reader}" for reader, count in wrong.items() if count)
            print(f"{name}: {said or 'ok'}", flush=True)
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
