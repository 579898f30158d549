"""Fixtures of the snapshot tests, which run once over each network."""

import pytest
from networks import KINDS, Networks, Relays
from snapshot_crew import crews


@pytest.fixture(scope="session")
def _relays():
    relays = Relays(2)
    yield relays
    relays.close()


@pytest.fixture(params=KINDS)
def networks(request):
    """Return the networks that carry the snapshots."""
    return Networks(request.getfixturevalue("_relays") if request.param == "mpi" else None)


@pytest.fixture
def crew(networks):
    """Yield a function that makes workers which hold snapshots for each other; none outlives the test."""
    with crews(networks) as make:
        yield make
