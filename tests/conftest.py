"""Fixtures for all tests: `ranks` runs a function on forked ranks (see tests/helpers/harness).

Tests with the marker `long` are skipped unless `-m` chooses them. At the end of a test session all skipped tests are
listed, one line for each reason; `--durations-file FILE` writes there what took the time.
"""

import importlib
import json
import os
import random
import sys
import threading
from collections import Counter
from concurrent.futures import Future, wait
from pathlib import Path

import pytest
from harness import Ranks

pytest_plugins = [
    "etcd_servers",
    "fetch_sources",
    "groups_worker",
    "hot_swap_fixtures",
    "run_fixtures",
    "snapshot_fixtures",
]

LONGEST_FIRST = ("tests/end_to_end/", "tests/processes/", "tests/pure/")
LONG = "of the long tier (./tests/run.sh long, or pytest -m long)"
MOST_SHOWN = 40
MOST_ASIDE_S = 60.0


def pytest_addoption(parser):
    parser.addoption("--durations-file", help="writes the slowest files and tests there, with their seconds")


def pytest_collection_modifyitems(config, items):
    """Skip the long tier unless -m says which tests run, and begin with whole runs where tests run side by side.

    So short tests fill the time at the end.
    """
    for item in items if not config.option.markexpr else ():
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason=LONG))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in LONGEST_FIRST])


def pytest_pyfunc_call(pyfuncitem):
    """Execute a test with the marker `on_ranks` on each of its ranks; fixtures get there as arguments."""
    if (marker := pyfuncitem.get_closest_marker("on_ranks")) is None:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    ranks = pyfuncitem._request.getfixturevalue("ranks")
    ranks(pyfuncitem.obj, *marker.args, **marker.kwargs, **given)
    return True


@pytest.fixture
def seed():
    """Draw a seed below 2^30, and print it, to be given in the variable FT_TEST_SEED to see a failure again."""
    drawn = int(os.environ.get("FT_TEST_SEED") or random.SystemRandom().randrange(1 << 30))
    print("seed", drawn)
    return drawn


@pytest.fixture
def aside():
    """Return a function that makes a call in a thread, and returns its future; all calls have to end."""
    made = []

    def call(future, work, given, named):
        try:
            future.set_result(work(*given, **named))
        except BaseException as error:
            future.set_exception(error)

    def begin(work, *given, **named):
        made.append(Future())
        threading.Thread(target=call, args=(made[-1], work, given, named), daemon=True).start()
        return made[-1]

    yield begin
    assert not wait(made, MOST_ASIDE_S).not_done, "a call in a thread hangs"


@pytest.fixture(autouse=True)
def unchanged_environment():
    """Undo what a test has set in the environment: a command that it called in this process, for example."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


def pytest_terminal_summary(terminalreporter):
    """List what was not tested, and why; the reasons name what has to be installed or how to run it."""
    if file := terminalreporter.config.option.durations_file:
        reports = [report for found in terminalreporter.stats.values() for report in found]
        spent = [(report.nodeid, report.duration) for report in reports if isinstance(report, pytest.TestReport)]
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(durations(spent))
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    if reasons:
        terminalreporter.section("not tested on this machine")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:4d}  {reason}")


def durations(spent: list[tuple[str, float]]) -> str:
    """Return a table of the seconds of each folder, of the slowest files and of the slowest tests.

    Args:
        spent: (node id, seconds) of each setup, call and teardown.
    """
    folders, files, tests = Counter(), Counter(), Counter()
    for node, seconds in spent:
        file = node.split("::")[0]
        folders[str(Path(file).parent)] += seconds
        files[file] += seconds
        tests[node] += seconds
    lines = []
    for what, found in (("folders", folders), ("files", files), ("tests", tests)):
        lines += [f"seconds of the slowest {what}:"]
        lines += [f"{seconds:8.1f}  {name}" for name, seconds in found.most_common(MOST_SHOWN)]
    return "\n".join(lines) + "\n"


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


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    """Return (a planted NVML, a function that sets the state of its GPUs)."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "helpers" / "planted_nvml")
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("PLANTED_GPUS", str(tmp_path / "gpus.json"))

    def plant(*gpus):
        (tmp_path / "new.json").write_text(json.dumps(gpus))
        (tmp_path / "new.json").rename(tmp_path / "gpus.json")  # another thread may be reading

    yield importlib.import_module("pynvml"), plant
    sys.modules.pop("pynvml", None)
