"""A forward held against a recomputation that has operators of its own."""

import random

import pytest
import torch

from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import Findings
from ft.systems.dmr.runtime.segments import RecomputationSteps, Segment

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
def draw():
    seed = random.randrange(1 << 30)
    print("seed", seed)
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
