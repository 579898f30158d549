"""The protections of SpareTrain: double execution (DMR) and its profiler; see :mod:`ft.protection.contract`.

Parts of a model or an optimizer that cannot be verified are refused when they are built. What the flags alone tell is
refused by :mod:`ft.systems.dmr.flags`.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ft.base.errors import UserError
from ft.protection.contract import Layer, Protection, Trainer
from ft.protection.training_state import TrainingState
from ft.protection.undo import Undo
from ft.systems.dmr.digest import backend, digest
from ft.systems.dmr.plan.file import read_plan, read_unstable, refuse_plan_of_other_run
from ft.systems.dmr.plan.trace import Plan
from ft.systems.dmr.profile.session import ITERATIONS, Profiling, install
from ft.systems.dmr.runtime.collectives import Messages
from ft.systems.dmr.runtime.cursor import ExecutionCursor
from ft.systems.dmr.runtime.engine import Engine
from ft.systems.dmr.runtime.findings import Findings
from ft.systems.dmr.runtime.functions import functions_of_core
from ft.systems.dmr.runtime.injection import Falsifier, make_falsifier
from ft.systems.dmr.runtime.mode import DoubleExecutionMode as OperatorMode
from ft.systems.dmr.runtime.opaque import OpaqueCalls
from ft.systems.dmr.runtime.protection import FindingReporter, IterationVerifier
from ft.systems.dmr.runtime.queue import Queue
from ft.systems.dmr.runtime.strategy import Planned, Strategy
from ft.systems.dmr.runtime.suspects import AttemptLimits
from ft.worker.session import Session
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.patches import double_execution
from megatron.patches.manifest import WITH_DMR


def refuse_opaque_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer of megatron-core, which wraps one torch optimizer or a chain, that is not one of torch's own,
    because its kernels may bypass torch's dispatcher.

    A call that bypasses the dispatcher is executed twice as a whole, for which everything that it changes is copied: of
    an optimizer that would be all of its state.

    Raises:
        UserError: the optimizer is of such a kind.
    """
    inner = [getattr(one, "optimizer", None) for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    kinds = [type(one) for one in inner if isinstance(one, torch.optim.Optimizer)]
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__module__.partition(".")[0] != "torch"}
    if names:
        raise UserError(
            f"DMR follows operators through torch's dispatcher, which {', '.join(sorted(names))} may bypass",
            "build the optimizer after megatron.patches.apply(WITH_DMR), of torch's own optimizers",
        )


_ORDER = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


def refuse_varying_attention(chunks: Sequence[torch.nn.Module], environment: Mapping[str, str]) -> None:
    """Refuse attention that adds up gradients in another order each time.

    Raises:
        UserError: the model has attention of Transformer Engine, and its switch for such algorithms is not off.
    """
    if environment.get(_ORDER) == "0":
        return
    for module in (module for chunk in chunks for module in chunk.modules()):
        kinds = [kind for kind in type(module).__mro__ if kind.__module__.startswith("transformer_engine")]
        if any(kind.__name__.endswith("DotProductAttention") for kind in kinds):
            raise UserError(
                "attention of Transformer Engine may add up gradients in another order each time, which DMR takes for "
                "an error",
                f"set {_ORDER}=0, or leave its functions out: --ft-dmr-unstable FILE",
            )


class DoubleExecution(Protection):
    """Execute every operator twice, compare the results, and redo the step if they differ (SpareTrain)."""

    features = frozenset({WITH_DMR})
    intercepts_operators = True
    _session: Session | None = None

    def connected(self, session: Session | None) -> None:
        self._session = session

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> IterationVerifier:
        """Return the layer that verifies the operators of each step. Call it on all ranks, after model and optimizer
        are built, with ``WITH_DMR`` patches applied.

        Raises:
            UserError: the plan does not fit this run, an injection is invalid, or a part of the model or the optimizer
                cannot be verified.
        """
        flags, chunks, position = self.asked.flags, trainer.chunks, trainer.position
        worlds = int(self.asked.environment.get("FT_HSDP_REPLICAS", "1"))  # among which a step is divided
        fingerprint = {**trainer.fingerprint(), "microbatches": trainer.microbatches(trainer.batch // worlds)}
        refuse_opaque_optimizer(trainer.optimizer)
        unstable = flags.ft_dmr_unstable
        left_out = () if unstable is None else read_unstable(Path(unstable)).operators
        if not left_out:
            refuse_varying_attention(chunks, os.environ)
        stage, plan = parallel_state.get_pipeline_model_parallel_rank(), None
        if flags.ft_dmr_plan is not None:
            plan = read_plan(Path(flags.ft_dmr_plan))
            refuse_plan_of_other_run(plan, fingerprint)
        strategy = Strategy(flags.ft_dmr or "piggyback", left_out) if plan is None else Planned(plan, stage, left_out)
        falsifier = make_falsifier(flags.ft_dmr_inject, trainer.seed, lambda: position.get()["step"] + 1, self._session)
        seed = hashlib.sha256(str(sorted(fingerprint.items())).encode()).digest()[:16]  # the same on all ranks
        engine = _engine(strategy, plan, chunks, stage, int.from_bytes(seed, "little"), falsifier)
        engine.watch_opaque_calls(OpaqueCalls(engine, left_out), functions_of_core(chunks[0].config))
        undo = Undo(TrainingState(chunks, trainer.optimizer, trainer.scheduler), position)
        limits, witness = AttemptLimits(retries=flags.ft_dmr_retries), FindingReporter(self._session)
        double_execution.listen(engine)
        return IterationVerifier(trainer, engine, undo, witness, limits, strategy.name)


def _engine(
    strategy: Strategy, plan: Plan | None, chunks: Sequence, stage: int, seed: int, falsifier: Falsifier | None
) -> Engine:
    """Return the engine that intercepts and verifies the operators on this rank. ``seed``: of the digests."""
    device = next(chunks[0].parameters()).device
    backend(device)
    digest(torch.zeros(1, device=device), seed)  # keeps the one-time costs of the first digest out of a step
    cursor, findings = ExecutionCursor(), Findings(device, seed)
    dynamic, headroom = [], 0.0
    if plan is not None:
        dynamic = [window.dur_us for window in plan.trace.windows if window.stage == stage and window.dynamic]
        headroom = max((plan.trace.memory.budget or 0.0) - plan.trace.memory.peak(stage), 0.0)
    lasting = {p.untyped_storage()._cdata for c in chunks for p in c.parameters()}
    queue = Queue(findings, strategy.replays, strategy.helpers, headroom, dynamic, lasting)
    queue.disturb = None if falsifier is None else falsifier.deferred
    mode = OperatorMode(cursor, strategy, findings, queue, stage, falsifier)
    messages = Messages(findings, parallel_state.get_pipeline_model_parallel_group(), len(chunks))
    engine = Engine(cursor, findings, queue, mode, messages, falsifier)
    engine.watch_layers(chunks, TransformerLayer)
    return engine


class Profile(Protection):
    """Measure a few steps to plan double execution, then end the run."""

    features = frozenset({WITH_DMR})
    intercepts_operators = True

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Profiling:
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
        return install(Path(self.asked.flags.ft_dmr_profile), trainer, self.asked.flags.ft_dmr_unstable)
