"""``ft plan spare``: the keys that programs get, tables for people, and input that cannot work."""

import json

import numpy as np
import pytest
from spare_flow import least_cost, least_stack

from ft import cli
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import ruler


def plan(words: str, capsys):
    assert cli.main(["plan", "spare", *words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(words: str, capsys) -> str:
    """What is said about it; the exit code is 2, whoever finds the fault."""
    try:
        code = cli.main(["plan", "spare", *words.split()])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert code == 2 and not said.out
    return said.err


def test_a_range_gets_a_list_of_answers_in_its_order(capsys):
    found = plan("place --groups 200,600 --redundancy 2..4", capsys)
    assert [tuple(answer["ruler"]) for answer in found] == [ruler(n, r) for n in (200, 600) for r in (2, 3, 4)]


def test_place_answers_with_a_ruler(capsys):
    found = plan("place --groups 21 --redundancy 5", capsys)
    assert set(found) == {"ruler", "max_overlap"} and found["max_overlap"] == 1 and len(found["ruler"]) == 5


def test_place_takes_a_ruler_that_is_one(capsys):
    assert plan("place --groups 13 --redundancy 4 --ruler 0,1,3,9", capsys)["ruler"] == [0, 1, 3, 9]


def test_reorder_answers_with_the_decision(capsys):
    found = plan("reorder --groups 20 --redundancy 4 --failed 1,2,5", capsys)
    assert set(found) == {"stack", "moves", "wipe_out", "phase", "patch_types", "time_ms"}
    assert (found["stack"], found["phase"], found["wipe_out"], found["patch_types"]) == (2, 2, [], [1, 2, 5])
    assert [set(move) for move in found["moves"]] == [{"group", "type", "from", "to"}]
    lost = plan("reorder --groups 7 --redundancy 3 --failed 0..4", capsys)
    assert lost["wipe_out"] == [3, 4] and lost["moves"] == []


@pytest.mark.parametrize("failed", [[0], [0, 1, 2, 3, 10], [*range(5, 12)], [*range(0, 40, 2)]])
def test_reorder_is_what_scipy_finds(failed, capsys):
    found = plan(f"reorder --groups 40 --redundancy 5 --failed {','.join(map(str, failed))}", capsys)
    placement, alive = Placement(40, ruler(40, 5)), np.ones(40, dtype=bool)
    alive[failed] = False
    stack = least_stack(placement.orders(), alive)
    assert found["stack"] == stack if stack else found["wipe_out"]
    if stack:
        assert least_cost(placement.orders(), alive, stack) == len(found["moves"])


@pytest.mark.parametrize(
    "words",
    [
        "place --groups 200 --redundancy 12",
        "reorder --groups 20 --redundancy 4 --failed 1,2,5",
        "reorder --groups 7 --redundancy 3 --failed 0..4",
    ],
)
def test_people_get_text(words, capsys):
    assert cli.main(["plan", "spare", *words.split()]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "needs a subcommand"),
        ("place --groups 10 --redundancy 11", "11"),
        ("place --groups 10 --redundancy 1", "redundancy 1"),
        ("place --groups 1 --redundancy 2", "1 groups"),
        ("place --groups 10 --redundancy 5..2", "empty"),
        ("place --groups 10 --redundancy two", "neither a number"),
        ("place --groups 10 --redundancy ", "expected one argument"),
        ("place --groups 9999999 --redundancy 2", "beyond"),
        ("place --groups 200 --redundancy 13", "is 12"),
        ("place --groups 2 --redundancy 2", "3 groups"),
        ("place --groups 13 --redundancy 3 --ruler 0,1,2", "two types would share"),
        ("place --groups 13 --redundancy 4 --ruler 0,1,3", "3 marks"),
        ("place --groups 13 --redundancy 3 --ruler 0,1,14", "mark 14"),
        ("reorder --groups 13 --redundancy 4 --failed 13", "group 13"),
        ("reorder --groups 13 --redundancy 4 --failed -1", "group -1"),
        ("reorder --groups 13 --redundancy 4 --failed 1,2,1", "group 1 is named more than once"),
        ("reorder --groups 13 --redundancy 4 --failed 4..2", "empty"),
        ("reorder --groups 13 --redundancy 4", "--failed"),
    ],
)
def test_input_that_cannot_work_is_refused(words, said, capsys):
    assert said in refused(words, capsys)
