"""Queue of deferred verifications on one rank (D-DMR; SpareTrain, Methods 2 to 4).

DMR (dual modular redundancy) verifies an operator by executing it a second time. D-DMR defers that to a *window*, in
which the rank communicates or is idle. The end of a *dynamic window* is not known when it opens; in such a window the
oldest verifications are executed. An *AGC segment* (activation-gradient checkpointing) is a sequence of operators that
is replayed as a whole from the tensors at its boundary. A DMR plan assigns operators and segments to windows.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ft.systems.dmr.plan import waiting as online
from ft.systems.dmr.runtime.deferred import Cost, Disturb, Entry, Waiting, entry, verify
from ft.systems.dmr.runtime.findings import Findings
from ft.systems.dmr.runtime.replay import Replay
from ft.systems.dmr.runtime.spent import spent_on
from ft.systems.dmr.runtime.strategy import Decision, Segment

Call = tuple[Any, Sequence[Any], dict[str, Any]]


class Queue:
    """The queue of deferred verifications of one rank. The DMR engine fills it and calls it when windows open.

    Args:
        findings: receives the mismatches.
        segments: AGC segments of the plan, by id.
        helpers: operator id -> AGC segments that replay the operator without comparing it, because they need its
            outputs.
        headroom: memory that deferred verifications may keep, in bytes, including the memory reserved by the plan.
        dynamic_us: expected durations, in microseconds, of the dynamic windows of an iteration, in order. If there are
            more dynamic windows, the duration of the others is not known.
        lasting: addresses of storages that are never freed (parameters).

    Attributes:
        disturb: corrupts the results of second executions in fault-injection experiments; None otherwise.
        most_bytes: largest amount of memory kept at one time so far, in bytes. Memory that several single operators
            share, or several operators of one segment, counts once.
        in_windows: number of operators of the iteration that were verified in windows.
        early: number of operators that were verified before their window, because their memory was about to be
            changed, or because memory was scarce.
        late: number of operators that were verified just before the optimizer step, because no window was left.
    """

    def __init__(
        self,
        findings: Findings,
        segments: Mapping[str, Segment] | None = None,
        helpers: Mapping[str, list[str]] | None = None,
        headroom: float = 0.0,
        dynamic_us: Sequence[float] = (),
        lasting: Collection[int] = (),
    ):
        self._findings = findings
        self.disturb: Disturb | None = None
        self._segments, self.helpers = segments or {}, helpers or {}
        self._headroom, self._dynamic_us = headroom, dynamic_us
        self._spent = spent_on(findings.device)
        self._waiting, self._dynamic = Waiting(self._gone, lasting), online.Waiting()
        self._replays: dict[str, Replay] = {}
        self._over: set[str] = set()
        self._opened = 0
        self._lasting, self._replay_bytes, self.most_bytes = lasting, 0, 0
        self.in_windows = self.early = self.late = 0

    def restart(self) -> None:
        """Begin an iteration. Drop the verifications that an interrupted iteration has left in the queue."""
        self._waiting.drop()
        self._spent.restart()
        self._dynamic = online.Waiting()
        self._replays, self._over, self._replay_bytes, self._opened = {}, set(), 0, 0
        self.in_windows = self.early = self.late = 0

    def __bool__(self) -> bool:
        return bool(len(self._waiting) or self._replays)

    def put(self, at, kind, call: Call, out: Any, state: torch.Tensor | None, decision: Decision) -> bool:
        """Defer the verification of an operator that has just been executed.

        Args:
            at: identity of the operator in the iteration.
            kind: properties of the operator.
            call: function, positional arguments and keyword arguments.
            out: the result.
            state: state of the random generator before the execution; None if the operator draws no random numbers.
            decision: when the operator is to be verified.

        Returns:
            False if the operator has to be verified immediately, because its segment has been replayed already.
        """
        if decision.replay is not None:
            return self._record(decision.replay, at, kind, call, out, state)
        if decision.due is not None:
            self._waiting.put(entry(at, kind, call, out, state, decision.due))
            self._weigh()
            return True
        one = entry(at, kind, call, out, state, -1, Cost(decision.check_us, decision.bytes))
        self._waiting.put(one)
        self._dynamic.put(online.Entry(str(id(one)), one.cost.us, one.cost.bytes))
        self._relieve()
        self._weigh()
        return True

    def help(self, identity: str, at, kind, call: Call, out: Any, state: torch.Tensor | None) -> None:
        """Record an operator, which is verified by other means, for the AGC segments whose replay needs its outputs.

        Args:
            identity: id of the operator in the plan.
            at: identity of the operator in the iteration.
            kind: properties of the operator.
            call: function, positional arguments and keyword arguments.
            out: the result.
            state: state of the random generator before the execution; None if the operator draws no random numbers.
        """
        for name in self.helpers.get(identity, ()):
            self._record(name, at, kind, call, out, state, compares=False)

    def before_change(self, tensors: Iterable[torch.Tensor]) -> None:
        """Verify all deferred operators that use the memory of ``tensors``, which is about to be written in place."""
        tensors = list(tensors)
        self.early += self._waiting.before_change(tensors)
        if self._replays:
            storages = {tensor.untyped_storage()._cdata for tensor in tensors}
            for name in [name for name, one in self._replays.items() if one.changes(storages)]:
                self.early += self._finish(name)

    def window(self, executed: int) -> None:
        """Verify all operators and segments that are due in a window.

        Args:
            executed: number of planned operators of the iteration that precede the window.
        """
        self.in_windows += self._waiting.take_due(executed)
        due = [name for name, one in self._replays.items() if one.is_whole and one.due <= executed]
        for name in due:
            self.in_windows += self._finish(name)

    def dynamic_window(self, is_over: Callable[[], bool]) -> None:
        """Verify the oldest deferred operators until a window of unknown length closes (SpareTrain, Method 4).

        Args:
            is_over: returns whether the window has closed.
        """
        number, self._opened = self._opened, self._opened + 1
        self._spent.opens(self._dynamic_us[number] if number < len(self._dynamic_us) else math.inf)
        while not is_over():
            chosen = self._dynamic.oldest(self._spent.room())
            if chosen is None:
                break
            self._spent.launches(chosen.check_us)
            self.in_windows += self._waiting.take_these([int(chosen.op)])
        self._spent.closes()

    def drain(self) -> None:
        """Verify everything that is still deferred, because the optimizer is about to change the parameters."""
        self.late += self._waiting.take(lambda one: True)
        for name in list(self._replays):
            self.late += self._finish(name)

    def _record(self, name: str, at, kind, call: Call, out: Any, state: Any, *, compares: bool = True) -> bool:
        if name in self._over:
            return False
        replay = self._replays.get(name)
        if replay is None:
            segment = self._segments[name]
            replay = self._replays[name] = Replay(self._findings, segment.size, segment.due, self._lasting)
        self._replay_bytes -= replay.nbytes
        replay.record(at, kind, call, out, state, compares=compares)
        self._replay_bytes += replay.nbytes
        self._weigh()
        return True

    def _finish(self, name: str) -> int:
        self._over.add(name)
        replay = self._replays.pop(name)
        self._replay_bytes -= replay.nbytes
        return replay.verify(self.disturb)

    def _gone(self, one: Entry) -> None:
        """Verify an entry, and remove it from the dynamic queue if it is there."""
        name = str(id(one))
        if name in self._dynamic:
            self._dynamic.take(name)
        verify(one, self._findings, self.disturb)

    def _weigh(self) -> None:
        self.most_bytes = max(self.most_bytes, self._waiting.nbytes + self._replay_bytes)

    def _relieve(self) -> None:
        """Verify deferred operators of dynamic windows early until memory suffices.

        The memory of operators and segments that the plan assigns to a window is reserved in the plan. The operators
        that wait for a dynamic window share the rest of ``headroom``.
        """
        planned = max(self._waiting.nbytes - self._dynamic.held, 0.0) + self._replay_bytes
        pressed = self._dynamic.press(max(self._headroom - planned, 0.0))
        self.early += self._waiting.take_these([int(one.op) for one in pressed])
