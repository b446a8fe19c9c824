"""`stepfs top`: the last saves, the backlog and the room of mounts, as text and as a live screen."""

import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import termios
import time

import pytest
import torch
from harness import BIN, FAILURE, OK, USAGE, run, run_json, wait_until
from series import save_walk, walk

pytestmark = pytest.mark.stepfs

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


def once(*arguments):
    return run("status", "-v", *arguments).stdout


# --- numbers


def test_a_frame_shows_the_save_just_made(mount):
    """The numbers of one save, in `top`, `status` and `metrics`."""
    names = save_walk(mount.dir, 4, name="step_{}.pt")
    state = next(walk(1, seed=3))
    began = time.time()
    with open(mount / "step_5.pt", "wb") as file:
        torch.save(state, file)
        time.sleep(0.4)
    took = time.time() - began
    wait_until(lambda: mount.status()["saves"][:1] and mount.status()["saves"][0]["path"] == "step_5.pt", 10, "it is recorded")
    mount.sync()
    status = mount.status()
    save, size = status["saves"][0], (mount / "step_5.pt").stat().st_size
    assert [save["path"] for save in status["saves"]] == ["step_5.pt", *reversed(names)]
    assert (save["files"], save["bytes"]) == (1, size) and 400 <= save["milliseconds"] <= took * 1000 + 50, (save, took)
    assert abs(save["closed"] - time.time()) < 60
    frame, words = once(mount.dir), run("status", mount.dir).stdout
    line = next(line for line in frame.splitlines() if line.startswith("step_5.pt"))
    assert re.search(r"MiB +0\.[4-9] s +[\d.]+ MB/s$", line), frame
    assert re.search(r"(?m)^last save  step_5\.pt, [\d.]+ MiB in 0\.[4-9] s, [\d.]+ MB/s$", words), words
    numbers = dict(re.findall(rf'stepfs_(\w+){{mount="{mount.dir}".*}} ([\d.]+)', run("metrics").stdout))
    assert int(numbers["last_save_bytes"]) == size and float(numbers["last_save_seconds"]) == save["milliseconds"] / 1000
    assert int(numbers["last_save_timestamp_seconds"]) == save["closed"] and numbers["backlog_seconds"] == "0"
    # Four earlier checkpoints show how the store grows.
    room = status["room"]
    stored = [row["stored_bytes"] for row in mount.ls() if row["path"] != "step_5.pt"]
    assert 0.9 * min(stored) <= room["bytes_per_checkpoint"] <= max(stored), (room, stored)
    assert room["checkpoints"] == (status["free_bytes"] - size) // room["bytes_per_checkpoint"]
    assert int(numbers["room_checkpoints"]) == pytest.approx(room["checkpoints"], rel=0.2)
    for text in (frame, words):
        assert re.search(r"(?m)^room +about \d+ more checkpoints, .* at this pace$", text), text
    assert re.search(r"(?m)^\. +\d+ s ago +5 +5$", frame), frame


def test_a_name_that_a_program_gives_later_and_files_of_one_checkpoint(mount):
    for step, state in enumerate(walk(3, seed=5), 1):
        folder = mount / f"run/checkpoint-{step}"
        os.makedirs(f"{folder}.tmp")
        torch.save(state, f"{folder}.tmp/optimizer.pt")
        torch.save(state, f"{folder}.tmp/part")
        os.rename(f"{folder}.tmp/part", f"{folder}.tmp/model.pt")
        (mount / f"run/checkpoint-{step}.tmp/config.json").write_text("{}")
        if step == 2:
            mount.sync()
        os.rename(f"{folder}.tmp", folder)
    mount.sync()
    saves = {save["path"]: save for save in mount.status()["saves"]}
    assert set(saves) == {f"run/checkpoint-{step}" for step in (1, 2, 3)}, saves
    size = sum(path.stat().st_size for path in (mount / "run/checkpoint-2").glob("*.pt"))
    assert {save["files"] for save in saves.values()} == {2} and saves["run/checkpoint-2"]["bytes"] == size
    runs = mount.status()["runs"]
    assert [(run["path"], run["step"], run["newest"]) for run in runs] == [("run", 3, "run/checkpoint-3")]


@pytest.mark.slow
def test_a_rotation_takes_no_more_room(mount):
    for step, state in enumerate(walk(12, shapes={"w.weight": (128, 128), "b.weight": (64, 128)}), 1):
        torch.save(state, mount / f"step_{step}.pt")
        mount.sync()
        if step > 4:
            os.remove(mount / f"step_{step - 4}.pt")
    room = mount.status()["room"]
    assert room == {"bytes_per_checkpoint": 0, "checkpoints": None, "bytes_per_day": None, "full": None}
    assert "as many checkpoints go as come" in once(mount.dir)


def test_reads_of_released_files_are_counted(mount):
    save_walk(mount.dir, 3, name="step_{}.pt")
    mount.sync()
    assert mount.status()["reads"] == {"opened": 0, "decoded_bytes": 0, "failed": 0}
    size = len((mount / "step_1.pt").read_bytes())
    reads = mount.status()["reads"]
    assert reads["opened"] == 1 and size <= reads["decoded_bytes"] <= 2 * size and reads["failed"] == 0, (reads, size)
    assert "reads      1 of released files" in once(mount.dir)


@pytest.mark.waits
def test_a_step_that_cannot_be_taken_is_a_backlog(mount):
    save_walk(mount.dir, 2, name="step_{}.pt")
    mount.sync()
    assert mount.status()["backlog_seconds"] is None
    # No object can be made, so archiving is tried again and again.
    os.rename(mount.store / "objects", mount.base / "objects")
    (mount.store / "objects").write_text("in the way")
    save_walk(mount.dir, 4, name="step_1{}.pt", seed=2)
    wait_until(lambda: (mount.status()["backlog_seconds"] or 0) >= 3, 10, "the oldest step waits")
    assert re.search(r"(?m)^queue +\d+ to do, the oldest waits for \d", once(mount.dir))
    # A try between both calls would make a directory of that name.
    os.kill(mount.pid, signal.SIGSTOP)
    (mount.store / "objects").unlink()
    os.rename(mount.base / "objects", mount.store / "objects")
    os.kill(mount.pid, signal.SIGCONT)
    mount.sync()
    assert mount.status()["backlog_seconds"] is None


# --- the screen


class Screen:
    """`stepfs top` on a terminal of its own, and what that shows."""

    def __init__(self, *arguments, columns=80, rows=24, **environment):
        self.master, slave = pty.openpty()
        self.text = ""
        self.resize(columns, rows)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        command = [environment.pop("program", BIN), "top", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
                                        env={**os.environ, "TERM": "xterm-256color", **environment})
        os.set_blocking(self.master, False)

    def resize(self, columns, rows):
        self.size, self.drawn = (columns, rows), len(self.text)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self):
        """All that was written so far."""
        try:
            while chunk := os.read(self.master, 1 << 16):
                self.text += chunk.decode()
        except (BlockingIOError, OSError):
            pass
        return self.text

    def shown(self):
        """The lines that the terminal shows, of the sequences that a screen of text needs."""
        columns, rows = self.size
        lines, row, column = [[" "] * columns for _ in range(rows)], 0, 0
        for found in re.finditer(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[=>78]|([^\x1b])", self.read()[self.drawn :]):
            values, command, letter = found.groups()
            if letter:
                if row < rows and column < columns:
                    lines[row][column] = letter
                column += 1
            elif command == "H":
                row, column = (int(at) - 1 for at in (values or "1;1").split(";"))
            elif command == "J":
                lines = [[" "] * columns for _ in range(rows)]
        return ["".join(line).rstrip() for line in lines]

    def wait_for(self, words):
        wait_until(lambda: any(words in line for line in self.shown()), 20, f"{words!r} on the screen")

    def press(self, keys):
        os.write(self.master, keys)

    def end(self):
        """The exit code. The terminal is as it was before."""
        code = self.process.wait(20)
        text = self.read()
        assert text.count(ENTER) == text.count(LEAVE) == 1 and text.rindex(LEAVE) > text.rindex(ENTER), text[-300:]
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"
        assert termios.tcgetattr(self.slave) == self.before
        return code

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def screen(mount):
    screens = []

    def begin(*arguments, **options):
        screens.append(Screen(*(arguments or (mount.dir,)), **options))
        return screens[-1]

    yield begin
    for one in screens:
        one.close()


@pytest.mark.parametrize("key", [b"q", b"\x1b", b"\x03"], ids=["q", "Esc", "Ctrl-C"])
def test_a_key_ends_it_and_the_terminal_is_as_before(screen, key):
    top = screen()
    top.wait_for("nothing is wrong")
    top.press(b"\x1b[A")
    time.sleep(0.5)
    assert top.process.poll() is None, "an arrow is no Esc"
    top.press(key)
    assert top.end() == OK


def test_a_signal_ends_it_and_the_terminal_is_as_before(screen):
    top = screen()
    top.wait_for("nothing is wrong")
    top.process.send_signal(signal.SIGTERM)
    assert top.end() == FAILURE


def test_a_terminal_that_goes_ends_it(screen):
    top = screen()
    top.wait_for("nothing is wrong")
    os.close(top.master)
    os.close(top.slave)
    top.master, top.slave = os.openpty()
    assert top.process.wait(20) == FAILURE, "101 is a panic"


@pytest.mark.slow
def test_it_follows_saves_and_a_resize(mount, screen):
    top = screen("--interval", 1, mount.dir)
    top.wait_for("nothing is wrong")
    save_walk(mount.dir, 5, name="step_{}.pt")
    top.wait_for("step_5.pt")
    top.wait_for("more checkpoints")
    assert len(top.shown()) == 24 and top.shown()[4].startswith(f"mounted    {mount.dir}")
    top.read()
    top.resize(60, 30)
    top.wait_for("nothing is wrong")
    top.wait_for("last saves")
    top.read()
    top.resize(4, 2)
    wait_until(lambda: "step" in "".join(top.shown()) or "there" in "".join(top.shown()), 10, "it draws on a tiny screen")
    top.press(b"q")
    assert top.end() == OK


def test_a_mount_that_goes_says_so_and_comes_back(mount, screen):
    top = screen("--interval", 1, mount.dir)
    top.wait_for("nothing is wrong")
    mount.umount()
    top.wait_for("no store is mounted")
    mount.mount()
    top.wait_for("nothing is wrong")
    top.press(b"q")
    assert top.end() == OK


def test_it_goes_on_when_its_program_is_replaced(mount, screen):
    program = shutil.copy(BIN, mount.base / "stepfs")
    top = screen("--interval", 1, mount.dir, program=str(program))
    top.wait_for("nothing is wrong")
    os.remove(program)
    save_walk(mount.dir, 1, name="step_{}.pt")
    top.wait_for("step_1.pt")
    top.press(b"q")
    assert top.end() == OK


@pytest.mark.waits
def test_a_daemon_that_hangs_does_not_hang_it(mount, screen):
    """It asks such a daemon once, names it, and goes on when that answers."""
    top = screen("--interval", 1, mount.dir)
    top.wait_for("nothing is wrong")
    os.kill(mount.pid, signal.SIGSTOP)
    try:
        top.wait_for("has not answered for")
        asking = lambda: subprocess.run(["pgrep", "-c", "-P", str(top.process.pid)], capture_output=True, text=True).stdout
        assert asking().strip() == "1"
        other = screen("--interval", 1, mount.dir)
        other.wait_for("asking its daemon")
        other.press(b"q")
        assert other.end() == OK
    finally:
        os.kill(mount.pid, signal.SIGCONT)
    top.wait_for("nothing is wrong")
    top.press(b"q")
    assert top.end() == OK


def test_colour_where_it_is_wanted(mount, screen):
    assert "\x1b[" in once("--color=always", mount.dir) and "\x1b" not in once(mount.dir)
    for environment, is_painted in (({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)):
        top = screen(**environment)
        top.wait_for("nothing is wrong")
        assert bool(re.search(r"\x1b\[(38;5;2|32)[;m]", top.read())) == is_painted, top.text
        top.press(b"q")
        assert top.end() == OK


def test_without_a_terminal_it_names_the_way_out(mount):
    done = run("top", mount.dir, check=False)
    assert done.returncode == FAILURE and "`stepfs status -v`" in done.stderr and not done.stdout, done
    assert once().count(str(mount.dir)) == once(mount.dir).count(str(mount.dir)) == 1
    assert run("top", "--interval", "0", check=False).returncode == USAGE
