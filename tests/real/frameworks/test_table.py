"""Rows of docs/FRAMEWORKS.md that no other test here looks at. scripts/frameworks.sh makes all of them."""

import sys

import pytest
from harness import ROOT

sys.path.insert(0, str(ROOT / "scripts/frameworks"))
from catalogue import ENTRIES  # noqa: E402
from measure import measure  # noqa: E402

pytestmark = [pytest.mark.stepfs, pytest.mark.nightly]

# The least share of an old checkpoint's bytes that is quantized, and the most that is stored of the differences.
EXPECTED = {"accelerate": (0.9, 0.08), "dcp-hf": (0.9, 0.12)}
# Of the loss after a resume from an old checkpoint. Other batches make it differ by as much.
NEAR = 0.02


@pytest.mark.parametrize("name", EXPECTED)
def test_a_library_rotates_and_resumes_as_in_a_directory(name):
    row = measure(ENTRIES[name], sys.executable)
    assert not row.failed and not row.damage, row
    assert not row.rotation, row.rotation
    assert row.newest[0] == row.newest[1], "the newest checkpoint is not what was written"
    old, plain, _ = row.old
    assert abs(old - plain) < NEAR * plain, row.old
    quantized, stored = EXPECTED[name]
    assert row.quantized > quantized and row.differences < stored, row
