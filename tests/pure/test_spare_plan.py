"""``ft plan spare reorder``: the decision, for programs and people. The rest is in ``conversations/plan/spare.txt``."""

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
    "words", ["--groups 20 --redundancy 4 --failed 1,2,5", "--groups 7 --redundancy 3 --failed 0..4"]
)
def test_people_get_text(words, capsys):
    assert cli.main(["plan", "spare", "reorder", *words.split()]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 3
