"""All that waits for windows on one rank: single operators and AGC segments; and when it is verified."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ft.dmr.plan import online
from ft.dmr.runtime.deferred import Waiting, entry, verify
from ft.dmr.runtime.findings import Findings
from ft.dmr.runtime.replay import Replay
from ft.dmr.runtime.strategy import Decision, Segment

Call = tuple[Any, Sequence[Any], dict[str, Any]]


class Queue:
    """The D-DMR queue.

    Args:
        segments: the plan's AGC segments. helpers: operators that these execute again for what they make.
        headroom: bytes that may wait without a place in the plan (dynamic windows). dynamic_us: how long such windows
            last; None: not known.

    Attributes:
        in_windows: verifications that were executed in windows; late: those that no window was left for.
    """

    def __init__(
        self,
        findings: Findings,
        segments: Mapping[str, Segment] | None = None,
        helpers: Mapping[str, list[str]] | None = None,
        headroom: float = 0.0,
        dynamic_us: float | None = None,
    ):
        self._findings = findings
        self._segments, self.helpers = segments or {}, helpers or {}
        self._headroom, self._dynamic_us = headroom, dynamic_us
        self._waiting = Waiting(lambda one: verify(one, findings))
        self._replays: dict[str, Replay] = {}
        self._over: set[str] = set()
        self.in_windows = self.late = 0

    def restart(self) -> None:
        """An iteration begins; what an interrupted one left behind is forgotten."""
        self._waiting.drop()
        self._replays, self._over = {}, set()
        self.in_windows = self.late = 0

    def __bool__(self) -> bool:
        return bool(len(self._waiting) or self._replays)

    @property
    def most_bytes(self) -> int:
        return self._waiting.most_bytes

    def put(self, at, kind, call: Call, out: Any, state: torch.Tensor | None, decision: Decision) -> bool:
        """An operator has been executed that waits; False: it has to be verified at once."""
        if decision.replay is not None:
            return self._record(decision.replay, at, kind, call, out, state)
        if decision.due is not None:
            self._waiting.put(entry(at, kind, call, out, state, decision.due, decision.check_us))
            return True
        self._waiting.put(entry(at, kind, call, out, state, -1, decision.check_us))
        self._relieve()
        return True

    def help(self, identity: str, at, kind, call: Call, out: Any, state: torch.Tensor | None) -> None:
        """An operator has been executed that is verified otherwise, and that AGC segments replay for what it makes."""
        for name in self.helpers.get(identity, ()):
            self._record(name, at, kind, call, out, state, compares=False)

    def before_change(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are about to be written in place."""
        tensors = list(tensors)
        self._waiting.before_change(tensors)
        if self._replays:
            storages = [tensor.untyped_storage()._cdata for tensor in tensors]
            for name in [n for n, one in self._replays.items() if any(map(one.uses, storages))]:
                self._finish(name)

    def window(self, executed: int) -> None:
        """A window is open, after ``executed`` operators of the iteration: what is due is verified."""
        done = self._waiting.take(lambda one: 0 <= one.due <= executed)
        due = [name for name, one in self._replays.items() if one.is_whole and one.due <= executed]
        for name in due:
            self._finish(name)
        self.in_windows += done + len(due)

    def dynamic_window(self, is_over: Callable[[], bool]) -> None:
        """A window of unknown length is open: the oldest are verified until it closes (SpareTrain, Method 4)."""
        began = time.perf_counter()
        while not is_over():
            queue = self._dynamic()
            decision = online.in_dynamic_window(queue, (time.perf_counter() - began) * 1e6, self._dynamic_us)
            if not decision.execute:
                return
            self.in_windows += self._take(decision.execute)

    def drain(self) -> None:
        """Everything that waits is verified now: the optimizer is about to change what it reads."""
        self.late += self._waiting.take(lambda one: True)
        for name in list(self._replays):
            self.late += 1
            self._finish(name)

    def _record(self, name: str, at, kind, call: Call, out: Any, state: Any, *, compares: bool = True) -> bool:
        if name in self._over:
            return False
        replay = self._replays.get(name)
        if replay is None:
            segment = self._segments[name]
            replay = self._replays[name] = Replay(self._findings, segment.size, segment.due)
        replay.record(at, kind, call, out, state, compares=compares)
        return True

    def _finish(self, name: str) -> None:
        self._over.add(name)
        self._replays.pop(name).verify()

    def _dynamic(self) -> tuple[online.Entry, ...]:
        return tuple(
            online.Entry(str(id(one)), one.check_us, one.nbytes) for one in self._waiting.entries if one.due < 0
        )

    def _relieve(self) -> None:
        """Memory for what has no place in the plan is limited."""
        self._take(online.under_pressure(self._dynamic(), self._headroom).execute)

    def _take(self, chosen: Sequence[online.Entry]) -> int:
        names = {one.op for one in chosen}
        return self._waiting.take(lambda one: str(id(one)) in names) if names else 0
