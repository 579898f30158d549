"""The loop around an iteration: computed, compared, taken once more where anything differed anywhere."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ft.base.errors import FtError, RecoverableError, ReplaceNodeError, UserError
from ft.protection.undo import Undo
from ft.systems.dmr.runtime import suspects
from ft.systems.dmr.runtime.engine import Engine
from ft.systems.dmr.runtime.suspects import EVICT, GIVE_UP, Limits, Outcome, Reports

Result = TypeVar("Result")


class CorruptionError(FtError):
    """An iteration turned out wrong again and again, and nobody can be blamed, or nobody is there to take over."""


class UnstableError(CorruptionError, UserError):
    """The same, and several ranks differ by one operator: the flags can make it right, no other device can."""


class SuspectError(ReplaceNodeError):
    """This rank computes wrongly again and again: its node is given up."""


class InterruptedStepError(RecoverableError):
    """An iteration ended with an error that wrong numbers may have caused."""


_OF_WRONG_NUMBERS = (IndexError, ValueError)


class Witness(Protocol):
    """Who is told what was found."""

    can_evict: bool
    """A standby may take a suspect's place."""

    def mismatch(self, step: int, attempt: int, reports: Reports, outcome: Outcome) -> None:
        """An attempt at a step went wrong on the ranks of ``reports``; called on all ranks."""

    def clean(self, step: int, attempt: int) -> None:
        """An attempt went right after earlier ones had not."""

    def covered(self, step: int, strategy: str, counts: Mapping[str, int]) -> None:
        """How the operators of this rank's first iteration were verified."""


class Protection:
    """Of one rank, for the whole run.

    Args:
        limits: when a fault counts as permanent. strategy: the name of how operators are verified.
    """

    def __init__(self, engine: Engine, undo: Undo, witness: Witness, limits: Limits, strategy: str):
        self.engine, self._undo, self._witness, self._limits = engine, undo, witness, limits
        self._strategy: str | None = strategy
        self._memory = suspects.Memory(limits.memory)

    def before_update(self) -> None:
        """The optimizer is about to step."""
        if self.engine.is_active:
            self.engine.before_update()
            self._undo.wait()

    def carry(self, step: int, microbatches: int, work: Callable[[], Result]) -> Result:
        """Runs ``work``, a whole iteration, until it has been computed rightly on all ranks. Collective.

        Raises:
            SuspectError: on a rank that is at fault, where somebody can take over.
            CorruptionError: on all ranks, where nobody can, or nobody is known to be at fault (UnstableError: as it is
                rather an operator).
        """
        attempts: list[Reports] = []
        while True:
            self._undo.begin()
            with self.engine.iteration(microbatches):
                result = self._attempt(step, work)
            reports, earlier = self._agree(self.engine.flag(), step)
            if not reports:
                self._end(step, attempts)
                return result
            attempts.append(reports)
            outcome = suspects.decide(attempts, earlier, self._limits)
            self._witness.mismatch(step, len(attempts), reports, outcome)
            self._answer(outcome, step)
            self._undo.back()

    def _attempt(self, step: int, work: Callable[[], Result]) -> Result:
        """A wrong index or size may end an iteration before it is compared: where that is likely, the step is taken
        once more in place, by hot-swap, and the worker replaced only if it goes on."""
        try:
            return work()
        except FtError:
            raise
        except Exception as error:
            if not self._witness.can_evict or not (
                self.engine.findings.any_known or isinstance(error, _OF_WRONG_NUMBERS)
            ):
                raise
            raise InterruptedStepError(f"step {step} ended with {type(error).__name__}: {error}") from error

    def _agree(self, flag: torch.Tensor, step: int) -> tuple[Reports, dict[int, suspects.Wrong]]:
        """What all ranks have found, and each one's earlier wrong attempts; nothing on all of them where nobody has
        found anything. One flag, and one look at it."""
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not flag.item():
            return {}, {}
        told: list[Any] = [None] * dist.get_world_size()
        own = self.engine.settle()[:_MOST_TOLD]
        dist.all_gather_object(told, (own, self._memory.before(step)))
        return (
            {rank: tuple(found) for rank, (found, _) in enumerate(told) if found},
            {rank: earlier for rank, (_, earlier) in enumerate(told)},
        )

    def _end(self, step: int, attempts: list[Reports]) -> None:
        if self._strategy is not None:
            self._witness.covered(step, self._strategy, self.engine.coverage())
            self._strategy = None
        if not attempts:
            return
        rank = dist.get_rank()
        self._memory.note(step, [reports.get(rank, ()) for reports in attempts])
        self._witness.clean(step, len(attempts) + 1)

    def _answer(self, outcome: Outcome, step: int) -> None:
        if outcome.action == GIVE_UP and outcome.fix:
            raise UnstableError(f"step {step}: {outcome.reason}", outcome.fix)
        if outcome.action == GIVE_UP:
            raise CorruptionError(f"step {step}: {outcome.reason}")
        if outcome.action != EVICT:
            return
        if not self._witness.can_evict:
            ranks = ", ".join(map(str, outcome.ranks))
            raise CorruptionError(f"step {step}: {outcome.reason} (rank {ranks}); run with --ft-hot-swap and a standby")
        if dist.get_rank() in outcome.ranks:
            raise SuspectError(f"silent data corruption: {outcome.reason}")


_MOST_TOLD = 50
"""Mismatches that one rank tells of: what is wrong early makes much else wrong, too."""
