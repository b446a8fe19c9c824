#!/usr/bin/env python3
"""Random histories over the daemons of one shared store.

    shared_histories.py [--seed N] [--count N] [--seconds N] [--log FILE]

Workers save, overwrite in place, append, cut, rename (directories, too), remove, link and read files, each call through the mount of a
random daemon. Meanwhile daemons are killed, suspended, and suspended beyond the election of another keeper; in guests (`guests.sh
nfs python scripts/shared_histories.py`) networks are also cut, and whole machines suspended, for as long as their locks last and longer. Each worker owns a
directory, and a model of it: after each call that has returned, every mount must show it. Files of other workers must be
whole states that existed. At the end all mounts show the same bytes, and `stepfs verify` finds nothing.

The file of --log has a line for each history. A run goes on after the last one there. Exit code 1: a promise was broken.
"""

import argparse
import errno
import json
import os
import random
import signal
import struct
import sys
import threading
import time
import traceback
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/real/support"))
import harness  # noqa: E402
from guests import in_guests  # noqa: E402
from nodes import Nodes, verify  # noqa: E402

BLOCK = 4096
# Above the size of files that are released.
BLOCKS = range(17, 40)
WORKERS = 4
# Errors of calls whose daemon is killed.
GONE = (errno.ECONNABORTED, errno.ENOTCONN, errno.EIO, errno.ESHUTDOWN)
# And those of open files on a machine that was away for so long that it lost its locks. NFS tries a creation anew that it began before:
# EEXIST. A call that waits for such a machine ends with EBUSY after half a minute.
LOST = (errno.ESTALE, errno.EBADF, errno.EEXIST, errno.EBUSY)
# Machines that lost their locks in this history.
without_locks = []
# NFS keeps a removed file under such a name while the node has it open.
REMOVED = ".nfs"


def is_gone(error):
    return error.errno in GONE + (LOST if without_locks else ())


class Broken(Exception):
    """A promise of docs/MACHINES.md does not hold."""


def block(owner, file, version, index):
    head = struct.pack("<4sIIII", b"BLOK", owner, file, version, index)
    body = head + bytes([(version * 7 + index) % 251]) * (BLOCK - len(head) - 4)
    return body + struct.pack("<I", zlib.crc32(body))


def parse(data, owner=None):
    """The versions of the blocks; None if these are no bytes that a worker wrote."""
    if len(data) % BLOCK:
        return None
    found, files = [], set()
    for at in range(0, len(data), BLOCK):
        body, check = data[at:at + BLOCK - 4], data[at + BLOCK - 4:at + BLOCK]
        magic, who, file, version, index = struct.unpack("<4sIIII", body[:20])
        if magic != b"BLOK" or struct.pack("<I", zlib.crc32(body)) != check or index * BLOCK != at or owner not in (None, who):
            return None
        files.add(file)
        found.append(version)
    return (found, files.pop() if files else None) if len(files) < 2 else None


def names_in(directory):
    return {path.name for path in directory.iterdir() if not path.name.startswith(REMOVED)}


class File:
    def __init__(self, number, versions):
        self.number, self.versions, self.mode = number, versions, 0o644


class Worker(threading.Thread):
    """Owns a directory. Its names and bytes are `files`: paths below the directory, of files that several paths may share."""

    def __init__(self, number, seed, nodes, until):
        super().__init__(daemon=True)
        self.number, self.r, self.nodes, self.until = number, random.Random(seed * 100 + number), nodes, until
        self.files, self.directories, self.next, self.version, self.counts, self.error = {}, {"run0"}, 0, 0, {}, None

    def at(self, path="", node=None):
        node = node or self.r.choice(self.nodes)
        if node.pid is None:
            # Its mount is about to be made again; until then there is an empty directory.
            raise OSError(errno.ENOTCONN, "the daemon was killed")
        return node.dir / f"w{self.number}" / path

    def new_name(self):
        self.next += 1
        return f"{self.r.choice(sorted(self.directories))}/step_{self.next:05d}.bin"

    def fresh(self):
        self.version += 1
        return self.version

    def bytes_of(self, file):
        return b"".join(block(self.number, file.number, version, index) for index, version in enumerate(file.versions))

    def again(self, call):
        """Repeats a call that changes nothing while its daemon is gone."""
        end = time.monotonic() + 90
        while True:
            try:
                return call()
            except OSError as error:
                if not is_gone(error) or time.monotonic() > end:
                    raise
                time.sleep(.05)

    # --- checks

    def check(self, path, node=None):
        file = self.files[path]
        data = self.again(lambda: self.at(path, node).read_bytes())
        if data != self.bytes_of(file):
            seen = parse(data)
            raise Broken(f"w{self.number}/{path}: {len(data)} bytes, versions {seen and seen[0]}, not {file.versions}")

    def check_names(self, node=None):
        def names():
            top = self.at("", node)
            found = set()
            directories = names_in(top)
            for directory in directories:
                found |= {f"{directory}/{name}" for name in names_in(top / directory)}
            return directories, found

        directories, found = self.again(names)
        found = {name for name in found if not name.endswith(".tmp")}
        if directories != self.directories or found != set(self.files):
            raise Broken(f"w{self.number}: names {sorted(found ^ set(self.files))}, directories {sorted(directories ^ self.directories)}")

    def settle(self, path, candidates):
        """After a call whose daemon was killed: the bytes are the old ones, the new ones, or a mixture of their blocks."""
        data = self.again(lambda: self.at(path).read_bytes())
        if not data and any(not versions for _, versions in candidates):
            return candidates[0][0], []
        seen = parse(data, self.number)
        for number, _ in candidates:
            if seen and seen[1] == number:
                longest = max(len(v) for n, v in candidates if n == number)
                allowed = [{v[i] for n, v in candidates if n == number and i < len(v)} for i in range(longest)]
                if len(seen[0]) <= longest and all(version in allowed[i] for i, version in enumerate(seen[0])):
                    return number, seen[0]
        raise Broken(f"w{self.number}/{path}: after a kill {seen}, none of {candidates}")

    # --- calls

    def write(self, path, how):
        file, before = self.files[path], list(self.files[path].versions)
        version = self.fresh()
        after = list(before)
        number = file.number
        if how == "whole":
            after = [version] * self.r.choice(BLOCKS)
        elif how == "append":
            after = before + [version] * self.r.randrange(1, 4)
        elif how == "cut":
            after = before[:self.r.choice(BLOCKS)]
        else:
            for _ in range(self.r.randrange(1, 4)):
                after[self.r.randrange(len(after))] = version
        try:
            flags = os.O_RDWR if self.r.random() < .5 else os.O_WRONLY
            node = self.r.choice(self.nodes)
            handle = node.call("os.open", self.at(path, node), flags | (os.O_TRUNC if how == "whole" else 0))
            try:
                for index, value in enumerate(after):
                    if how == "whole" or index >= len(before) or value != before[index]:
                        node.call("os.pwrite", handle, block(self.number, number, value, index), index * BLOCK)
                if len(after) < len(before):
                    node.call("os.ftruncate", handle, len(after) * BLOCK)
                if self.r.random() < .3:
                    node.call("os.fsync", handle)
                if self.r.random() < .2:
                    time.sleep(self.r.random() * .2)
            finally:
                node.call("os.close", handle)
            file.versions = after
        except OSError as error:
            if not is_gone(error):
                raise
            candidates = [(number, before), (number, after)] + ([(number, [])] if how == "whole" else [])
            _, file.versions = self.settle(path, candidates)
            if not file.versions:
                self.remove(path)

    def save(self):
        path = self.new_name()
        self.next += 1
        file = File(self.next, [self.fresh()] * self.r.choice(BLOCKS))
        node, data = self.r.choice(self.nodes), self.bytes_of(file)
        over = self.r.choice(sorted(self.files)) if self.files and self.r.random() < .2 else path
        if over in self.files and sum(other is self.files[over] for other in self.files.values()) > 1:
            over = path
        try:
            if over == path and self.r.random() < .5:
                with self.at(path, node).open("xb") as handle:
                    handle.write(data)
            else:
                with self.at(path + ".tmp", node).open("wb") as handle:
                    handle.write(data)
                    handle.flush()
                    node.call("os.fsync", handle.fileno())
                other = node if self.r.random() < .5 else self.r.choice(self.nodes)
                self.at(path + ".tmp", other).rename(self.at(over, other))
            self.files[over] = file
        except OSError as error:
            if not is_gone(error):
                raise
            self.again(lambda: self.drop(path + ".tmp"))
            if over != path:
                former = self.files[over]
                number, versions = self.settle(over, [(former.number, former.versions), (file.number, file.versions)])
                if number == file.number:
                    self.files[over] = file
            else:
                self.again(lambda: self.drop(path))

    def drop(self, path):
        try:
            self.at(path).unlink()
        except FileNotFoundError:
            pass

    def remove(self, path):
        try:
            self.at(path).unlink()
        except OSError as error:
            if not is_gone(error):
                raise
            self.again(lambda: self.drop(path))
        del self.files[path]

    def moved(self, old, new):
        """Renames; after a kill it looks which name is there."""
        try:
            self.at(old, node := self.r.choice(self.nodes)).rename(self.at(new, node))
        except OSError as error:
            if not is_gone(error):
                raise
            return self.again(lambda: self.present(new))
        return True

    def present(self, path):
        """Unlike os.path.lexists, which takes a dead mount for a missing name."""
        try:
            self.at(path).lstat()
            return True
        except FileNotFoundError:
            return False

    def step(self):
        r, files = self.r, sorted(self.files)
        what = r.choices(["save", "write", "rename", "directory", "remove", "tree", "link", "read", "names", "other", "mode"],
                         [14, 16, 6, 3, 5, .5, 2, 22, 6, 10, 3])[0]
        self.counts[what] = self.counts.get(what, 0) + 1
        if what == "save" or not files:
            if len(files) < 14:
                self.save()
        elif what == "write":
            path = r.choice(files)
            self.write(path, r.choice(["whole", "append", "cut", "blocks", "blocks", "blocks"]))
            if path in self.files:
                self.check(path)
        elif what == "rename":
            old, new = r.choice(files), self.new_name()
            if self.moved(old, new):
                self.files[new] = self.files.pop(old)
                if self.again(lambda: self.present(old)):
                    raise Broken(f"w{self.number}/{old}: is back after its rename to {new}")
        elif what == "directory":
            old, self.next = r.choice(sorted(self.directories)), self.next + 1
            new = f"run{self.next}"
            if r.random() < .4 and len(self.directories) < 3:
                try:
                    self.at(new).mkdir()
                except OSError as error:
                    if not is_gone(error):
                        raise
                    self.again(lambda: self.at(new).mkdir(parents=True, exist_ok=True))
                self.directories.add(new)
            elif self.moved(old, new):
                self.directories = self.directories - {old} | {new}
                self.files = {path.replace(f"{old}/", f"{new}/", 1): file for path, file in self.files.items()}
        elif what == "remove":
            self.remove(r.choice(files))
        elif what == "tree" and len(self.directories) > 1:
            gone = r.choice(sorted(self.directories))
            end = time.monotonic() + 90
            while True:
                try:
                    if self.present(gone):
                        node = self.r.choice(self.nodes)
                        node.call("shutil.rmtree", self.at(gone, node))
                    break
                except OSError as error:
                    is_busy = error.errno in (errno.ENOENT, errno.EBUSY, errno.ENOTEMPTY)
                    if not (is_gone(error) or is_busy) or time.monotonic() > end:
                        raise
                    time.sleep(.05)
            self.directories.discard(gone)
            self.files = {path: file for path, file in self.files.items() if not path.startswith(f"{gone}/")}
        elif what == "link":
            old, new = r.choice(files), self.new_name()
            try:
                node = r.choice(self.nodes)
                node.call("os.link", self.at(old, node), self.at(new, node))
                self.files[new] = self.files[old]
                self.check(new)
                self.write(old, "blocks")
                self.check(new)
            except OSError as error:
                if not is_gone(error):
                    raise
            if new in self.files:
                self.remove(new)
            else:
                self.again(lambda: self.drop(new))
        elif what == "read":
            path = r.choice(files)
            self.check(path)
            size = self.again(lambda: self.at(path).stat().st_size)
            if size != len(self.files[path].versions) * BLOCK:
                raise Broken(f"w{self.number}/{path}: stat says {size} bytes")
        elif what == "names":
            self.check_names()
        elif what == "mode":
            path = r.choice(files)
            mode, stamp = r.choice([0o600, 0o640, 0o644]), r.randrange(10**9, 10**9 + 10**8)

            def set_both():
                self.at(path).chmod(mode)
                node = r.choice(self.nodes)
                node.call("os.utime", self.at(path, node), (stamp, stamp))

            self.again(set_both)
            found = self.again(lambda: self.at(path).stat())
            if (found.st_mode & 0o777, int(found.st_mtime)) != (mode, stamp):
                raise Broken(f"w{self.number}/{path}: mode {found.st_mode:o}, time {found.st_mtime}, not {mode:o}, {stamp}")
        elif what == "other":
            other = r.randrange(WORKERS)
            try:
                top = self.at().parent / f"w{other}"
                directory = top / r.choice(sorted(names_in(top)))
                names = sorted(name for name in names_in(directory) if not name.endswith(".tmp"))
                data = (directory / r.choice(names)).read_bytes()
                # A write of several blocks is not one: each block must be one that its owner wrote.
                if len(data) % BLOCK == 0 and parse(data, other) is None:
                    time.sleep(.3)
            except (OSError, IndexError):
                pass

    def run(self):
        try:
            while time.monotonic() < self.until:
                self.step()
                time.sleep(self.r.random() * .05)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


class Faults(threading.Thread):
    def __init__(self, seed, nodes, until):
        super().__init__(daemon=True)
        self.r, self.nodes, self.until, self.counts, self.error = random.Random(seed), nodes, until, {}, None

    def run(self):
        try:
            while time.monotonic() < self.until:
                time.sleep(self.r.uniform(1, 5))
                guests = in_guests()
                what = self.r.choices(["kill", "stop", "takeover", "cut", "suspend"], [3, 2, 1, 2 * guests, guests])[0]
                self.counts[what] = self.counts.get(what, 0) + 1
                node = self.r.choice(self.nodes)
                if what == "kill":
                    node.die()
                    time.sleep(self.r.uniform(.3, 3))
                    self.mount(node)
                elif what == "stop":
                    node.signal(signal.SIGSTOP)
                    time.sleep(self.r.uniform(0, 3))
                    node.signal(signal.SIGCONT)
                elif what == "cut":
                    node.guest.cut()
                    self.away(node.guest)
                    node.guest.join()
                elif what == "suspend":
                    node.guest.suspend()
                    self.away(node.guest)
                    node.guest.resume()
                else:
                    self.take_over()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"

    def away(self, guest):
        """Mostly shorter than the server's lease, so that nothing is lost, and sometimes longer. Ceph blocks such a machine for good."""
        is_short = guest.engine == "ceph" or self.r.random() < .6
        without_locks.extend([] if is_short else [guest.name])
        time.sleep(self.r.uniform(0, 6) if is_short else self.r.uniform(25, 45))

    def mount(self, node):
        harness.wait_until(lambda: self.tried(node), 30, "the daemon starts again")

    def tried(self, node):
        try:
            node.mount()
            return True
        except AssertionError as error:
            print(error, file=sys.stderr)
            return False

    def take_over(self):
        """The keeper is suspended, and its machine's lock ends."""
        keeper = next((node for node in self.nodes if node.is_keeper()), None)
        if keeper is None:
            return
        lock = self.nodes.store / "keeper/lock"
        keeper.signal(signal.SIGSTOP)
        try:
            lock.rename(self.nodes.store.parent / f"lost{time.monotonic_ns()}")
            left = [node for node in self.nodes if node is not keeper]
            harness.wait_until(lambda: any(node.is_keeper() for node in left), 20, "another keeper")
            time.sleep(self.r.uniform(0, 4))
        finally:
            keeper.signal(signal.SIGCONT)


def synced(nodes):
    """Whether a keeper has done all its work. One whose machine lost its locks may stop to be the keeper while it is asked."""
    try:
        nodes.keeper(30).sync()
        return True
    except AssertionError as error:
        if "the keeper's mount does this" not in str(error):
            raise
        return False


def history(seed, seconds):
    """Plays one. Returns what was done."""
    base = harness.make_base()
    os.environ["STEPFS_GRACE_MS"] = "5000"
    without_locks.clear()
    r = random.Random(seed)
    nodes = Nodes(base, 4 if in_guests() else 3, passthrough=r.random() < .5)
    try:
        nodes[0].mount().umount()
        text = (nodes.store / "stepfs.toml").read_text()
        (nodes.store / "stepfs.toml").write_text(text.replace("settle_seconds = 600", "settle_seconds = 0"))
        nodes.mount()
        until = time.monotonic() + seconds
        workers = [Worker(number, seed, nodes, until) for number in range(WORKERS)]
        for worker in workers:
            worker.at("run0").mkdir(parents=True)
        threads = [*workers, Faults(seed, nodes, until)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 240)
            if thread.is_alive():
                raise Broken(f"{thread} does not end")
        for thread in threads:
            if thread.error:
                raise Broken(thread.error)
        harness.wait_until(lambda: synced(nodes), 60, "a keeper that archives all")
        states = list(nodes.keeper(30).states().values())
        for worker in workers:
            for node in nodes:
                worker.check_names(node)
                for path in worker.files:
                    worker.check(path, node)
        done = {what: sum(t.counts.get(what, 0) for t in threads) for t in threads for what in t.counts}
        done["released at the end"] = states.count("released")
        log = "".join(node.log_text() for node in nodes)
        done["releases"], done["archived"] = log.count(": released"), log.count(": archived as")
        for node in nodes:
            node.umount()
        try:
            verify(nodes.store)
        except AssertionError as error:
            raise Broken(f"verify: {error}") from None
        if "panicked" in log:
            raise Broken("a daemon panicked")
        nodes.close()
        nodes.remove()
        return done
    except BaseException:
        if in_guests():
            # The guests go, and their stores with them.
            for number, node in enumerate(nodes):
                node.guest.resume()
                node.guest.join()
                (base / f"log{number}").write_text(node.log_text())
        else:
            for node in nodes:
                if node.pid and harness.is_alive(node.pid):
                    node.signal(signal.SIGCONT)
            nodes.close()
        print(f"seed {seed}: kept {base}", file=sys.stderr, flush=True)
        raise


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    done = set()
    if args.log and args.log.exists():
        done = {json.loads(line)["seed"] for line in args.log.read_text().splitlines()}
    broken = 0
    for seed in range(args.seed, args.seed + args.count):
        if seed in done:
            continue
        began = time.monotonic()
        line = {"seed": seed}
        try:
            line |= {"done": history(seed, args.seconds)}
        except Exception as error:
            broken += 1
            line |= {"broken": traceback.format_exc()}
        line["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(line), flush=True)
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps(line) + "\n")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
