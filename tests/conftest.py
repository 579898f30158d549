"""Fixtures for every test: `ranks` runs a function on forked ranks (see tests/helpers/harness).

At the end of a test session everything that was skipped is listed, one line a reason.
"""

from collections import Counter

import pytest
from harness import Ranks

pytest_plugins = ["hot_swap_fixtures", "snapshot_fixtures"]


def pytest_terminal_summary(terminalreporter):
    """Says what was not tested, and why; the reasons tell how to have it."""
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
    """Runs a function of the test module on N ranks; nothing of them outlives the test."""
    yield _warm_ranks
    _warm_ranks.close_forgotten()
