"""Fixtures for every test: `ranks` runs a function on forked ranks (see tests/harness)."""

import sys
from pathlib import Path

import pytest
from harness import Ranks

pytest_plugins = ["hot_swap_fixtures", "snapshot_fixtures"]

# The checkout under test comes first, whatever is installed.
sys.path.insert(0, str(Path(__file__).parent.parent))


@pytest.fixture(scope="session")
def _warm_ranks(tmp_path_factory):
    ranks = Ranks(lambda: tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close_forgotten()
    ranks.server.close()


@pytest.fixture
def ranks(_warm_ranks):
    """Runs a function of the test module on N ranks; nothing of them outlives the test."""
    yield _warm_ranks
    _warm_ranks.close_forgotten()
