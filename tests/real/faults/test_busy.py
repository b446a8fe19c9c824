"""Commands that look at a whole store while its files come and go report no false damage."""

import os
import resource
import shutil
import signal
import subprocess
import threading
import time

import pytest
from harness import BIN, OK, run
from series import save_walk

pytestmark = pytest.mark.stepfs


def while_it_changes(change, look, times):
    """Calls `look` so many times while `change` runs in a thread; returns the problems of both."""
    stop, trouble = threading.Event(), []

    def loop():
        try:
            while not stop.is_set():
                change()
        except Exception as error:  # noqa: BLE001
            trouble.append(repr(error))

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        for _ in range(times):
            if problem := look():
                trouble.append(problem)
    finally:
        stop.set()
        thread.join()
    return trouble


@pytest.mark.slow
def test_verify_while_checkpoints_go(mount):
    """Verify must not report an object as missing that was collected after the listing, or that has another parent since then.
    Verify is stopped for a moment between its list and the end of its reading, and files go meanwhile.
    """
    runs = [f"run-{letter}" for letter in "abcd"]
    for number, folder in enumerate(runs):
        os.mkdir(mount / folder)
        # Different ones: an object with copies does not go with the first.
        names = save_walk(mount / folder, 12, seed=401 + number)
    mount.sync()
    # The later ones first, since nothing is a difference to them; then middle ones, so that others get another parent.
    for number, name in enumerate([*names[-2:5:-1], *names[1:4]]):
        process = subprocess.Popen([BIN, "verify", mount.store], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        time.sleep(0.02 + 0.015 * number)
        process.send_signal(signal.SIGSTOP)
        for folder in runs:
            os.unlink(mount / folder / name)
        mount.sync()
        process.send_signal(signal.SIGCONT)
        said = process.communicate(timeout=120)[0]
        assert process.returncode == OK, said


@pytest.mark.slow
def test_ls_while_directories_go(mount):
    """If a directory goes between two looks, the command still reports all others."""
    for n in range(50):
        (mount / f"stays-{n}").write_text("there")

    def change():
        for n in range(100):
            os.mkdir(mount / f"goes-{n}")
            (mount / f"goes-{n}/file").write_text("there")
        for n in range(100):
            shutil.rmtree(mount / f"goes-{n}")

    def look():
        done = run("ls", "--json", mount.dir, check=False)
        return None if done.returncode == OK else done.stderr

    assert not while_it_changes(change, look, 40)


@pytest.mark.slow
def test_decoded_files_leave_descriptors_for_others(mount):
    """The cache keeps decoded files open. With a low limit on open files, it must leave descriptors for others after many small
    reads.
    """
    mount.umount()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # More than the 192 that chains kept open may take.
    done = subprocess.run([BIN, *map(str, mount.arguments())], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300)))
    assert done.returncode == OK and resource.getrlimit(resource.RLIMIT_NOFILE) == limits
    mount.pid = mount.find_daemon()
    for folder in "abcdefgh":
        os.mkdir(mount / folder)
        save_walk(mount / folder, 36, seed=500 + ord(folder), shapes={"weight": (128, 64)})
    mount.sync()
    released = mount.released()
    assert len(released) > 270
    for name in released:
        with open(mount / name, "rb") as f:
            assert f.read(4) == b"PK\x03\x04"
    save_walk(mount.dir, 1)

