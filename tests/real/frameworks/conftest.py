"""The second reader reads each store that a test of this room makes."""

import harness
import pytest


@pytest.fixture(autouse=True)
def second_reader(monkeypatch):
    monkeypatch.setattr(harness, "SECOND_READER", 0 if harness.PLAIN else 16 << 20)
