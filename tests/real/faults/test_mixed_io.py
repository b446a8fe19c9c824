"""Direct, mapped and buffered reads and writes of one file: whoever reads after a finished write gets the new bytes."""

import shutil
import sys
from pathlib import Path

import pytest

from harness import BIN, as_ordinary_user, shell

PROGRAM = Path(__file__).resolve().parents[1] / "support/mixed_io.py"
ROUNDS = 20


pytestmark = pytest.mark.slow


def test_every_read_after_a_write_gives_the_new_bytes(both):
    done = shell(f"'{sys.executable}' '{PROGRAM}' '{both.dir}/f' {ROUNDS}", check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.stepfs
def test_so_it_is_for_an_ordinary_user(plain):
    # What the user may not reach is copied.
    shutil.copy(PROGRAM, plain)
    shutil.copy(BIN, plain / "stepfs")
    done = as_ordinary_user(plain, f"mkdir mnt; ./stepfs mount store mnt; /usr/bin/python3 mixed_io.py mnt/f {ROUNDS} || true; "
                                  "./stepfs umount mnt; grep passthrough store/daemon.log")
    assert "without kernel passthrough" in done.stdout
    assert "former" not in done.stdout and done.stdout.count(": ok") == 9, done.stdout
