"""The protections of SpareTrain: double execution (DMR) and its profiler; see :mod:`ft.protection.contract`."""

from collections.abc import Sequence
from pathlib import Path

from ft.base.errors import UserError
from ft.protection.contract import Layer, Protection, Trainer
from ft.systems.dmr.profile import session as profiler
from ft.systems.dmr.profile.session import ITERATIONS
from ft.systems.dmr.runtime import install as runtime
from ft.systems.dmr.runtime.install import Settings
from ft.worker.session import Session
from megatron.patches.manifest import WITH_DMR


class DoubleExecution(Protection):
    """Execute every operator twice, compare the results, and redo the step if they differ (SpareTrain)."""

    features = frozenset({WITH_DMR})
    intercepts_operators = True
    _session: Session | None = None

    def connected(self, session: Session | None) -> None:
        self._session = session

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        """Return the layer that verifies the operators of each step.

        Raises:
            UserError: the requested plan does not fit this run.
        """
        flags = self.asked.flags
        plan, unstable = _path(flags.ft_dmr_plan), _path(flags.ft_dmr_unstable)
        settings = Settings(flags.ft_dmr, plan, unstable, flags.ft_dmr_retries, tuple(flags.ft_dmr_inject))
        worlds = int(self.asked.environment.get("FT_HSDP_REPLICAS", "1"))  # among which a step is divided
        return runtime.install(settings, trainer, trainer.microbatches(trainer.batch // worlds), session=self._session)


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
        return profiler.install(Path(self.asked.flags.ft_dmr_profile), trainer, _path(self.asked.flags.ft_dmr_unstable))


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)
