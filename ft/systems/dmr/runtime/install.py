"""Construction of double execution for one rank of a training run of megatron-core: its settings, and parts of a model
or an optimizer that cannot be verified.

Parts that cannot be verified are refused when they are built. What the flags alone tell is refused by
:mod:`ft.systems.dmr.flags`.
"""

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ft.base.errors import UserError
from ft.protection.position import Position
from ft.protection.training_state import TrainingState
from ft.protection.undo import Undo
from ft.systems.dmr.digest import backend, digest
from ft.systems.dmr.plan.file import read_plan, refuse_plan_of_other_run
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
from ft.systems.dmr.runtime.strategy import ExcludeUnstable, Naive, Piggyback, Planned, Strategy
from ft.systems.dmr.runtime.suspects import Limits
from ft.systems.dmr.unstable import read_unstable
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.patches import double_execution

NAIVE, PIGGYBACK = "naive", "piggyback"


@dataclass(frozen=True)
class Settings:
    """The settings of DMR that the flags of a training run request.

    Args:
        way: NAIVE (all operators immediately) or PIGGYBACK (recomputed operators with their recomputation, the others
            immediately); None to verify as ``plan`` says.
        plan: path of a plan file.
        unstable: path of a file of non-reproducible operators, which are left unverified.
        retries: number of times that an iteration is repeated before a rank is blamed.
        inject: specifications of bit flips to inject (``ft.faults.spec``).
        inject_seed: seed for random choices that the specifications leave open.
    """

    way: str | None = None
    plan: Path | None = None
    unstable: Path | None = None
    retries: int = 2
    inject: tuple[str, ...] = ()
    inject_seed: int = 0

    def strategy(self, stage: int, fingerprint: Mapping[str, Any]) -> tuple[Strategy, Plan | None]:
        """Return the strategy for the operators of ``stage``, and the plan that it follows (None without a plan).

        Raises:
            UserError: the plan or the file of unstable operators cannot be read or followed, or the plan was made for
                another run.
        """
        left_out, plan = self.left_out(), None
        if self.plan is None:
            strategy = Naive() if self.way == NAIVE else Piggyback()
        else:
            plan = read_plan(self.plan)
            refuse_plan_of_other_run(plan, fingerprint)
            strategy = Planned(plan, stage, left_out)
        return (ExcludeUnstable(strategy, left_out) if left_out else strategy), plan

    def left_out(self) -> tuple[str, ...]:
        """Return the names of the operators and functions that are left unverified.

        Raises:
            UserError: the file cannot be read.
        """
        return () if self.unstable is None else read_unstable(self.unstable).operators


def run_seed(text: str) -> int:
    """Return the seed for all digests of a run, a 128-bit hash of ``text``. All ranks have to pass the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def refuse_opaque_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that is not one of torch's own, because its kernels may bypass torch's dispatcher.

    A call that bypasses the dispatcher is executed twice as a whole, for which everything that it changes is copied: of
    an optimizer that would be all of its state.

    Args:
        optimizer: optimizer of megatron-core, which wraps one torch optimizer or a chain of optimizers.

    Raises:
        UserError: the optimizer is of such a kind.
    """
    opaque = sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in _inner(optimizer) if _is_opaque(kind)})
    if opaque:
        raise UserError(
            f"DMR follows operators through torch's dispatcher, which {', '.join(opaque)} may bypass",
            "build the optimizer after megatron.patches.apply(WITH_DMR), of torch's own optimizers",
        )


def _inner(optimizer: Any) -> Iterator[type]:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(one, "optimizer", None)
        if inner is not None:
            yield type(inner)


def _is_opaque(kind: type) -> bool:
    return issubclass(kind, torch.optim.Optimizer) and kind.__module__.partition(".")[0] != "torch"


_ORDER = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


def refuse_varying_attention(chunks: Sequence[torch.nn.Module], environment: Mapping[str, str]) -> None:
    """Refuse attention that adds up gradients in another order each time.

    Args:
        chunks: model chunks.
        environment: environment variables of this process.

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
        chunks: as in ``ft.systems.hot_swap.recovery_manager.RecoveryManager``.
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
