"""Direct, mapped and buffered reads and writes of one file: whoever reads after a finished write gets the new bytes."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from harness import BIN, as_ordinary_user, copy_helper, shell

PROGRAM = Path(__file__).resolve().parents[1] / "support/mixed_io.py"
ROUNDS = 20


pytestmark = pytest.mark.slow


def test_every_read_after_a_write_gives_the_new_bytes(both):
    done = shell(f"'{sys.executable}' '{PROGRAM}' '{both.dir}/f' {ROUNDS}", check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.stepfs
@pytest.mark.parametrize("by, rounds", [("helper", ROUNDS // 5), ("daemon", ROUNDS)], ids=["helper", "daemon"])
def test_so_it_is_for_an_ordinary_user(plain, by, rounds):
    if by == "helper" and (os.geteuid() != 0 or not shutil.which("setcap")):
        pytest.skip("only root gives the helper its capability")
    # What the user may not reach is copied.
    shutil.copy(PROGRAM, plain)
    shutil.copy(BIN, plain / "stepfs")
    done = as_ordinary_user(plain, f"mkdir mnt; ./stepfs mount store mnt; /usr/bin/python3 mixed_io.py mnt/f {rounds} || true; "
                                  "./stepfs status --json mnt; ./stepfs umount mnt", copy_helper(plain) if by == "helper" else None)  # fmt: skip
    assert re.search(f'"by": *"{by}"', done.stdout)
    assert "former" not in done.stdout and done.stdout.count(": ok") == 9, done.stdout
