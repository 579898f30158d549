"""The D-DMR queue of one rank: operators and AGC segments that wait for a window, and when they are verified."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ft.systems.dmr.plan import waiting as online
from ft.systems.dmr.runtime.deferred import Cost, Disturb, Entry, Waiting, entry, verify
from ft.systems.dmr.runtime.findings import Findings
from ft.systems.dmr.runtime.replay import Replay
from ft.systems.dmr.runtime.strategy import Decision, Segment

Call = tuple[Any, Sequence[Any], dict[str, Any]]


class Queue:
    """The queue of deferred verifications (D-DMR).

    Args:
        findings: receives the mismatches.
        segments: AGC segments of the plan, by id.
        helpers: operator id -> AGC segments that replay the operator only to produce its outputs.
        headroom: memory that deferred verifications may keep, in bytes, including what the plan has reserved.
        dynamic_us: expected durations in microseconds of the dynamic windows of an iteration, in order; later windows
            have no expected end.
        lasting: addresses of storages that are never freed (parameters).

    Attributes:
        disturb: corrupts the results of second executions in fault-injection experiments; None otherwise.
        most_bytes: largest amount of memory kept at one time so far, in bytes; memory that several single operators
            need, or several operators of one segment, counts once.
        in_windows: number of operators that were verified in windows.
        early: number that were verified before their window, because their memory was about to be changed or is scarce.
        late: number for which no window was left.
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
        self._waiting, self._dynamic = Waiting(self._gone, lasting), online.Waiting()
        self._replays: dict[str, Replay] = {}
        self._over: set[str] = set()
        self._opened = 0
        self._lasting, self._replay_bytes, self.most_bytes = lasting, 0, 0
        self.in_windows = self.early = self.late = 0

    def restart(self) -> None:
        """Begin an iteration and drop what an interrupted iteration left behind."""
        self._waiting.drop()
        self._dynamic = online.Waiting()
        self._replays, self._over, self._replay_bytes, self._opened = {}, set(), 0, 0
        self.in_windows = self.early = self.late = 0

    def __bool__(self) -> bool:
        return bool(len(self._waiting) or self._replays)

    def put(self, at, kind, call: Call, out: Any, state: torch.Tensor | None, decision: Decision) -> bool:
        """Defer the verification of an executed operator; return False if it has to be verified immediately."""
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
        """Record an operator, verified by other means, for the AGC segments that replay it for its outputs."""
        for name in self.helpers.get(identity, ()):
            self._record(name, at, kind, call, out, state, compares=False)

    def before_change(self, tensors: Iterable[torch.Tensor]) -> None:
        """Verify what reads the memory of ``tensors``, which is about to be written in place."""
        tensors = list(tensors)
        self.early += self._waiting.before_change(tensors)
        if self._replays:
            storages = {tensor.untyped_storage()._cdata for tensor in tensors}
            for name in [name for name, one in self._replays.items() if one.changes(storages)]:
                self.early += self._finish(name)

    def window(self, executed: int) -> None:
        """Verify what is due in a window that opens after ``executed`` planned operators of the iteration."""
        self.in_windows += self._waiting.take_due(executed)
        due = [name for name, one in self._replays.items() if one.is_whole and one.due <= executed]
        for name in due:
            self.in_windows += self._finish(name)

    def dynamic_window(self, is_over: Callable[[], bool]) -> None:
        """Verify the oldest deferred operators until a window of unknown length closes (SpareTrain, Method 4)."""
        number, self._opened = self._opened, self._opened + 1
        lasts = self._dynamic_us[number] if number < len(self._dynamic_us) else math.inf
        began = time.perf_counter()
        while not is_over():
            chosen = self._dynamic.oldest(lasts - (time.perf_counter() - began) * 1e6)
            if chosen is None:
                return
            self.in_windows += self._waiting.take_these([int(chosen.op)])

    def drain(self) -> None:
        """Verify everything that is still deferred, because the optimizer is about to change what it reads."""
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
        """Verify deferred operators early until memory suffices: planned operators have their memory reserved in the
        plan, the others share the rest of the headroom."""
        planned = max(self._waiting.nbytes - self._dynamic.held, 0.0) + self._replay_bytes
        pressed = self._dynamic.press(max(self._headroom - planned, 0.0))
        self.early += self._waiting.take_these([int(one.op) for one in pressed])
