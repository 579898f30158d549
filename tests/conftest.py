"""Fixtures for all tests: `ranks` runs a function on forked ranks (see tests/helpers/harness).

Tests with the marker `alone` run while no other test of the session does, also where pytest-xdist runs several at once.
At the end of a test session all skipped tests are listed, one line for each reason.
"""

import contextlib
import fcntl
from collections import Counter
from pathlib import Path

import pytest
from harness import Ranks

pytest_plugins = ["hot_swap_fixtures", "snapshot_fixtures"]

LONGEST_FIRST = ("tests/end_to_end/", "tests/processes/", "tests/pure/")


def pytest_collection_modifyitems(config, items):
    """Begin with whole runs where tests run side by side, so that short tests fill the time at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in LONGEST_FIRST])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Let tests of several processes of pytest-xdist run at the same time, except beside one that runs alone."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    # The processes' temporary folders are in the same folder.
    folder = Path(item.config._tmp_path_factory.getbasetemp()).parent
    with open(folder / "door", "w") as door, open(folder / "room", "w") as room:
        with locked(door, fcntl.LOCK_EX):  # whoever waits for the room to be empty keeps the next ones out
            fcntl.flock(room, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        with contextlib.closing(room):
            return (yield)


@contextlib.contextmanager
def locked(file, how):
    fcntl.flock(file, how)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


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
