"""Remotes of both kinds, and nodes on them."""

import pytest
from harness import make_base, remove_base
from remotes import KINDS, Node, make_remote


@pytest.fixture(params=KINDS)
def remote(request):
    base = make_base()
    if request.param == "s3":
        pytest.importorskip("moto")
    made = make_remote(request.param, base)
    made.base = base
    yield made
    made.close()
    remove_base(base)


@pytest.fixture
def nodes(remote):
    """Makes mounted nodes on the remote; all are taken down at the end."""
    made = []

    def make(settings=""):
        made.append(Node(make_base(), remote, settings))
        return made[-1].mount()

    yield make
    for node in made:
        node.close()
