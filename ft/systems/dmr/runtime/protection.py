"""DMR around a training iteration: verify the iteration, and repeat it if it is wrong.

Every operator is executed twice and the results are compared. If they differ on any rank, all ranks restore the state
before the iteration and repeat it. What is found is reported as lines on the terminal, and as events in the event file
of the run if there is one; so is a fall of the share of operators that are verified.
"""

import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ft.base import events
from ft.base.errors import FtError, RecoverableError, ReplaceNodeError, UserError
from ft.platform import devices
from ft.protection.contract import Layer, StepUndone, Trainer, Update
from ft.protection.undo import SharedCopy, Undo
from ft.systems.dmr.digest import digest
from ft.systems.dmr.plan.trace import SETS, UNCHECKED
from ft.systems.dmr.runtime import suspects
from ft.systems.dmr.runtime.engine import Engine
from ft.systems.dmr.runtime.findings import Rows
from ft.systems.dmr.runtime.opaque import OPAQUE
from ft.systems.dmr.runtime.suspects import EVICT, GIVE_UP, AttemptLimits, Outcome, Reports

if TYPE_CHECKING:
    from ft.worker.session import Session

_MOST_TOLD, _MOST_EVENTS, _MOST_LINES = 50, 20, 3
"""Number of mismatches in a step that one rank passes on to the others (an early error makes many later results wrong),
and of those, how many become events and lines on the terminal."""
_SEED = 0
"""Seed of the digests by which worlds compare their tensors; their runs may have different fingerprints."""
UNVERIFIED = "unverified"
PARTS = 1_000_000
_TOLERANCE = PARTS // 1000
"""A change by less than a thousandth is not told: operators differ a little from step to step, as with experts."""


def missing(counts: Mapping[str, int]) -> int:
    """Return the share of the executed operators that nothing verifies, in millionths. ``counts``: way of verification
    -> number of operators (``engine.Engine.coverage``)."""
    executed = sum(counts.get(name, 0) for name in (*SETS, OPAQUE))
    left_out = counts.get(UNCHECKED, 0) + counts.get(UNVERIFIED, 0)
    return min(PARTS, round(PARTS * left_out / executed)) if executed else 0


class Coverage:
    """The coverage of steps, one after the other. ``share``: share of the last step's operators that were verified, on
    the rank with the least; 1.0 before the first."""

    def __init__(self) -> None:
        self.share = 1.0
        self._told: float | None = None

    def note(self, missing: int) -> float | None:
        """Note the millionths of a step's operators that nothing verifies, on the rank with the most. Return the
        coverage that was usual before if this one is lower, otherwise None. A fall is told once."""
        self.share = 1.0 - missing / PARTS
        before, has_moved = self._told, self._told is None or abs(self.share - self._told) * PARTS >= _TOLERANCE
        if has_moved:
            self._told = self.share
        return before if has_moved and before is not None and self.share < before else None


class CorruptionError(FtError):
    """An iteration was wrong repeatedly, and either the rank at fault is unknown or no standby can replace it."""


class UnstableError(CorruptionError, UserError):
    """A ``CorruptionError`` whose cause is taken to be a non-reproducible operator, because its two executions differed
    on several ranks. The user can exclude the operator by flags; replacing a device does not help."""


class SuspectError(ReplaceNodeError):
    """This rank has computed wrong results repeatedly, so its node has to be replaced."""


class InterruptedStepError(RecoverableError):
    """An iteration ended with an exception that corrupted values may have caused. The step can be repeated."""


class _WrongSoFar(FtError):
    """What was computed before the gradients leave this world is wrong. ``earlier``: logical rank -> its wrong attempts
    in earlier iterations."""

    def __init__(self, reports: Reports, earlier: dict[int, suspects.Wrong]):
        self.reports, self.earlier = reports, earlier
        super().__init__("operators were computed wrongly")


_OF_WRONG_NUMBERS = (IndexError, ValueError)
"""Exceptions that a corrupted index or size is likely to raise."""


class IterationVerifier(Layer):
    """The layer of double execution: runs the iterations of one rank with DMR, repeats an iteration that was computed
    wrongly, and verifies a step also before its gradients go to other worlds.

    Args:
        undo: keeps a copy of the state before an iteration, and restores it.
        limits: number of wrong attempts from which on a fault counts as permanent.
        strategy: name of the strategy by which operators are verified.

    Attributes:
        coverage: of the last iteration, on the rank with the least.
    """

    verifies = True

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        undo: Undo,
        witness: "FindingReporter",
        limits: AttemptLimits,
        strategy: str,
    ):
        self._trainer, self.engine, self.undo, self._witness, self._limits = trainer, engine, undo, witness, limits
        self._strategy: str | None = strategy
        self._memory = suspects.WrongAttempts(limits.memory)
        self.coverage = Coverage()
        self._missing = 0
        self._step, self._has_shared, self._was_wrong = 0, False, False

    def gets_copy(self, copy: SharedCopy) -> None:
        self.undo.share(copy)

    def metrics(self) -> dict[str, float]:
        return {"dmr_coverage": self.coverage.share}

    def digest(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        with self.engine.unwatched():
            rows = Rows(self.engine.findings.device, _SEED)
            for tensor in tensors:
                rows.add(tensor)
            return digest(rows.table(), _SEED)

    def verify(self) -> None:
        if not self.engine.is_active:
            return
        with self.engine.unwatched():
            reports, earlier = self._agree(self.engine.flag(), self._step)
        if reports:
            raise _WrongSoFar(reports, earlier)
        self.engine.passed()
        self._has_shared = True

    def update(self, step: Callable[[], Any]) -> Any:
        if self.engine.is_active:
            self.engine.before_update()
            self.undo.wait()
        return step()

    def compute(self, work: Callable[[], Update]) -> Update:
        """Run ``work``, a whole iteration, until it has been computed correctly, and return the result of the correct
        attempt. All ranks have to call it.

        Raises:
            SuspectError: on a rank that is at fault, if a standby can replace it.
            CorruptionError: on all ranks, if no standby can replace the rank at fault, or if no rank is known to be at
                fault (UnstableError if an operator is more likely at fault).
            StepUndone: a mismatch was found after other worlds had got this world's gradients; the state is restored.
            InterruptedStepError: ``work`` raised an exception that corrupted values may have caused, and a standby can
                replace ranks.
        """
        step = self._trainer.step + 1
        microbatches = self._trainer.microbatches(self._trainer.batch_now)
        attempts: list[Reports] = []
        self._step = step
        while True:
            self.undo.begin()
            self._has_shared = False
            try:
                with self.engine.iteration(microbatches, learns=self._was_wrong):
                    result = self._attempt(step, work)
                reports, earlier = self._agree(self.engine.flag(), step)
            except _WrongSoFar as wrong:
                reports, earlier = wrong.reports, wrong.earlier
            self._was_wrong = bool(reports)
            if not reports:
                self._end(step, attempts)
                return result
            attempts.append(reports)
            outcome = suspects.decide(attempts, earlier, self._limits)
            self._witness.mismatch(step, len(attempts), reports, outcome)
            self._answer(outcome, step)
            self.undo.roll_back()
            if self._has_shared:
                self._remember(step, attempts)
                raise StepUndone(f"step {step} was computed wrongly after its gradients were sent")

    def _attempt(self, step: int, work: Callable[[], Update]) -> Update:
        """Run ``work`` once. A corrupted index or size may raise an exception before the corrupted operator is
        verified. If that is likely, raise a recoverable error, so that hot-swap recovery repeats the step with the same
        workers and replaces a worker only if the error persists."""
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
        """Return the mismatches of all ranks in this attempt, and each rank's wrong attempts in earlier iterations.

        Both are empty if no rank has found a mismatch; this case costs one all-reduce of ``flag`` and one
        synchronisation with the device. The least coverage of all ranks comes with it. All ranks have to call it.
        """
        others = [missing(self.engine.coverage()), int(self.engine.has_news)]
        told = torch.cat((flag, torch.tensor(others, dtype=flag.dtype, device=flag.device)))
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        is_wrong, self._missing, has_news = told.tolist()
        if has_news:
            self.engine.share(_exchange)
        if not is_wrong:
            return {}, {}
        own = suspects.most_telling(self.engine.settle(), _MOST_TOLD)
        all_ranks = _exchange((own, self._memory.before(step)))
        return (
            {rank: tuple(found) for rank, (found, _) in enumerate(all_ranks) if found},
            {rank: earlier for rank, (_, earlier) in enumerate(all_ranks)},
        )

    def _end(self, step: int, attempts: list[Reports]) -> None:
        if self._strategy is not None:
            self._witness.covered(step, self._strategy, self.engine.coverage())
            self._strategy = None
        before = self.coverage.note(self._missing)
        if before is not None:
            self._witness.coverage_fell(step, before, self.coverage.share, self.engine.coverage())
        if not attempts:
            return
        self._remember(step, attempts)
        self._witness.clean(step, len(attempts) + 1)

    def _remember(self, step: int, attempts: list[Reports]) -> None:
        rank = dist.get_rank()
        self._memory.note(step, [suspects.origins(reports).get(rank, ()) for reports in attempts])

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


def _exchange(value: Any) -> list[Any]:
    """Give a value to all ranks, and return those of all ranks. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _origin() -> tuple[str, str]:
    """Return the host and the device on which this rank computes; the device with its index among all of the host, so
    that runs with other CUDA_VISIBLE_DEVICES give the same device the same name."""
    if torch.cuda.is_available():
        number = torch.cuda.current_device()
        return socket.gethostname(), f"cuda:{devices.on_node(number)} ({torch.cuda.get_device_name(number)})"
    return socket.gethostname(), "cpu"


class FindingReporter:
    """Reports the findings of one rank on the terminal and, in a run with hot-swap, as events of its ``session``.
    ``can_evict``: whether a standby may replace a rank at fault."""

    def __init__(self, session: "Session | None" = None):
        self._session = session
        self._host, self._device = _origin()
        self.can_evict = session is not None

    def mismatch(self, step: int, attempt: int, reports: Reports, outcome: Outcome) -> None:
        """Report that an attempt at a step went wrong on the ranks of ``reports``, and what was decided (``outcome``).
        Called on all ranks: each reports its own mismatches, rank 0 also the decision."""
        rank = dist.get_rank()
        own = reports.get(rank, ())
        where = f"rank {rank} on {self._host}, {self._device}"
        for one in own[:_MOST_LINES]:
            _say(f"DMR: step {step}, {where}: {one}")
        if len(own) > _MOST_LINES:
            _say(f"DMR: step {step}, {where}: and {len(own) - _MOST_LINES} more")
        for one in own[:_MOST_EVENTS]:
            values = {**one.values(), "host": self._host, "device": self._device}
            self._observe(events.DMR_MISMATCH, step=step, attempt=attempt, **values)
        if rank == 0:
            ranks, blamed = sorted(reports), list(outcome.ranks)
            of = f"rank {', '.join(map(str, blamed))} is suspected of computing wrongly"
            _say(f"DMR: {of if outcome.action == EVICT else f'step {step}'}: {outcome.reason}")
            verdict = {"action": outcome.action, "reason": outcome.reason, "ranks": ranks, "blamed": blamed}
            self._observe(events.DMR_VERDICT, step=step, attempt=attempt, **verdict)

    def clean(self, step: int, attempt: int) -> None:
        """Report that an attempt at a step was correct after earlier attempts had gone wrong. Only rank 0 reports."""
        if dist.get_rank() == 0:
            _say(f"DMR: step {step} was correct at attempt {attempt}")
            self._observe(events.DMR_CLEAN, step=step, attempt=attempt)

    def covered(self, step: int, strategy: str, counts: Mapping[str, int]) -> None:
        """Print (rank 0) and record (every rank) how the operators of the first iteration that this process finishes
        were verified. ``counts``: way of verification -> number of operators."""
        if dist.get_rank() == 0:
            counted = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
            print(f"DMR ({strategy}): operators of rank 0 in step {step}: {counted}", flush=True)
        self._observe(events.DMR_COVERED, step=step, strategy=strategy, counts=dict(counts))

    def coverage_fell(self, step: int, before: float, now: float, counts: Mapping[str, int]) -> None:
        """Report that a smaller share of the operators (``now``) is verified than in the steps before, on the rank with
        the least. Only rank 0 reports; ``counts`` are its own, as for ``covered``."""
        if dist.get_rank() == 0:
            ways = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
            _say(
                f"DMR: step {step}: {now:.2%} of the operators were verified on the rank with the least, {before:.2%} "
                f"before (rank 0: {ways})"
            )
            self._observe(events.DMR_COVERAGE_FELL, step=step, before=before, now=now)

    def _observe(self, event: str, **detail: Any) -> None:
        if self._session is not None:
            self._session.observe(event, **detail)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
