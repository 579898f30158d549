"""Fixtures for every test: `ranks` runs a function on forked ranks (see tests/helpers/harness)."""

import pytest
from harness import Ranks

pytest_plugins = ["hot_swap_fixtures", "snapshot_fixtures"]



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
