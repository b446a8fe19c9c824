"""The second reader reads the smaller files of each store that a test of this room makes."""

import harness
import pytest


@pytest.fixture(autouse=True)
def second_reader(monkeypatch):
    monkeypatch.setattr(harness, "SECOND_READER", 0 if harness.PLAIN else 4 << 20)
