"""Mirrors of both kinds, and stores that have them."""

import os

import pytest
from harness import Mount, make_base, remove_base
from mirrors import KINDS, Mirrored, make_mirror


@pytest.fixture(params=KINDS)
def mirror(request):
    base = make_base()
    if request.param == "s3":
        pytest.importorskip("moto")
    made = make_mirror(request.param, base)
    made.base = base
    os.environ.update(made.environment)
    yield made
    made.close()
    remove_base(base)


@pytest.fixture
def mounts():
    """Makes mounted stores; all are taken down at the end."""
    made = []

    def make(mirror=None, settings="", store=None):
        made.append(Mirrored(make_base(), mirror, settings) if mirror else Mount(make_base()))
        if store:
            made[-1].store = store
        return made[-1].mount()

    yield make
    for mount in made:
        mount.close()
        if mount.base.exists():
            remove_base(mount.base)
