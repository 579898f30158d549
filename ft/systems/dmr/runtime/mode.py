"""The torch dispatch mode of DMR, which intercepts every operator of a protected iteration and has it verified.

A strategy assigns each operator to a *set*, a way of verification: naive (immediately), P (with the recomputation of
activation checkpointing), D_inter or D_intra (deferred), or unchecked.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ft.systems.dmr.plan.trace import NAIVE, PIGGYBACK
from ft.systems.dmr.runtime.cursor import ExecutionCursor, operator_id
from ft.systems.dmr.runtime.findings import AT_ONCE, Findings, Rows
from ft.systems.dmr.runtime.operators import (
    OperatorProperties,
    check_in_place,
    execute,
    execute_again,
    execute_zeroed,
    expected,
    is_counted,
    is_verified_by_inspection,
    properties_of,
    results,
    state_before,
    tensors_in,
    written,
)
from ft.systems.dmr.runtime.queue import Queue
from ft.systems.dmr.runtime.segments import Segment
from ft.systems.dmr.runtime.strategy import DEFERRED, SKIPPED, Strategy

PRIMARY, CHECKER = "primary", "checker"
"""The first execution of an operator, whose results training uses, and the second execution, which verifies it."""


class Disturbance(Protocol):
    """An object that corrupts the results of operators, in fault-injection experiments."""

    def falsify(self, execution: str, operator: str, course: ExecutionCursor, tensors: Sequence[torch.Tensor]) -> None:
        """Corrupt results before they are compared.

        Args:
            execution: PRIMARY or CHECKER.
            operator: name of the operator.
            course: the position of this rank in the iteration.
            tensors: the results of this execution.
        """


class DoubleExecution(TorchDispatchMode):
    """Executes operators, has each of them verified as the strategy decides, and counts the operators by set.

    Args:
        course: the position of this rank in the iteration.
        strategy: decides how each operator is verified.
        findings: receives the mismatches.
        queue: the deferred verifications.
        stage: pipeline stage of this rank, which is part of operator ids.
        disturbance: corrupts results in fault-injection experiments; None otherwise.

    Attributes:
        segment: the activation-checkpointing segment that is being executed; None outside of all segments.
        again: True while that segment is being recomputed.
        is_passing: True while operators are executed once, because the call that they belong to is verified as a whole.
        sent: receives digests of what such a call sends to other ranks; None: nobody wants them.
        counts: number of verified operators, by set.
        position: ordinal of the last executed operator that was found in the plan. It determines which deferred
            verifications are due in a window. Operators that are not in the plan do not count, so that they do not
            shift the windows.
    """

    def __init__(
        self,
        course: ExecutionCursor,
        strategy: Strategy,
        findings: Findings,
        queue: Queue,
        stage: int = 0,
        disturbance: Disturbance | None = None,
    ):
        super().__init__()
        self._course, self._strategy, self._findings, self._queue = course, strategy, findings, queue
        self._stage, self._disturbance = stage, disturbance
        self.restart()

    def restart(self) -> None:
        """Begin an iteration."""
        self.segment: Segment | None = None
        self.again = self.is_passing = False
        self.sent: Rows | None = None
        self.counts: dict[str, int] = {}
        self.position = 0
        self._misfits_before = sum(self._strategy.misfits.values())

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell ``torch.compile`` to compile as it does without this mode; it falls back to plain operators otherwise.
        What it has compiled is verified as a whole (:mod:`compiled`)."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = properties_of(func)
        if self.is_passing:
            if kind.sent is not None and self.sent is not None:
                with torch._C._DisableTorchDispatch():
                    for tensor in tensors_in(args[kind.sent]):
                        self.sent.add(tensor)
            return execute_zeroed(func, args, kwargs)
        out = self._execute(kind, func, args, kwargs)
        if self.segment is not None and not kind.written and any(kind.fresh):
            is_new = kind.executes and all(kind.fresh)
            self.segment.returned(tensors_in(out), () if is_new else tensors_in((args, kwargs)))
        return out

    def _execute(self, kind: OperatorProperties, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Execute an operator, have it verified, and return its result."""
        if not is_counted(kind, args, kwargs):
            if kind.written and self._queue:
                self._queue.before_change(tensors_in(written(kind, args, kwargs)))
            return execute(func, args, kwargs)
        course = self._course
        unit, index = course.count()
        if kind.written and self._queue:
            self._queue.before_change(tensors_in(written(kind, args, kwargs)))
        is_recomputed = self._is_recomputed(kind, args, kwargs)
        decision = self._strategy.decide(unit, index, kind.name, is_recomputed)
        self.position = decision.ordinal or self.position
        if self.segment is not None:
            decision = self.segment.settle(decision, kind.name, again=self.again)
        state = state_before(kind, args, kwargs) if self._queue.helpers and kind.random else None
        self.count(decision.set)
        if decision.set == NAIVE:
            out = self._at_once(kind, func, args, kwargs, index)
        elif decision.set == PIGGYBACK and self.again and self.segment.is_extra(kind.name):
            out = self._at_once(kind, func, args, kwargs, index)
            self.segment.again(course.at(kind.name, index), results(kind, args, kwargs, out))
        elif decision.set == PIGGYBACK:
            out = execute(func, args, kwargs)
            self._with_recomputation(kind, args, kwargs, out, index)
        elif decision.set == SKIPPED:
            out = execute(func, args, kwargs)
            if self.segment is not None:
                self.segment.unchecked()
            return out
        elif decision.set in DEFERRED and not kind.written:
            return self._later(kind, func, args, kwargs, index, decision)
        else:
            out = self._at_once(kind, func, args, kwargs, index)
        if self._queue.helpers and not kind.written:
            name = operator_id(self._stage, unit.phase, unit.chunk, unit.microbatch, index)
            if name in self._queue.helpers:
                self._queue.help(name, course.at(kind.name, index), kind, (func, args, kwargs), out, state)
        return out

    def count(self, way: str) -> None:
        """Count an operator, or a call that is verified as a whole. ``way``: the set that it belongs to."""
        self.counts[way] = self.counts.get(way, 0) + 1

    @property
    def uses_recomputation(self) -> bool:
        """Return whether operators of segments are compared with their recomputation."""
        return self._strategy.uses_recomputation

    @property
    def misfits(self) -> int:
        """Return the number of operators of this iteration that the plan does not contain at their place."""
        return sum(self._strategy.misfits.values()) - self._misfits_before

    def _is_recomputed(self, kind: OperatorProperties, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether the next operator has a second, comparable execution in its segment."""
        if self.segment is None or not self.segment.is_comparable or kind.changes_state:
            return False
        return not kind.written or self.segment.has_created(tensors_in(written(kind, args, kwargs)))

    def _at_once(
        self, kind: OperatorProperties, func: Any, args: Sequence[Any], kwargs: dict[str, Any], index: int
    ) -> Any:
        if kind.written and not is_verified_by_inspection(kind, args, kwargs):
            again = check_in_place(kind, func, args, kwargs)
            out = execute(func, args, kwargs)
            ours = results(kind, args, kwargs, out)
            self.disturb(PRIMARY, kind.name, ours)
        elif kind.written:
            out = func(*args, **kwargs)
            self.disturb(PRIMARY, kind.name, [args[0]])
            self._compare(kind, index, *([one] for one in expected(kind, args, kwargs)))
            return out
        else:
            state = state_before(kind, args, kwargs)
            out = execute(func, args, kwargs)
            ours = tensors_in(out)
            self.disturb(PRIMARY, kind.name, ours)
            again = tensors_in(execute_again(func, args, kwargs, state))
        self.disturb(CHECKER, kind.name, again)
        self._compare(kind, index, ours, again)
        return out

    def _compare(
        self, kind: OperatorProperties, index: int, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]
    ) -> None:
        self._findings.pair(self._course.at(kind.name, index), AT_ONCE, ours, theirs)

    def _with_recomputation(
        self, kind: OperatorProperties, args: Sequence[Any], kwargs: dict[str, Any], out: Any, index: int
    ) -> None:
        outs = results(kind, args, kwargs, out)
        self.disturb(CHECKER if self.again else PRIMARY, kind.name, outs)
        at = self._course.at(kind.name, index)
        if self.again:
            self.segment.again(at, outs)
        else:
            self.segment.primary(at, outs)

    def _later(
        self,
        kind: OperatorProperties,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        index: int,
        decision: Any,
    ) -> Any:
        state = state_before(kind, args, kwargs)
        out = execute(func, args, kwargs)
        outs = tensors_in(out)
        self.disturb(PRIMARY, kind.name, outs)
        at = self._course.at(kind.name, index)
        if not self._queue.put(at, kind, (func, args, kwargs), out, state, decision):
            again = tensors_in(execute_again(func, args, kwargs, state))
            self._compare(kind, index, outs, again)
        return out

    def disturb(self, execution: str, operator: str, tensors: Sequence[torch.Tensor]) -> None:
        """Let the disturbance corrupt the results of an execution; see :meth:`Disturbance.falsify`."""
        if self._disturbance is not None:
            self._disturbance.falsify(execution, operator, self._course, tensors)
