"""Random histories of a checkpoint directory against a model: no operation on one file changes another.

    STEPFS_HISTORIES=20 STEPFS_HISTORY_SEED=7 STEPFS_HISTORY_OPERATIONS=2000 pytest tests/real/life/test_histories.py -s
                                                                                            (scripts/histories.sh)
"""

import os
import time

import pytest
from histories import History

pytestmark = pytest.mark.stepfs
COUNT = int(os.environ.get("STEPFS_HISTORIES", 2))
FIRST = int(os.environ.get("STEPFS_HISTORY_SEED", 1))
OPERATIONS = int(os.environ.get("STEPFS_HISTORY_OPERATIONS", 500))
# In a history of 500 operations more than a hundred files are seen released; with far fewer the checks mean little.
LEAST_RELEASED = OPERATIONS // 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_history(mount, seed):
    mount.umount()
    began = time.monotonic()
    counts = History(mount, seed).run(OPERATIONS)
    print(f"seed {seed}: {OPERATIONS} operations, {', '.join(f'{n} {what}' for what, n in counts.items())}, {time.monotonic() - began:.0f} s")
    assert counts["released"] >= LEAST_RELEASED and counts["quantized"] >= LEAST_RELEASED // 2, counts
