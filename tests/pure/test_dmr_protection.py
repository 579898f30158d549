"""An iteration that ends with an error, where wrong numbers may be the reason; the share of operators that is verified,
and when its fall is told."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from ft.base.errors import EpochClosed, RecoverableError, UserError
from ft.faults import verdict
from ft.systems.dmr.runtime.protection import (
    PARTS,
    CorruptionError,
    Coverage,
    InterruptedStepError,
    IterationVerifier,
    missing,
)
from ft.systems.dmr.runtime.suspects import GIVE_UP, Limits, Outcome


def protection(*, can_evict: bool, any_known: bool) -> IterationVerifier:
    findings = SimpleNamespace(any_known=any_known)
    engine = SimpleNamespace(findings=findings, iteration=lambda microbatches, learns: nullcontext())
    undo = SimpleNamespace(begin=lambda: None)
    trainer = SimpleNamespace(step=4, batch_now=8, microbatches=lambda samples: 1)
    return IterationVerifier(trainer, engine, undo, SimpleNamespace(can_evict=can_evict), Limits(), "naive")


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


@pytest.mark.parametrize(
    "counts, share",
    [
        ({}, 1.0),
        ({"naive": 3, "P": 5, "opaque": 2}, 1.0),
        ({"naive": 6, "unchecked": 2}, 0.75),
        ({"D_inter": 8, "in windows": 5, "late": 3, "not in the plan": 4, "unverified": 2}, 0.75),
        ({"unchecked": 2, "unverified": 1}, 0.0),
    ],
)
def test_what_nothing_compares_is_missing(counts, share):
    assert missing(counts) == round(PARTS * (1.0 - share))


def test_a_fall_is_told_once_and_again_after_a_rise():
    coverage = Coverage()
    shares = [0.98, 0.98, 0.9, 0.9, 0.95, 0.9, 0.8999, 0.8985]
    told = [coverage.note(round(PARTS * (1.0 - share))) for share in shares]
    assert [None if one is None else round(one, 4) for one in told] == [None, None, 0.98, None, None, 0.95, None, 0.9]
    assert coverage.share == pytest.approx(0.8985)
