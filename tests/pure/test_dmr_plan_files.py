"""``ft dmr plan`` and ``ft dmr explain``: what they print and write, and files that cannot work."""

import json
import os
import shutil
from pathlib import Path

import pytest
from dmr_traces import PRINT, pipeline_trace, random_trace
from msgspec.structs import replace

from ft import cli
from ft.base.errors import UserError
from ft.systems.dmr.plan.file import (
    differences,
    read_plan,
    read_trace,
    refuse_plan_of_other_run,
    write_plan,
    write_trace,
)
from ft.systems.dmr.plan.planner import plan
from ft.systems.schedule.kinds import Pipeline

TRACE = pipeline_trace(Pipeline(2, 2, comm_us=5.0), tp_us=12.0)
BUDGET = "2500"


@pytest.fixture(scope="session")
def planned(tmp_path_factory):
    """A profile and its plan, once for all."""
    folder = tmp_path_factory.mktemp("planned")
    profile, out = folder / "prof.json", folder / "plan.json"
    write_trace(profile, TRACE)
    assert cli.main(["dmr", "plan", str(profile), "--memory-budget", BUDGET, "--out", str(out)]) == 0
    return profile, out


@pytest.fixture
def files(planned, tmp_path):
    """Copies of both, to be changed."""
    return tuple(Path(shutil.copy(path, tmp_path)) for path in planned)


def refused(capsys, *words: str) -> str:
    capsys.readouterr()
    try:
        code = cli.main(["dmr", *words])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert code == 2 and not said.out
    return said.err


def changed(path, change) -> str:
    """The file with its values changed by ``change``."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return str(path)


def test_traces_and_plans_are_read_as_they_were_written(tmp_path, seed):
    for number in range(seed, seed + 20):
        trace = random_trace(number, dynamic=number % 2 == 0)
        path = tmp_path / "file.json"
        write_trace(path, trace)
        read = read_trace(path)
        assert replace(read, memory=trace.memory, tensors=trace.tensors) == trace
        assert dict(read.tensors) == dict(trace.tensors) and not list(tmp_path.glob(".*"))
        found = plan(read, 1e3)
        write_plan(path, found)
        assert read_plan(path) == found


def test_the_picture_is_a_png(files, tmp_path, capsys):
    path = tmp_path / "plan.png"
    assert cli.main(["dmr", "explain", str(files[1]), "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"version":3,"assign":{"a":{"set":"P"},"a":{"set":"naive"}}}', "has 'a' twice"),
        ("[" * 100_000, "cannot be understood"),
        ('{"version":' + "1" * 5000 + "}", "cannot be understood"),
        ('{"version":3,"assign":' + "1" + "0" * 400 + "}", "is too large"),
        ("[1, 2]", "is not a JSON object"),
    ],
)
def test_a_file_that_says_one_thing_twice_or_cannot_be_understood_is_refused(text, said, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert said in refused(capsys, "explain", str(path))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_the_beginning_of_a_file_is_refused(share, files, capsys):
    for command, path in zip(("plan", "explain"), files, strict=True):
        whole = path.read_text()
        path.write_text(whole[: int(share * len(whole))])
        assert "not JSON, or is truncated" in refused(capsys, command, str(path))


def test_a_plan_for_another_run_is_refused_with_what_differs(files):
    found = read_plan(files[1])
    refuse_plan_of_other_run(found, PRINT)
    with pytest.raises(UserError, match=r"torch: planned for 'x', the run has '2\.9'"):
        refuse_plan_of_other_run(found, {**PRINT, "torch": "2.9"})
    assert differences(PRINT, {**PRINT, "tp": 2, "extra": 1}) == [
        "tp: planned for 'x', the run has 2",
        "extra: planned for None, the run has 1",
    ]


def test_a_file_is_replaced_whole(files):
    os.chmod(files[1], 0o444)
    write_plan(files[1], read_plan(files[1]))
    assert read_plan(files[1]).assign
