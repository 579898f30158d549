"""Parts of DMR's runtime by themselves: units that are found again, what a recomputation is held against, what ranks
agree on, how much of a window is used, and what an error or an uncovered operator leads to.

How a plan is followed is in ``conversations/followed``.
"""

import math
import pickle
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from part_conversations import Followed

from ft.base.errors import EpochClosed, RecoverableError, UserError
from ft.faults import verdict
from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import Findings
from ft.systems.dmr.runtime.opaque import Knowledge, agree
from ft.systems.dmr.runtime.protection import (
    PARTS,
    CorruptionError,
    Coverage,
    InterruptedStepError,
    IterationVerifier,
)
from ft.systems.dmr.runtime.queue import DeviceTime, HostTime, spent_on
from ft.systems.dmr.runtime.segments import RecomputationSteps, Segment
from ft.systems.dmr.runtime.strategy import OperatorAligner
from ft.systems.dmr.runtime.suspects import GIVE_UP, AttemptLimits, Outcome

# operators of a unit that are found again


def test_a_random_unit_is_found_again_after_what_was_put_in_or_left_out(seed):
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
    follower = OperatorAligner(Followed.NAMES)
    assert [follower.find(i, name) for i, name in enumerate(Followed.NAMES)] == list(range(6))


# a forward held against a recomputation that has operators of its own


FORWARD = ["mm", "softmax", "topk", "sum", "mul", "mm"]
EXTRA = {3: "sum", 4: "mul", 7: "mul"}
"""Place in the recomputation -> an operator that the forward did not have."""


def carry(scripts: RecomputationSteps, draw: random.Random, *, extras=EXTRA, wrong_forward=None, wrong_again=None):
    """A forward and its recomputation; (mismatches, operators verified by themselves, unverified)."""
    findings = Findings(torch.device("cpu"), 5)
    segment, alone = Segment(findings, scripts), []
    results = [torch.tensor([float(draw.randrange(1 << 20))]) for _ in FORWARD]
    for number, (name, result) in enumerate(zip(FORWARD, results, strict=True)):
        segment.primary(at(name, number), [result + 1 if number == wrong_forward else result])
    again = [(name, result, False) for name, result in zip(FORWARD, results, strict=True)]
    for place, name in sorted(extras.items()):
        again.insert(place, (name, torch.tensor([float(draw.randrange(1 << 20))]), True))
    segment.begin_again()
    for number, (name, result, is_extra) in enumerate(again):
        if segment.is_extra(name):
            alone.append((number, is_extra))
        segment.again(at(name, number), [result + 1 if number == wrong_again else result])
    segment.end_again()
    return findings.settle(), alone, findings.unverified


def at(name: str, index: int) -> OperatorCall:
    return OperatorCall(name, "forward", 0, 0, 1, index)


@pytest.fixture
def draw(seed):
    return random.Random(seed)


def learnt(draw) -> RecomputationSteps:
    scripts = RecomputationSteps()
    for _ in range(3):
        found, alone, _ = carry(scripts, draw)
        assert found == [] and alone
    return scripts


def test_operators_of_the_recomputation_alone_are_no_mismatch_and_soon_known(draw):
    found, alone, unverified = carry(learnt(draw), draw)
    assert (found, unverified) == ([], 0)
    assert [number for number, _ in alone] == sorted(EXTRA) and all(is_extra for _, is_extra in alone)


@pytest.mark.parametrize("knows", [False, True])
def test_each_wrong_result_with_a_partner_is_found(knows, draw):
    for number in range(len(FORWARD)):
        found, _, _ = carry(learnt(draw) if knows else RecomputationSteps(), draw, wrong_forward=number)
        assert FORWARD[number] in {one.at.operator for one in found}
    for place in range(len(FORWARD) + len(EXTRA)):
        found, _, _ = carry(learnt(draw) if knows else RecomputationSteps(), draw, wrong_again=place)
        assert bool(found) == (place not in EXTRA), "an operator without a partner is verified by itself"


def test_nothing_is_learnt_from_a_mismatch_and_what_was_learnt_is_given_up_when_it_fits_no_more(draw):
    scripts = RecomputationSteps()
    for _ in range(5):
        carry(scripts, draw, wrong_forward=1)
    assert not any(step.is_extra for step in scripts.of(FORWARD))
    scripts = learnt(draw)
    for _ in range(4):
        found, alone, _ = carry(scripts, draw, extras={1: "exp"})
        assert found == [] and alone
    assert [step.name for step in scripts.of(FORWARD) if step.is_extra] == ["exp"]


def test_without_extra_operators_nothing_is_verified_by_itself(draw):
    scripts = RecomputationSteps()
    for _ in range(4):
        assert carry(scripts, draw, extras={}) == ([], [], 0)


# what ranks agree on about functions that are executed as a whole


def seen(*, changed=(), forward=(("out",),), again=(("out",),), same=(True,)):
    """Return the knowledge of a rank that has called the function once per entry."""
    notes = Knowledge(is_pure=not changed)
    for paths in forward:
        notes.made_in_forward(paths)
    for is_same in same:
        notes.was_called_again(is_same)
    for paths in again:
        notes.made_again(paths)
    return notes


def test_a_function_waits_for_its_recomputation_only_if_that_holds_on_all_ranks():
    assert agree([{"f": seen()}, {"f": seen()}])["f"].can_wait
    assert not agree([{"f": seen()}, {"f": seen(changed=["history"])}])["f"].can_wait
    assert not agree([{"f": seen(same=[False])}, {"f": seen()}])["f"].can_wait
    assert not agree([{"f": seen(forward=(), again=())}])["f"].can_wait, "it was not called in a segment"


def test_a_rank_that_has_not_called_it_has_no_say():
    agreed = agree([{"f": seen()}, {}, {"g": seen(changed=["x"])}])
    assert agreed["f"].can_wait and not agreed["g"].can_wait


def test_one_call_of_another_function_at_its_place_is_enough_and_stays():
    assert not agree([{"f": seen(same=[True, False, True])}])["f"].is_recomputed


def test_what_is_compared_is_what_every_forward_pass_makes():
    known = agree([{"f": seen(forward=[("a", "b"), ("a", "c")])}, {"f": seen(forward=[("a", "b")])}])["f"]
    assert known.in_forward == {"a"}
    assert not agree([{"f": seen(again=[("out",)])}])["f"].keeps_more
    assert agree([{"f": seen()}, {"f": seen(again=[("out", "saved")])}])["f"].keeps_more


def test_it_can_be_sent_and_compared():
    assert pickle.loads(pickle.dumps(seen())) == seen()


# how much of a window is used, on a device whose operators are computed later than they are launched


class Device:
    """A device on which operators take ``factor`` times what was planned.

    Attributes:
        queued: microseconds of all work that was launched so far.
        done: microseconds of work that was computed so far.
    """

    def __init__(self, factor: float):
        self.factor, self.queued, self.done = factor, 0.0, 0.0

    def event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, device: Device):
        self._device = device

    def record(self) -> None:
        self.at = self._device.queued

    def query(self) -> bool:
        return self._device.done >= self.at

    def elapsed_time(self, other: "Event") -> float:
        assert self.query() and other.query(), "the host would wait for the device"
        return (other.at - self.at) / 1e3


def window(spent: DeviceTime, device: Device, lasts: float, each: float) -> float:
    """Launch operators of ``each`` planned microseconds while they fit; return their time on the device."""
    began = device.queued
    spent.opens(lasts)
    while spent.room() >= each:
        spent.launches(each)
        device.queued += each * device.factor
    spent.closes()
    return device.queued - began


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_no_more_is_launched_than_fits_once_the_device_is_known(factor):
    device = Device(factor)
    spent, used = DeviceTime(device.event), []
    for _ in range(40):
        spent.restart()
        used += [window(spent, device, lasts, 10.0) for lasts in (400.0, 1000.0)]
        device.done = device.queued
    assert 0.9 * 400 <= used[-2] <= 1.01 * 400 and 0.9 * 1000 <= used[-1] <= 1.01 * 1000, used


def test_windows_that_the_device_has_not_passed_are_read_later():
    device = Device(2.0)
    spent = DeviceTime(device.event)
    spent.restart()
    assert window(spent, device, 100.0, 10.0) == 200.0
    spent.restart()  # nothing is done yet
    assert window(spent, device, 100.0, 10.0) == 200.0
    device.done = device.queued
    spent.restart()
    assert window(spent, device, 100.0, 10.0) < 160.0


def test_into_a_window_of_unknown_duration_a_device_gets_nothing():
    spent = DeviceTime(Device(1.0).event)
    spent.opens(math.inf)
    assert spent.room() == 0.0
    spent.closes()


def test_on_a_cpu_the_clock_counts():
    spent = spent_on(torch.device("cpu"))
    assert isinstance(spent, HostTime)
    spent.opens(1e9)
    first = spent.room()
    spent.launches(5e8)
    assert first < 1e9 and first - 1e8 < spent.room() < first
    spent.opens(math.inf)
    assert spent.room() == math.inf


# errors, and the share of operators that is verified


def protection(*, can_evict: bool, any_known: bool) -> IterationVerifier:
    findings = SimpleNamespace(any_known=any_known)
    engine = SimpleNamespace(findings=findings, iteration=lambda microbatches, learns: nullcontext())
    undo = SimpleNamespace(begin=lambda: None)
    trainer = SimpleNamespace(step=4, batch_now=8, microbatches=lambda samples: 1)
    return IterationVerifier(trainer, engine, undo, SimpleNamespace(can_evict=can_evict), AttemptLimits(), "naive")


def failing(error: Exception):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    "error, can_evict, any_known, raised",
    [
        (IndexError("index 900 is out of range"), True, False, InterruptedStepError),
        (RuntimeError("split_with_sizes"), True, True, InterruptedStepError),
        (RuntimeError("anything"), True, False, RuntimeError),
        (IndexError("nobody could take over"), False, True, IndexError),
        (EpochClosed(3, "a worker died"), True, True, EpochClosed),
    ],
)
def test_an_error_that_wrong_numbers_explain_is_one_to_try_again(error, can_evict, any_known, raised):
    with pytest.raises(raised) as found:
        protection(can_evict=can_evict, any_known=any_known).compute(failing(error))
    assert type(found.value) is raised
    assert raised is not InterruptedStepError or isinstance(found.value, RecoverableError)


@pytest.mark.parametrize("fix, action", [("ft dmr selftest", verdict.STOP), ("", verdict.RESTART)])
def test_an_operator_that_is_not_reproducible_stops_the_run_for_no_other_worker_computes_it_better(fix, action):
    with pytest.raises(CorruptionError, match="step 5: mm differed") as found:
        protection(can_evict=True, any_known=True)._answer(Outcome(GIVE_UP, reason="mm differed", fix=fix), 5)
    kinds = [kind.__name__ for kind in type(found.value).__mro__]
    assert verdict.of_error(kinds, str(found.value)).action == action
    assert isinstance(found.value, UserError) == bool(fix) == ("fix: ft dmr selftest" in str(found.value))


def test_a_fall_is_told_once_and_again_after_a_rise():
    coverage = Coverage()
    shares = [0.98, 0.98, 0.9, 0.9, 0.95, 0.9, 0.8999, 0.8985]
    told = [coverage.note(round(PARTS * (1.0 - share))) for share in shares]
    assert [None if one is None else round(one, 4) for one in told] == [None, None, 0.98, None, None, 0.95, None, 0.9]
    assert coverage.share == pytest.approx(0.8985)
