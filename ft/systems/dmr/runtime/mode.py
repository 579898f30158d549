"""The torch dispatch mode of DMR, which intercepts every operator of a protected iteration and has it verified.

A strategy assigns each operator to a *set*, a way of verification: naive (immediately), P (with the recomputation of
activation checkpointing), D_inter or D_intra (deferred), or unchecked.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ft.systems.dmr.plan.trace import PIGGYBACK, UNCHECKED
from ft.systems.dmr.runtime.cursor import ExecutionCursor, operator_id
from ft.systems.dmr.runtime.findings import AT_ONCE, Findings, Rows
from ft.systems.dmr.runtime.operators import (
    Call,
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
from ft.systems.dmr.runtime.queue import Execution, Queue
from ft.systems.dmr.runtime.segments import Segment
from ft.systems.dmr.runtime.strategy import DEFERRED, CheckMethod, Strategy

if TYPE_CHECKING:
    from ft.systems.dmr.runtime.injection import Falsifier

PRIMARY, CHECKER = "primary", "checker"
"""The first execution of an operator, whose results training uses, and the second execution, which verifies it."""


class DoubleExecutionMode(TorchDispatchMode):
    """Executes operators, has each of them verified as the strategy decides, and counts the operators by set.

    Args:
        stage: pipeline stage of this rank, which is part of operator ids.
        disturbance: corrupts results in fault-injection experiments.

    Attributes:
        segment: the activation-checkpointing segment that is being executed; None outside of all segments.
        again: True while that segment is being recomputed.
        is_passing: True while operators are executed once, because the call that they belong to is verified as a whole.
        sent: receives digests of what such a call sends to other ranks; None: they are not needed.
        counts: number of verified operators, by set.
        position: ordinal of the last executed operator that was found in the plan, which determines what is due in a
            window. Operators that are not in the plan do not count, so that they do not shift the windows.
    """

    def __init__(
        self,
        cursor: ExecutionCursor,
        strategy: Strategy,
        findings: Findings,
        queue: Queue,
        stage: int = 0,
        disturbance: "Falsifier | None" = None,
    ):
        super().__init__()
        self._cursor, self._strategy, self._findings, self._queue = cursor, strategy, findings, queue
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
        What it has compiled is verified as a whole (:mod:`ft.systems.dmr.runtime.engine`)."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = properties_of(func)
        call = Call(kind, func, args, kwargs or {})
        if self.is_passing:
            if kind.sent is not None and self.sent is not None:
                with torch._C._DisableTorchDispatch():
                    for tensor in tensors_in(args[kind.sent]):
                        self.sent.add(tensor)
            return execute_zeroed(func, args, call.kwargs)
        out = self._execute(call)
        if self.segment is not None and not kind.written and any(kind.fresh):
            is_new = kind.executes and all(kind.fresh)
            self.segment.returned(tensors_in(out), () if is_new else tensors_in((args, call.kwargs)))
        return out

    def _execute(self, call: Call) -> Any:
        """Execute an operator, have it verified, and return its result."""
        kind, func, args, kwargs = call
        if kind.written and self._queue:
            self._queue.before_change(tensors_in(written(call)))
        if not is_counted(call):
            return execute(func, args, kwargs)
        unit, index = self._cursor.count()
        decision = self._strategy.decide(unit, index, kind.name, self._is_recomputed(call))
        self.position = decision.ordinal or self.position
        if self.segment is not None:
            decision = self.segment.settle(decision, kind.name, again=self.again)
        self.count(decision.set)
        if decision.set in DEFERRED and not kind.written:
            return self._later(call, index, decision)
        state = state_before(call) if self._queue.helpers and kind.random else None
        if decision.set == PIGGYBACK and self.again and self.segment.is_extra(kind.name):
            out = self._at_once(call, index)
            self.segment.again(self._cursor.at(kind.name, index), results(call, out))
        elif decision.set == PIGGYBACK:
            out = execute(func, args, kwargs)
            self._with_recomputation(call, out, index)
        elif decision.set == UNCHECKED:
            if self.segment is not None:
                self.segment.unchecked()
            return execute(func, args, kwargs)
        else:
            out = self._at_once(call, index)
        if self._queue.helpers and not kind.written:
            name = operator_id(self._stage, unit.phase, unit.chunk, unit.microbatch, index)
            if name in self._queue.helpers:
                self._queue.help(name, Execution(self._cursor.at(kind.name, index), call, out, state))
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

    def _is_recomputed(self, call: Call) -> bool:
        """Return whether the next operator has a second, comparable execution in its segment."""
        if self.segment is None or not self.segment.is_comparable or call.kind.changes_state:
            return False
        return not call.kind.written or self.segment.has_created(tensors_in(written(call)))

    def _at_once(self, call: Call, index: int) -> Any:
        kind, func, args, kwargs = call
        if kind.written and is_verified_by_inspection(call):
            out = func(*args, **kwargs)
            self.disturb(PRIMARY, kind.name, [args[0]])
            ours, again = ([one] for one in expected(call))
        else:
            state = None if kind.written else state_before(call)
            again = check_in_place(call) if kind.written else []
            out = execute(func, args, kwargs)
            ours = results(call, out)
            self.disturb(PRIMARY, kind.name, ours)
            again = again if kind.written else results(call, execute_again(call, state))
            self.disturb(CHECKER, kind.name, again)
        self._compare(call, index, ours, again)
        return out

    def _compare(self, call: Call, index: int, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
        self._findings.pair(self._cursor.at(call.kind.name, index), AT_ONCE, ours, theirs)

    def _with_recomputation(self, call: Call, out: Any, index: int) -> None:
        outs, at = results(call, out), self._cursor.at(call.kind.name, index)
        self.disturb(CHECKER if self.again else PRIMARY, call.kind.name, outs)
        (self.segment.again if self.again else self.segment.primary)(at, outs)

    def _later(self, call: Call, index: int, decision: CheckMethod) -> Any:
        state = state_before(call)
        out = execute(call.func, call.args, call.kwargs)
        outs = results(call, out)
        self.disturb(PRIMARY, call.kind.name, outs)
        if not self._queue.put(Execution(self._cursor.at(call.kind.name, index), call, out, state), decision):
            self._compare(call, index, outs, results(call, execute_again(call, state)))
        return out

    def disturb(self, execution: str, operator: str, tensors: Sequence[torch.Tensor]) -> None:
        """Let the disturbance corrupt the results of an execution, PRIMARY or CHECKER, before they are compared."""
        if self._disturbance is not None:
            self._disturbance.falsify(execution, operator, self._cursor, tensors)
