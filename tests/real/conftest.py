"""Fixtures: a mount that is always taken down, and a training series made once per session."""

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
pytest.register_assert_rewrite("bounds")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in gpt.py; must be set before torch is imported

import harness  # noqa: E402
import torch  # noqa: E402
from harness import make_base, open_mount, remove_base  # noqa: E402

torch.set_num_threads(2)


def pytest_configure(config):
    config.addinivalue_line("markers", "stepfs: needs the real binary, has no meaning on a plain directory")
    if not harness.PLAIN and not os.access(harness.BIN, os.X_OK):
        pytest.exit(f"{harness.BIN} is missing. Build it with: cargo build --release --locked", 2)


def pytest_collection_modifyitems(items):
    if harness.PLAIN:
        for item in items:
            if item.get_closest_marker("stepfs"):
                item.add_marker(pytest.mark.skip(reason="STEPFS_TEST_PLAIN is set"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, harness.Mount):
                report.sections.append(("the daemon's log", value.log_tail()))
    return report


@pytest.fixture
def mount():
    """An empty, freshly mounted store."""
    yield from open_mount(True)


@pytest.fixture(params=[True, False], ids=["passthrough", "no-passthrough"])
def both(request):
    """The same, with and without passthrough: for what must not depend on it."""
    yield from open_mount(request.param)


@pytest.fixture(scope="session")
def shared_mount():
    """One mount for tests that only look at the training series."""
    yield from open_mount(True)


@pytest.fixture
def plain():
    """A plain directory to compare with."""
    base = make_base()
    yield base
    remove_base(base)


class Series:
    def __init__(self, plain, mount, names):
        self.plain, self.mount, self.names = plain, mount, names

    @property
    def older(self):
        """What may be released after sync: all but the newest."""
        return self.names[:-1]

    @property
    def newest(self):
        return self.names[-1]


@pytest.fixture(scope="session")
def trained(shared_mount):
    """A GPT trained once; each checkpoint is written by torch.save into the mount and into a plain directory."""
    import gpt

    base = make_base()
    try:
        names = gpt.train([str(shared_mount.dir), str(base)], iters=150, every=25, say=lambda line: None)
        shared_mount.sync()
        yield Series(base, shared_mount, names)
    finally:
        shutil.rmtree(base)
