"""The reordering controller against solvers of another kind, over whole histories of losses and returns."""

import importlib.util
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spare_flow import least_cost, least_stack

from ft import cli
from ft.base.errors import UserError
from ft.systems.spare.controller import Controller
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import largest_redundancy, ruler

NUMBA = importlib.util.find_spec("numba") is not None

SIZES = [(3, 2), (6, 2), (7, 3), (13, 4), (20, 4), (21, 5), (31, 6), (40, 5)]


def controller(groups: int, redundancy: int, accelerate: bool | None = False) -> Controller:
    return Controller(Placement(groups, ruler(groups, redundancy)), accelerate)


def missing(orders: np.ndarray, alive: np.ndarray, stack: int) -> set[int]:
    return set(range(len(orders))) - {int(kind) for group in np.flatnonzero(alive) for kind in orders[group, :stack]}


def check_layout(kept: Controller) -> None:
    """Nobody misses a type, its owner has it in time, and no group holds anything that is not its own."""
    owners = kept.owners
    assert kept.alive[owners].all()
    assert all(kind in kept.orders[owners[kind], : kept.stack] for kind in range(kept.groups))
    assert not missing(kept.orders, kept.alive, kept.stack)
    assert np.array_equal(np.sort(kept.orders), np.sort(kept.placement.orders()))


def check_step(before: Controller, after: Controller, done, free: int | None = None) -> None:
    """One call against the independent solver: the least stack, the least movement, and the moves that are told."""
    check_layout(after)
    assert done.stack == after.stack == least_stack(before.orders, after.alive)
    cost = sum(move.from_position is not None for move in done.moves)
    base = before.orders.copy()
    if free is not None:
        base[free] = before.placement.order(free)
    assert cost == least_cost(base, after.alive, done.stack, free)
    for move in done.moves:
        assert after.orders[move.group, move.to_position] == move.kind and move.to_position < done.stack
        if move.from_position is not None:
            assert base[move.group, move.from_position] == move.kind and move.from_position >= done.stack
    assert done.phase == (2 if done.moves else 1 if after.stack != before.stack else 0)


def copy(kept: Controller) -> Controller:
    return Controller.restore(kept.state())


def live(kept: Controller, rng: random.Random, events: int, most: int, returns: float = 0.0) -> bool:
    """Lose up to ``most`` groups at once, or bring one back; check each call, and return whether a type was wiped out.

    A wipe-out ends it if no group ever returns.
    """
    wiped = False
    for _ in range(events):
        before, living = copy(kept), np.flatnonzero(kept.alive).tolist()
        away = sorted(set(range(kept.groups)) - set(living))
        if away and rng.random() < returns:
            group = rng.choice(away)
            check_step(before, kept, kept.bring_back(group), free=group)
            continue
        lost = rng.sample(living, min(len(living), rng.randint(1, most)))
        survivors = before.alive
        survivors[lost] = False
        done = kept.lose(lost)
        assert set(done.patch_types) == missing(before.orders, survivors, before.stack)
        assert set(done.wipe_out) == missing(before.orders, survivors, kept.redundancy)
        if done.wipe_out:
            wiped = True
            assert least_stack(before.orders, survivors) is None and kept.state() == before.state()
            if not returns:
                break
        else:
            check_step(before, kept, done)
    return wiped


@pytest.mark.parametrize(("groups", "redundancy"), SIZES)
@pytest.mark.parametrize(("most", "returns"), [(1, 0.0), (3, 0.5)])
def test_every_loss_and_return_has_the_least_stack_and_the_least_movement(groups, redundancy, most, returns):
    for seed in range(4):
        print(f"seed {seed}")
        kept = controller(groups, redundancy)
        assert live(kept, random.Random(seed), 12 if returns else groups, most, returns) or returns


@pytest.mark.parametrize(("groups", "redundancy"), [(40, 4), (60, 3)])
def test_survivors_with_slots_enough_may_need_a_deeper_stack_all_the_same(groups, redundancy):
    """Seldom: some types have their hosts in too few groups. What was tried with fewer stacks leaves no trace then."""
    met = 0
    for seed in range(400):
        rng, kept = random.Random(seed), controller(groups, redundancy)
        while True:
            before = copy(kept)
            living = np.flatnonzero(kept.alive).tolist()
            done = kept.lose(rng.sample(living, min(len(living), rng.randint(1, groups // 4))))
            if done.wipe_out:
                break
            if done.stack > max(before.stack, -(-groups // int(kept.alive.sum()))):
                print(f"seed {seed}")
                met += 1
                check_step(before, kept, done)
    assert met


@pytest.mark.parametrize(("groups", "redundancy"), [(40, 5), (57, 7), (60, 6)])
def test_many_losses_at_once_near_the_capacity_of_the_survivors(groups, redundancy):
    """The first attempts at a stack then fail after some types were assigned, and paths of several moves are needed."""
    for seed in range(12):
        print(f"seed {seed}")
        rng, kept = random.Random(seed), controller(groups, redundancy)
        kept.lose(rng.sample(range(groups), groups // 2 - 4))
        live(kept, rng, 3, 6)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_groups_of_any_size_lost_at_once_and_brought_back(data):
    groups = data.draw(st.integers(3, 60), label="groups")
    redundancy = data.draw(st.integers(2, largest_redundancy(groups)), label="redundancy")
    lost = data.draw(st.lists(st.integers(0, groups - 1), unique=True, max_size=groups // 2 + 1), label="lost")
    kept = controller(groups, redundancy)
    before = copy(kept)
    done = kept.lose(lost)
    if done.wipe_out:
        assert all(set(kept.placement.hosts(kind)) <= set(lost) for kind in done.wipe_out)
        assert kept.state() == before.state()
        return
    check_step(before, kept, done)
    for group in lost:
        before = copy(kept)
        check_step(before, kept, kept.bring_back(group), free=group)
    assert kept.stack == 1


@pytest.mark.parametrize(
    ("groups", "marks"), [(2, (0, 1)), (4, (0, 1, 2, 3)), (6, (0, 2, 3)), (5, (3, 0)), (9, (4, 1, 7))]
)
def test_a_placement_whose_types_share_more_groups_is_reordered_as_exactly(groups, marks):
    for seed in range(5):
        print(f"seed {seed}")
        live(Controller(Placement(groups, marks)), random.Random(seed), 10, 1, 0.4)


@pytest.mark.parametrize(("groups", "redundancy"), [(200, 8), (1000, 26)])
def test_at_the_size_of_the_paper_scipy_finds_the_same_stack_and_the_same_cost(groups, redundancy):
    rng, kept = random.Random(11), controller(groups, redundancy)
    for i, group in enumerate(rng.sample(range(groups), groups)):
        before = kept.orders if i % (groups // 12) == 0 else None
        done = kept.lose([group])
        if before is not None or done.wipe_out:
            alive = kept.alive
            alive[group] = False
            assert least_stack(kept.orders, alive) == (None if done.wipe_out else done.stack)
        if done.wipe_out:
            break
        if before is not None:
            assert least_cost(before, kept.alive, done.stack) == len(done.moves)
    check_layout(kept)


@pytest.mark.skipif(not NUMBA, reason="numba is not installed (pip install numba)")
@pytest.mark.parametrize(("groups", "redundancy"), [(13, 4), (100, 7)])
def test_compiled_and_interpreted_make_the_same_layouts(groups, redundancy):
    for seed in range(3):
        print(f"seed {seed}")
        rng = random.Random(seed)
        one, two = controller(groups, redundancy, True), controller(groups, redundancy, False)
        for _ in range(60):
            away = np.flatnonzero(~one.alive).tolist()
            if away and rng.random() < 0.2:
                group = rng.choice(away)
                assert one.bring_back(group) == two.bring_back(group)
            else:
                lost = rng.sample(np.flatnonzero(one.alive).tolist(), rng.choice((1, 1, 2)))
                assert one.lose(lost) == two.lose(lost)
            assert one.state() == two.state()


def test_numba_that_cannot_be_imported_is_missed_only_where_it_is_asked_for(monkeypatch):
    def fail():
        raise ImportError("no module named numba")

    monkeypatch.setattr("ft.systems.spare.controller.controller._compiled", fail)
    with pytest.raises(UserError, match="no module named numba"):
        controller(13, 4, True)
    assert controller(13, 4, None).lose([1]).stack == 2


def test_the_first_loss_makes_the_stack_two():
    for groups, redundancy in SIZES:
        done = controller(groups, redundancy).lose([1])
        assert done.stack == 2
        assert done.patch_types == (1,)


def test_when_all_are_back_the_stack_is_one_again():
    kept = controller(13, 4)
    kept.lose([3, 4, 9])
    for group in (4, 9, 3):
        done = kept.bring_back(group)
    assert done.stack == kept.stack == 1
    check_layout(kept)


def test_a_reset_forgets_everything():
    kept = controller(13, 4)
    kept.lose([3, 4])
    kept.reset()
    assert kept.state() == controller(13, 4).state()


def test_the_same_losses_give_the_same_layout_and_a_saved_state_goes_on_alike():
    one, two = controller(31, 6), controller(31, 6)
    losses = random.Random(3).sample(range(31), 12)
    for i, group in enumerate(losses):
        if i == 6:
            two = Controller.restore(json.loads(json.dumps(two.state())))
        assert one.lose([group]) == two.lose([group])
    assert one.state() == two.state()


def test_losing_nobody_changes_nothing():
    done = controller(7, 3).lose([])
    assert (done.stack, done.phase, done.moves, done.patch_types) == (1, 0, (), ())


@pytest.mark.parametrize("lost", [[13], [-1], [2, 2]])
def test_losses_that_cannot_be_are_refused_and_change_nothing(lost):
    kept = controller(13, 4)
    with pytest.raises(UserError) as refused:
        kept.lose(lost)
    assert refused.value.fix and kept.state() == controller(13, 4).state()


def test_a_group_is_lost_once_and_returns_once():
    kept = controller(13, 4)
    kept.lose([5])
    with pytest.raises(UserError, match="lost already"):
        kept.lose([5])
    kept.bring_back(5)
    with pytest.raises(UserError, match="not lost"):
        kept.bring_back(5)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.pop("orders"),
        lambda state: state["orders"].pop(),
        lambda state: state["orders"][0].__setitem__(0, 99),
        lambda state: state.update(stack="two"),
        lambda state: state["owners"].pop(),
    ],
)
def test_the_state_of_another_version_is_refused(spoil):
    state = controller(13, 4).state()
    spoil(state)
    with pytest.raises(UserError, match="saved state"):
        Controller.restore(state)


# --- ft plan spare reorder, of which the rest is in conversations/plan/spare.txt --------------------------------------


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


@pytest.mark.parametrize(
    "words", ["--groups 20 --redundancy 4 --failed 1,2,5", "--groups 7 --redundancy 3 --failed 0..4"]
)
def test_people_get_text(words, capsys):
    assert cli.main(["plan", "spare", "reorder", *words.split()]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 3
