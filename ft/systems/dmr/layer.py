"""The protections of SpareTrain: double execution (DMR) and its profiler; see :mod:`ft.protection.contract`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ft.base.errors import UserError
from ft.protection.contract import Layer, Protection, Trainer, Update
from ft.protection.undo import SharedCopy
from ft.systems.dmr.digest import digest, digest_many
from ft.systems.dmr.profile import session as profiler
from ft.systems.dmr.profile.session import ITERATIONS, Profiling
from ft.systems.dmr.runtime import install as runtime
from ft.systems.dmr.runtime.install import Settings
from ft.systems.dmr.runtime.protection import IterationVerifier
from ft.worker.session import Session
from megatron.patches.manifest import WITH_DMR

_SEED = 0
"""Seed of the digests by which worlds compare their tensors; their runs may have different fingerprints."""


class DoubleExecution(Protection):
    """Execute every operator twice, compare the results, and redo the step if they differ (SpareTrain)."""

    features = frozenset({WITH_DMR})
    intercepts_operators = True
    _session: Session | None = None

    def connected(self, session: Session | None) -> None:
        self._session = session

    @property
    def _worlds(self) -> int:
        """Return among how many replicas of the model a step is divided."""
        return int(self.asked.environment.get("FT_HSDP_REPLICAS", "1"))

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        """Return the layer that verifies the operators of each step.

        Raises:
            UserError: the requested plan does not fit this run.
        """
        flags = self.asked.flags
        plan, unstable = _path(flags.ft_dmr_plan), _path(flags.ft_dmr_unstable)
        flips = tuple(flags.ft_dmr_inject)
        verification = runtime.install(
            Settings(flags.ft_dmr, plan, unstable, flags.ft_dmr_retries, flips, trainer.seed),
            trainer.chunks,
            trainer.optimizer,
            trainer.scheduler,
            trainer.position,
            fingerprint={**trainer.fingerprint(), "microbatches": trainer.microbatches(trainer.batch // self._worlds)},
            session=self._session,
        )
        return VerifiedStep(trainer, verification)


class Profile(Protection):
    """Measure a few steps to plan double execution, then end the run."""

    features = frozenset({WITH_DMR})
    intercepts_operators = True

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        """Return the layer that measures the operators of the next steps.

        Raises:
            UserError: too few steps are left, or the batch size is still ramping up, so that a profile would not be
                valid for the later, larger batches.
        """
        left, samples = trainer.steps - trainer.step, trainer.batch_now
        if left < ITERATIONS:
            problem = f"a profile takes {ITERATIONS} steps, and the run has {left} left"
            raise UserError(problem, "give more --train-iters")
        if samples != trainer.batch:
            raise UserError(
                f"a profile needs the full batch size of {trainer.batch}, but the ramp-up has reached only {samples}",
                "profile without --rampup-batch-size: the plan is for the batch size at the end of the ramp-up",
            )
        profiling = profiler.install(
            Path(self.asked.flags.ft_dmr_profile),
            trainer.chunks,
            trainer.optimizer,
            trainer.microbatches(samples),
            fingerprint=trainer.fingerprint(),
            unstable=_path(self.asked.flags.ft_dmr_unstable),
            end=trainer.end,
        )
        return InterceptedStep(trainer, profiling)


class InterceptedStep(Layer):
    """The layer of both protections: it lets ``runner`` run each step and verify or measure every operator of it."""

    def __init__(self, trainer: Trainer, runner: IterationVerifier | Profiling):
        self._trainer, self.runner = trainer, runner

    def compute(self, work: Callable[[], Update]) -> Update:
        trainer = self._trainer
        return self.runner.run_iteration(trainer.step + 1, trainer.microbatches(trainer.batch_now), work)

    def update(self, step: Callable[[], Any]) -> Any:
        self.runner.before_update()
        return step()


class VerifiedStep(InterceptedStep):
    """The layer of double execution, which verifies a step also before its gradients go to other worlds."""

    runner: IterationVerifier
    verifies = True

    def gets_copy(self, copy: SharedCopy) -> None:
        self.runner.undo.share(copy)

    def metrics(self) -> dict[str, float]:
        return {"dmr_coverage": self.runner.coverage.share}

    def verify(self) -> None:
        self.runner.verify()

    def digest(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        with self.runner.engine.unwatched():
            return digest(digest_many(tensors, _SEED), _SEED)


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)
