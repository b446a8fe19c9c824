"""Fixtures: a mount that is always taken down, and a training series made once."""

import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
for folder in ("scripts", "python"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / folder))
pytest.register_assert_rewrite("bounds")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in gpt.py; must be set before torch is imported

# Processes that run tests at the same time share the cores. Only they set this, since they inherit what the process that starts them
# sets. torch reads it when it is imported, which takes seconds: only tests that use it import it.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    os.environ["OMP_NUM_THREADS"] = str(max(1, 2 // workers))

import harness  # noqa: E402
from harness import make_base, open_mount, remove_base  # noqa: E402

# These fixtures take long to make, once per process. So one process runs all tests of a file that uses one.
EXPENSIVE = {"shared_mount", "zoo", "small_gpt", "distributed"}
TOGETHER = {"test_torch.py", "test_dcp.py", "test_zoo.py", "test_tune.py"}


def pytest_configure(config):
    config.addinivalue_line("markers", "stepfs: needs the real binary, has no meaning on a plain directory")
    config.addinivalue_line("markers", "slow: takes seconds; scripts/check.sh leaves it out")
    config.addinivalue_line("markers", "waits: takes seconds and no processor; starts first, beside those that compute; slow")
    config.addinivalue_line("markers", "alone: takes all cores; scripts/test.sh runs it at the end, and nothing else beside it")
    config.addinivalue_line("markers", "nightly: trains for a study or takes minutes; scripts/test.sh leaves it out, scripts/nightly.sh runs it")
    if not harness.PLAIN and not os.access(harness.BIN, os.X_OK):
        pytest.exit(f"{harness.BIN} is missing. Build it with: cargo build --locked", 2)


def pytest_itemcollected(item):
    if EXPENSIVE & set(getattr(item, "fixturenames", ())):
        assert item.path.name in TOGETHER, f"{item.path.name} uses one of {EXPENSIVE}: name it in TOGETHER"
        item.add_marker(pytest.mark.slow)
    if item.get_closest_marker("waits"):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Like `--dist loadgroup`, which does not work with pytest 9.2 and pytest-xdist 3.8 together."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return file if file.rsplit("/")[-1] in TOGETHER else nodeid

    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    # The longest first: no process begins one when all others are done. Files of one process come before all (`pytest_xdist_...`),
    # and beside them what only waits.
    lacks = lambda item, name: item.get_closest_marker(name) is None
    items.sort(key=lambda item: (item.path.name not in TOGETHER, lacks(item, "waits"), lacks(item, "slow")))
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
    """The same, with and without passthrough: for results that must not depend on it."""
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
        """The files that may be released after sync: all but the newest."""
        return self.names[:-1]

    @property
    def newest(self):
        return self.names[-1]


SERIES = {"iters": 150, "every": 25}


def series_folder():
    """The path of the training series of this trainer, torch and Python. The bytes depend on nothing else."""
    import gpt
    import torch

    of = repr((Path(gpt.__file__).read_bytes(), torch.__version__, sys.version, platform.machine(), SERIES))
    return harness.ROOT / "target/test-series" / hashlib.sha256(of.encode()).hexdigest()[:16]


def train(mount, base):
    """Trains into both directories, and keeps a copy of the series."""
    import gpt

    names = gpt.train([str(mount.dir), str(base)], **SERIES, say=lambda line: None)
    folder = series_folder()
    half = Path(f"{folder}.{os.getpid()}")
    shutil.rmtree(half, ignore_errors=True)
    shutil.copytree(base, half)
    try:
        os.rename(half, folder)
    except OSError:  # another session was first
        shutil.rmtree(half)
    return names


def train_again(mount, base):
    """The same bytes without the training: a minute less. torch.save writes into the mount here, too."""
    import torch

    names = sorted(path.name for path in series_folder().iterdir())
    for name in names:
        shutil.copyfile(series_folder() / name, base / name)
        torch.save(torch.load(base / name), mount / name)
    return names


@pytest.fixture(scope="session")
def trained(shared_mount):
    """A GPT trained once; each checkpoint is written by torch.save into the mount and into a plain directory."""
    base = make_base()
    try:
        names = (train_again if series_folder().is_dir() else train)(shared_mount, base)
        shared_mount.sync()
        yield Series(base, shared_mount, names)
    finally:
        shutil.rmtree(base)
