"""A plan as the runtime follows it: which operator is which, also where an iteration is not as it was profiled."""

import random

import pytest

from ft.base.errors import UserError
from ft.systems.dmr.plan.trace import (
    D_INTER,
    NAIVE,
    PIGGYBACK,
    AgcSegment,
    Assignment,
    Memory,
    Operator,
    Plan,
    Predicted,
    Tensor,
    Trace,
    Window,
)
from ft.systems.dmr.runtime.cursor import Unit, operator_id
from ft.systems.dmr.runtime.strategy import AT_ONCE, WITH_RECOMPUTATION, OperatorAligner, Planned

NAMES = ("mm", "add", "relu", "mm", "mul", "sum")


def a_plan(assign: dict[int, Assignment], stage: int = 0, segments=None, rename=None) -> Plan:
    """Six operators of 10 us in one unit, with a window after the fourth; those not in ``assign`` at once."""
    ops = tuple(
        Operator(
            operator_id(stage, rename or "backward", 0, 0, i),
            name,
            "backward",
            10.0 * i,
            10.0,
            ("w", f"t{i}"),
            stage=stage,
            layer=1,
        )
        for i, name in enumerate(NAMES)
    )
    tensors = {f"t{i}": Tensor(100.0, 60.0) for i in range(6)} | {"w": Tensor(1e6)}
    windows = (Window("gap", 40.0, 0.0, "bubble", stage), Window("open", 50.0, 5.0, "ep", stage, dynamic=True))
    trace = Trace({}, ops, tensors, windows, Memory({}))
    how = {op.id: assign.get(i, Assignment(NAIVE)) for i, op in enumerate(ops)}
    return Plan(trace, how, segments or {}, Predicted(1.0, 1.0, 1.0, 0.0, 0.0))


def decisions(planned: Planned, names=NAMES, in_segment: bool = False) -> list:
    unit = Unit("backward")
    return [planned.decide(unit, index, name, in_segment) for index, name in enumerate(names)]


def test_a_window_is_known_by_the_operators_before_it():
    planned = Planned(a_plan({1: Assignment(D_INTER, "gap"), 2: Assignment(D_INTER, "open")}), 0)
    found = decisions(planned)
    assert [one.set for one in found] == [NAIVE, D_INTER, D_INTER, NAIVE, NAIVE, NAIVE]
    assert (found[1].due, found[2].due) == (4, None)
    # What lives as long as the iteration takes no room.
    assert found[2].bytes == 100.0
    assert not planned.misfits


def test_what_is_with_the_recomputation_is_at_once_where_nothing_recomputes():
    planned = Planned(a_plan({0: Assignment(PIGGYBACK)}), 0)
    assert decisions(planned, in_segment=True)[0].set == PIGGYBACK
    assert decisions(planned)[0].set == NAIVE


def test_an_operator_out_of_place_is_verified_all_the_same_and_the_plan_found_again():
    late = {i: Assignment(D_INTER, "gap") for i in range(4)}
    planned = Planned(a_plan(late), 0)
    found = decisions(planned, ("mm", "zeros", "add", "relu", "mm", "mul", "sum"))
    assert [one.set for one in found] == [D_INTER, NAIVE, NAIVE, NAIVE, D_INTER, NAIVE, NAIVE]
    assert sum(planned.misfits.values()) == 3
    assert [one.ordinal for one in found] == [1, 0, 0, 0, 4, 5, 6]
    assert [one.set for one in decisions(planned)[:4]] == [D_INTER] * 4, "the next iteration begins anew"
    assert decisions(planned, ("zeros",) * 3, in_segment=True) == [WITH_RECOMPUTATION] * 3
    assert planned.decide(Unit("forward"), 0, "mm", False) == AT_ONCE


def test_a_unit_without_decisions_asks_for_no_order():
    planned = Planned(a_plan({}), 0)
    found = decisions(planned, ("b", "a", *"zzzzzz"))
    assert {one.set for one in found} == {NAIVE} and not planned.misfits
    assert [one.ordinal for one in found] == [1, 2, 3, 4, 5, 6, 6, 6]


def test_segments_say_how_many_operators_they_replay_and_when():
    segment = AgcSegment(tuple(operator_id(0, "backward", 0, 0, i) for i in (1, 2)), "gap", (), 20.0)
    replayed = {i: Assignment(D_INTER, "gap", "agc") for i in (1, 2)}
    planned = Planned(a_plan(replayed, segments={"agc": segment}), 0, unstable=["relu"])
    assert (planned.replays["agc"].size, planned.replays["agc"].due) == (1, 4)
    assert decisions(planned)[1].replay == "agc"


def test_plans_of_other_stages_and_of_no_run_are_refused():
    with pytest.raises(UserError, match="no operators of stage 0, only of stages 1"):
        Planned(a_plan({}, stage=1), 0)
    with pytest.raises(UserError, match="does not come from the profile of a run"):
        Planned(a_plan({}, rename="estimated"), 0)


def test_a_random_unit_is_found_again_after_what_was_put_in_or_left_out():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        planned = [rng.choice("abcdefgh") for _ in range(rng.randrange(20, 200))]
        at, count = rng.randrange(len(planned) - 10), rng.randrange(0, 5)
        executed = [*planned[:at], *("z" * rng.randrange(0, 5)), *planned[at + count :]]
        follower = OperatorAligner(planned)
        places = [follower.find(index, name) for index, name in enumerate(executed)]
        assert places[:at] == list(range(at))
        for place, name in zip(places, executed, strict=True):
            assert place is None or planned[place] == name
        known = [place for place in places if place is not None]
        # Chance may put three letters in a row elsewhere, too; never out of the plan's reach.
        assert all(0 <= place < len(planned) for place in known)
    follower = OperatorAligner(NAMES)
    assert [follower.find(i, name) for i, name in enumerate(NAMES)] == list(range(6))
