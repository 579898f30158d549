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
    """What snapshots go over."""
    return Networks(request.getfixturevalue("_relays") if request.param == "mpi" else None)


@pytest.fixture
def crew(networks):
    """Makes workers that keep snapshots for each other; nothing of them outlives the test."""
    with crews(networks) as make:
        yield make
