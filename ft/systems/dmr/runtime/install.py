"""Construction of double execution (DMR, SpareTrain) for one rank of a training run of megatron-core."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ft.protection.position import Position
from ft.protection.training_state import TrainingState
from ft.protection.undo import Undo
from ft.systems.dmr.digest import backend, digest
from ft.systems.dmr.plan.assign import Plan
from ft.systems.dmr.runtime.cursor import ExecutionCursor
from ft.systems.dmr.runtime.engine import Engine
from ft.systems.dmr.runtime.falsify import Falsifier
from ft.systems.dmr.runtime.findings import Findings
from ft.systems.dmr.runtime.functions import functions_of_core
from ft.systems.dmr.runtime.injection import make_falsifier
from ft.systems.dmr.runtime.messages import Messages
from ft.systems.dmr.runtime.mode import DoubleExecution
from ft.systems.dmr.runtime.opaque import OpaqueCalls
from ft.systems.dmr.runtime.protection import IterationVerifier
from ft.systems.dmr.runtime.queue import Queue
from ft.systems.dmr.runtime.refusals import refuse_opaque_optimizer, refuse_varying_attention
from ft.systems.dmr.runtime.settings import Settings, run_seed
from ft.systems.dmr.runtime.strategy import Planned, Strategy
from ft.systems.dmr.runtime.suspects import Limits
from ft.systems.dmr.runtime.unstable import ExcludeUnstable
from ft.systems.dmr.runtime.witness import FindingReporter
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.patches import double_execution

if TYPE_CHECKING:
    from ft.worker.session import Session


def install(
    settings: Settings,
    chunks: Sequence,
    optimizer: Any,
    scheduler: Any,
    position: Position,
    *,
    fingerprint: Mapping[str, Any],
    session: "Session | None" = None,
) -> IterationVerifier:
    """Install DMR for a run, after model and optimizer are built. Call it on all ranks, with ``WITH_DMR`` patches
    applied.

    Args:
        settings: settings of DMR.
        chunks: as in ``ft.systems.hot_swap.protect.build``.
        optimizer: as in ``build``.
        scheduler: as in ``build``.
        position: as in ``build``.
        fingerprint: of the run (``ft.systems.dmr.plan.trace.FINGERPRINT``); a plan for another one is refused.
        session: this worker's place in a run in which a standby can replace a suspect; None outside.

    Raises:
        UserError: the plan does not fit this run, an injection is invalid, or a part of the model or the optimizer
            cannot be verified.
    """
    refuse_opaque_optimizer(optimizer)
    if not settings.left_out():
        refuse_varying_attention(chunks, os.environ)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    strategy, plan = settings.strategy(stage, fingerprint)
    falsifier = make_falsifier(settings.inject, settings.inject_seed, lambda: position.get()["step"] + 1, session)
    engine = make_engine(strategy, plan, chunks, stage, run_seed(str(sorted(fingerprint.items()))), falsifier)
    engine.watch_opaque_calls(OpaqueCalls(engine, settings.left_out()), functions_of_core(chunks[0].config))
    subject = TrainingState(chunks, optimizer, scheduler)
    protection = IterationVerifier(
        engine, Undo(subject, position), FindingReporter(session), Limits(retries=settings.retries), strategy.name
    )
    double_execution.listen(engine)
    return protection


def make_engine(
    strategy: Strategy,
    plan: Plan | None,
    chunks: Sequence,
    stage: int,
    seed: int,
    falsifier: Falsifier | None = None,
) -> Engine:
    """Build the engine that intercepts and verifies the operators on this rank.

    Args:
        strategy: which operators are verified at once, and which later.
        plan: the plan to follow; None without one.
        chunks: model chunks of this rank.
        stage: pipeline stage of this rank.
        seed: seed of the digests, the same on all ranks.
        falsifier: corrupts results, for tests; None: nothing is corrupted.
    """
    device = next(chunks[0].parameters()).device
    backend(device)
    digest(torch.zeros(1, device=device), seed)  # keeps the one-time costs of the first digest out of a step
    course, findings = ExecutionCursor(), Findings(device, seed)
    queue = _queue(
        strategy, plan, findings, stage, {p.untyped_storage()._cdata for c in chunks for p in c.parameters()}
    )
    queue.disturb = None if falsifier is None else falsifier.deferred
    mode = DoubleExecution(course, strategy, findings, queue, stage, falsifier)
    messages = Messages(findings, parallel_state.get_pipeline_model_parallel_group(), len(chunks))
    engine = Engine(course, findings, queue, mode, messages, None if falsifier is None else falsifier.payload)
    engine.watch_layers(chunks, TransformerLayer)
    return engine


def _queue(strategy: Strategy, plan: Plan | None, findings: Findings, stage: int, lasting: Collection[int]) -> Queue:
    strategy = strategy.strategy if isinstance(strategy, ExcludeUnstable) else strategy
    if plan is None or not isinstance(strategy, Planned):
        return Queue(findings)
    dynamic = [window.dur_us for window in plan.trace.windows if window.stage == stage and window.dynamic]
    headroom = max((plan.trace.memory.budget or 0.0) - plan.trace.memory.peak(stage), 0.0)
    return Queue(findings, strategy.replays, strategy.helpers, headroom, dynamic, lasting)
