"""Construction of double execution for one rank of a training run of megatron-core: its settings, and parts of a model
or an optimizer that cannot be verified.

Parts that cannot be verified are refused when they are built. What the flags alone tell is refused by
:mod:`ft.systems.dmr.flags`.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ft.base.errors import UserError
from ft.protection.contract import Trainer
from ft.protection.training_state import TrainingState
from ft.protection.undo import Undo
from ft.systems.dmr.digest import backend, digest
from ft.systems.dmr.plan.file import read_plan, read_unstable, refuse_plan_of_other_run
from ft.systems.dmr.plan.trace import Plan
from ft.systems.dmr.runtime.collectives import Messages
from ft.systems.dmr.runtime.cursor import ExecutionCursor
from ft.systems.dmr.runtime.engine import Engine
from ft.systems.dmr.runtime.findings import Findings
from ft.systems.dmr.runtime.functions import functions_of_core
from ft.systems.dmr.runtime.injection import Falsifier, make_falsifier
from ft.systems.dmr.runtime.mode import DoubleExecution
from ft.systems.dmr.runtime.opaque import OpaqueCalls
from ft.systems.dmr.runtime.protection import FindingReporter, IterationVerifier
from ft.systems.dmr.runtime.queue import Queue
from ft.systems.dmr.runtime.strategy import Planned, Strategy
from ft.systems.dmr.runtime.suspects import Limits
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.patches import double_execution


@dataclass(frozen=True)
class Settings:
    """The settings of DMR that the flags of a training run request.

    Args:
        way: "naive" (all operators immediately) or "piggyback" (recomputed operators with their recomputation, the
            others immediately); None to verify as ``plan`` says.
        plan: path of a plan file.
        unstable: path of a file of non-reproducible operators, which are left unverified.
        retries: number of times that an iteration is repeated before a rank is blamed.
        inject: specifications of bit flips to inject (``ft.faults.spec``).
    """

    way: str | None = None
    plan: Path | None = None
    unstable: Path | None = None
    retries: int = 2
    inject: tuple[str, ...] = ()


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


if TYPE_CHECKING:
    from ft.worker.session import Session


def install(
    settings: Settings, trainer: Trainer, microbatches: int, session: "Session | None" = None
) -> IterationVerifier:
    """Install DMR for a run, after model and optimizer are built, and return its layer. Call it on all ranks, with
    ``WITH_DMR`` patches applied.

    Args:
        microbatches: microbatches of an iteration on each rank. A plan for another number is refused.
        session: this worker's place in a run in which a standby can replace a suspect; None outside.

    Raises:
        UserError: the plan does not fit this run, an injection is invalid, or a part of the model or the optimizer
            cannot be verified.
    """
    chunks, fingerprint = trainer.chunks, {**trainer.fingerprint(), "microbatches": microbatches}
    refuse_opaque_optimizer(trainer.optimizer)
    left_out = () if settings.unstable is None else read_unstable(settings.unstable).operators
    if not left_out:
        refuse_varying_attention(chunks, os.environ)
    stage, plan = parallel_state.get_pipeline_model_parallel_rank(), None
    if settings.plan is not None:
        plan = read_plan(settings.plan)
        refuse_plan_of_other_run(plan, fingerprint)
    strategy = Strategy(settings.way or "piggyback", left_out) if plan is None else Planned(plan, stage, left_out)
    position = trainer.position
    falsifier = make_falsifier(settings.inject, trainer.seed, lambda: position.get()["step"] + 1, session)
    seed = hashlib.sha256(str(sorted(fingerprint.items())).encode()).digest()[:16]  # the same on all ranks
    engine = _engine(strategy, plan, chunks, stage, int.from_bytes(seed, "little"), falsifier)
    engine.watch_opaque_calls(OpaqueCalls(engine, left_out), functions_of_core(chunks[0].config))
    undo = Undo(TrainingState(chunks, trainer.optimizer, trainer.scheduler), position)
    limits = Limits(retries=settings.retries)
    protection = IterationVerifier(trainer, engine, undo, FindingReporter(session), limits, strategy.name)
    double_execution.listen(engine)
    return protection


def _engine(
    strategy: Strategy, plan: Plan | None, chunks: Sequence, stage: int, seed: int, falsifier: Falsifier | None
) -> Engine:
    """Return the engine that intercepts and verifies the operators on this rank. ``seed``: of the digests."""
    device = next(chunks[0].parameters()).device
    backend(device)
    digest(torch.zeros(1, device=device), seed)  # keeps the one-time costs of the first digest out of a step
    course, findings = ExecutionCursor(), Findings(device, seed)
    dynamic, headroom = [], 0.0
    if plan is not None:
        dynamic = [window.dur_us for window in plan.trace.windows if window.stage == stage and window.dynamic]
        headroom = max((plan.trace.memory.budget or 0.0) - plan.trace.memory.peak(stage), 0.0)
    lasting = {p.untyped_storage()._cdata for c in chunks for p in c.parameters()}
    queue = Queue(findings, strategy.replays, strategy.helpers, headroom, dynamic, lasting)
    queue.disturb = None if falsifier is None else falsifier.deferred
    mode = DoubleExecution(course, strategy, findings, queue, stage, falsifier)
    messages = Messages(findings, parallel_state.get_pipeline_model_parallel_group(), len(chunks))
    engine = Engine(course, findings, queue, mode, messages, falsifier)
    engine.watch_layers(chunks, TransformerLayer)
    return engine
