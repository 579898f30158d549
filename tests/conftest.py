"""Fixtures for all tests: `ranks` runs a function on forked ranks (see tests/helpers/harness).

At the end of a test session all skipped tests are listed, one line for each reason.
"""

from collections import Counter

import pytest
from harness import Ranks

pytest_plugins = ["hot_swap_fixtures", "snapshot_fixtures"]


def pytest_terminal_summary(terminalreporter):
    """List what was not tested, and why; the reasons name what has to be installed."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    if reasons:
        terminalreporter.section("not tested on this machine")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:4d}  {reason}")


@pytest.fixture(scope="session")
def _warm_ranks(tmp_path_factory):
    ranks = Ranks(lambda: tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close_forgotten()
    ranks.server.close()


@pytest.fixture
def ranks(_warm_ranks):
    """Run a function of the test module on N ranks; none of their processes outlives the test."""
    yield _warm_ranks
    _warm_ranks.close_forgotten()
