"""What waits for a window on one rank: flips in what it keeps and in what it makes anew are found, nothing else is; and
whatever is about to change is verified before."""

import pytest
import torch

from ft.systems.dmr.plan.trace import D_INTER, NAIVE, PIGGYBACK, UNCHECKED
from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import Findings
from ft.systems.dmr.runtime.operators import call_of, state_before
from ft.systems.dmr.runtime.queue import Execution, Queue
from ft.systems.dmr.runtime.segments import RecomputationSteps, Segment
from ft.systems.dmr.runtime.strategy import AT_ONCE, WITH_RECOMPUTATION, Decision
from ft.systems.dmr.runtime.strategy import Segment as Replayed

aten = torch.ops.aten
MM, RELU, DROPOUT = aten.mm.default, aten.relu.default, aten.native_dropout.default


class Rank:
    """A queue with operators to feed it; ``executed``: so far."""

    def __init__(self, **queue):
        self.findings = Findings(torch.device("cpu"), 0)
        self.queue = Queue(self.findings, **queue)
        self.executed = 0

    def execute(self, func, *args, due: int | None = 0, replay=None, flip: bool = False, size: float = 0.0):
        """Executes an operator that is verified later; its results, and whether it waits."""
        call = call_of(func, args)
        state = state_before(call)
        out = func(*args)
        if flip:
            flipped(out)
        at = OperatorCall(call.kind.name, "backward", 0, 0, 1, self.executed)
        self.executed += 1
        decision = Decision(D_INTER, due, replay, 10.0, size)
        return out, self.queue.put(Execution(at, call, out, state), decision)

    def change(self, tensor):
        """Adds one in place, as the dispatcher does it."""
        self.queue.before_change([tensor])
        tensor.add_(1)

    @property
    def found(self) -> list:
        return [one.at.index for one in self.findings.settle()]


def flipped(out) -> None:
    first = out[0] if isinstance(out, tuple) else out
    # One bit of every element: operators that read some of them, or set some to zero, let it pass on.
    torch.as_strided(first, (first.numel(),), (1,)).view(torch.int32).bitwise_xor_(1 << 20)


@pytest.fixture
def square():
    return torch.randn(8, 8)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("func, rest", [(MM, True), (DROPOUT, False)])
def test_a_deferred_operator_is_verified_in_its_window_and_not_before(square, func, rest, flip):
    rank = Rank()
    generator = torch.get_rng_state()
    args = (square, square) if rest else (square, 0.5, True)
    rank.execute(func, *args, due=3, flip=flip)
    drawn = torch.get_rng_state()
    rank.queue.window(2)
    assert rank.queue and not rank.found
    rank.queue.window(3)
    assert not rank.queue and rank.found == ([0] if flip else [])
    assert (rank.queue.in_windows, rank.queue.late) == (1, 0)
    assert torch.equal(torch.get_rng_state(), drawn) and (rest or not torch.equal(drawn, generator))


@pytest.mark.parametrize("flip", [False, True])
def test_what_is_about_to_change_is_verified_first(square, flip):
    rank = Rank()
    out, _ = rank.execute(MM, square, square, due=9, flip=flip)
    other, _ = rank.execute(RELU, torch.randn(4), due=9)
    rank.change(square.t()[2:])
    assert rank.found == ([0] if flip else []) and rank.queue.early == 1
    rank.change(other)
    rank.change(out)
    assert not rank.queue and rank.queue.early == 2
    rank.queue.drain()
    assert rank.found == ([0] if flip else []) and rank.queue.late == 0


@pytest.mark.parametrize("flip", [False, True])
def test_results_that_the_schedule_gives_up_are_still_verified(square, flip):
    rank = Rank()
    out, _ = rank.execute(MM, square, square, due=5, flip=flip)
    out.data = torch.empty(1)
    del out
    rank.queue.window(5)
    assert rank.found == ([0] if flip else [])


def test_a_change_unseen_by_the_dispatcher_is_told(square):
    rank = Rank()
    rank.execute(MM, square, square, due=5)
    square.add_(1)
    rank.queue.window(5)
    assert "unseen by torch's dispatcher" in rank.findings.settle()[0].note


def test_what_found_no_window_is_late(square):
    rank = Rank(segments={"agc": Replayed(2, 9)})
    rank.execute(MM, square, square, due=9)
    rank.execute(MM, square, square, replay="agc")
    rank.execute(MM, square, square, replay="agc")
    rank.queue.drain()
    assert (rank.queue.late, rank.queue.in_windows, bool(rank.queue), rank.found) == (3, 0, False, [])


def replayed(rank: Rank, square, flip: int | None = None):
    """Three operators of an AGC segment, with a result of number ``flip`` falsified; what comes out."""
    first, _ = rank.execute(MM, square, square, replay="agc", flip=flip == 0)
    view = first.t()[1:5]
    second, _ = rank.execute(RELU, view, replay="agc", flip=flip == 1)
    third, _ = rank.execute(DROPOUT, second, 0.5, True, replay="agc", flip=flip == 2)
    return third[0]


@pytest.mark.parametrize("flip", [None, 0, 1, 2])
def test_a_flip_inside_a_replayed_segment_is_found_where_it_happened(square, flip):
    rank = Rank(segments={"agc": Replayed(3, 3)})
    replayed(rank, square, flip)
    state = torch.get_rng_state()
    rank.queue.window(2)
    assert rank.queue and not rank.found
    rank.queue.window(3)
    assert not rank.queue and rank.queue.in_windows == 3
    # The replay goes on with what is right: what a wrong result has led to differs, too.
    assert rank.found == ([] if flip is None else list(range(flip, 3)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("flip", [None, 1])
def test_a_segment_whose_input_changes_is_replayed_before_and_the_rest_at_once(square, flip):
    rank = Rank(segments={"agc": Replayed(4, 9)})
    replayed(rank, square, flip)
    rank.change(square)
    assert rank.queue.early == 3 and not rank.queue
    assert rank.found == ([] if flip is None else [1, 2])
    _, waits = rank.execute(MM, square, square, replay="agc")
    assert not waits


def test_what_a_segment_made_and_somebody_rewrote_is_not_replayed_as_it_was(square):
    rank = Rank(segments={"agc": Replayed(2, 2)})
    made, _ = rank.execute(MM, square, square, replay="agc")
    rank.change(made)
    rank.execute(RELU, made, replay="agc")
    rank.queue.window(2)
    assert rank.queue.in_windows == 2 and not rank.found


def test_waiting_memory_is_limited_where_windows_are_not_planned(square):
    rank = Rank(headroom=1000.0)
    for _ in range(4):
        rank.execute(MM, square, square, due=None, size=400.0)
    assert rank.queue.early == 2
    rank.queue.dynamic_window(lambda: False)
    assert (rank.queue.in_windows, bool(rank.queue), rank.found) == (2, False, [])


def test_a_dynamic_window_takes_what_ends_within_it(square):
    rank = Rank(headroom=1e9, dynamic_us=[5.0, 1e9])
    rank.execute(MM, square, square, due=None)
    rank.queue.dynamic_window(lambda: False)
    assert rank.queue.in_windows == 0
    rank.queue.dynamic_window(lambda: False)
    assert rank.queue.in_windows == 1
    rank = Rank(headroom=1e9)
    rank.execute(MM, square, square, due=None)
    rank.queue.dynamic_window(lambda: True)
    assert rank.queue.in_windows == 0
    rank.change(square)
    rank.queue.dynamic_window(lambda: False)
    assert (rank.queue.in_windows, rank.queue.early) == (0, 1)


def test_memory_that_several_wait_for_counts_once_and_parameters_not_at_all(square):
    weight = torch.randn(8, 8)
    rank = Rank(lasting={weight.untyped_storage()._cdata})
    out, _ = rank.execute(MM, square, weight, due=5)
    rank.execute(MM, out, weight, due=6)
    assert rank.queue.most_bytes == 3 * square.nbytes
    rank.queue.window(6)
    rank.execute(MM, square, weight, due=9)
    assert rank.queue.most_bytes == 3 * square.nbytes


def test_a_segment_keeps_its_boundary_and_not_what_it_makes(square):
    rank = Rank(segments={"agc": Replayed(3, 3)})
    replayed(rank, square)
    assert rank.queue.most_bytes == square.nbytes
    rank.queue.window(3)
    rank.execute(MM, square, square, due=9)
    assert rank.queue.most_bytes == 2 * square.nbytes


def test_an_iteration_that_was_broken_off_leaves_nothing_behind(square):
    rank = Rank(segments={"agc": Replayed(2, 1)}, headroom=1e9)
    rank.execute(MM, square, square, flip=True)
    rank.execute(MM, square, square, due=None, flip=True)
    rank.execute(MM, square, square, replay="agc", flip=True)
    rank.queue.restart()
    rank.queue.window(99)
    rank.queue.dynamic_window(lambda: False)
    rank.queue.drain()
    assert not rank.queue and not rank.found


DEFERRED, LEFT_OUT = Decision(D_INTER, 5), Decision(UNCHECKED)


@pytest.mark.parametrize(
    "forward, again, settled",
    [
        ([WITH_RECOMPUTATION, AT_ONCE], [WITH_RECOMPUTATION, AT_ONCE], [PIGGYBACK, NAIVE]),
        # The run is not as it was planned: forward and recomputation stand at different places of the plan.
        ([WITH_RECOMPUTATION, WITH_RECOMPUTATION], [DEFERRED, AT_ONCE], [PIGGYBACK, PIGGYBACK]),
        ([AT_ONCE, DEFERRED], [WITH_RECOMPUTATION, WITH_RECOMPUTATION], [NAIVE, NAIVE]),
        # What the forward had not is left to the segment, which verifies it at once (Segment.is_extra).
        ([AT_ONCE], [DEFERRED, WITH_RECOMPUTATION], [D_INTER, PIGGYBACK]),
        ([LEFT_OUT, AT_ONCE], [LEFT_OUT, WITH_RECOMPUTATION], [UNCHECKED, NAIVE]),
    ],
)
def test_forward_and_recomputation_agree_on_what_they_compare(forward, again, settled):
    segment = Segment(Findings(torch.device("cpu"), 0), RecomputationSteps())
    assert [segment.settle(one, "mul", again=False) for one in forward] == forward
    segment.begin_again()
    assert [segment.settle(one, "mul", again=True).set for one in again] == settled
