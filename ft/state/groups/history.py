"""Remembers which communication operations this worker has started in the present step and in the two steps before.

When a run hangs, the cause is found from what every rank has started last, and from how its step departs from the step
before (``ft.faults.hang``). Remembering an operation takes about a microsecond: nothing is formatted before somebody
inspections.
"""

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from ft.faults.hang.inspection import Departure, Operation, channel, departure, missing_end, operation_name, source_name

_MOST, _NEWEST = 10_000, 1_000
"""Number of operations of one step that are remembered, and of the newest ones after them. A longer step is compared up
to the former."""
_LIBRARIES = ("/torch/", "/ft/state/groups/", "/ft/systems/", "/megatron/patches/", "/contextlib.py")


class StartedOperation(NamedTuple):
    """One operation that was started.

    Attributes:
        group: name of the process group.
        name: name of the operation.
        peer: logical rank of the other end of a message; None for a collective.
        sizes: (dtype, shape) of each tensor.
        site: (code, number of the line) of the call, or a description of that place.
        sequence: number in its channel.
        began: monotonic time.
        work: weak reference to the operation's work object.
    """

    group: str
    name: str
    peer: int | None
    sizes: tuple[tuple[torch.dtype, torch.Size], ...]
    site: tuple[CodeType, int] | str | None
    sequence: int
    began: float
    work: Callable[[], Any]


class History:
    """The operations of the present step and of the two before. Only the threads of training add to it.

    After a recovery, the last whole step before it takes their place until a step is whole again, because the same hang
    often follows.
    """

    def __init__(self) -> None:
        self._older: list[StartedOperation] = []
        self._before: list[StartedOperation] = []
        self._usual: tuple[bool, ...] = (True, True, True)
        self._kept: list[StartedOperation] = []
        self._now: list[StartedOperation] = []
        self._newest: deque[StartedOperation] = deque(maxlen=_NEWEST)

    def begins(self, is_usual: bool = True) -> None:
        """Record that a step begins.

        Args:
            is_usual: whether what was started since the last call was a whole training step, with which others can be
                compared: not an attempt that has failed, or a step with an evaluation.
        """
        self._usual = (*self._usual[1:2], self._usual[2] and is_usual, True)
        self._older, self._before, self._now = self._before, self._now, []
        self._newest.clear()
        if self._usual[1] and self._before:
            self._kept = []

    def is_unusual(self) -> None:
        """Record that the present step cannot be compared with others, because it contains an evaluation, say."""
        self._usual = (*self._usual[:2], False)

    def clears(self) -> None:
        """Forget the present step, because of a recovery, and keep the last whole one."""
        steps = zip((self._before, self._older), (self._usual[1], self._usual[0]), strict=True)
        self._kept = next((step for step, is_usual in steps if step and is_usual), self._kept)
        self._older, self._before = [], []
        self._now = []
        self._newest.clear()
        self._usual = (True, True, False)

    def started(
        self, group: str, method: str, peer: int | None, sequence: int, values: Sequence[Any], work: Any
    ) -> None:
        """Remember an operation, as a :class:`StartedOperation`.

        ``method`` is the method of ``dist.ProcessGroup`` that was called with ``values``. ``work`` tells when the
        operation has ended; it is not kept alive.
        """
        name = operation_name(method)
        self.add(StartedOperation(group, name, peer, _sizes(values), _site(), sequence, work.began, weakref.ref(work)))

    def add(self, entry: StartedOperation) -> None:
        """Remember an operation that is described already."""
        if len(self._now) < _MOST:
            self._now.append(entry)
        else:
            self._newest.append(entry)

    def operations(self, status: Callable[[StartedOperation], tuple[bool, bool]]) -> tuple[Operation, ...]:
        """Return the operations that have not ended, and the last one of each channel, in the order of their start.

        Args:
            status: function that returns (whether the operation has ended, whether training waits for it).
        """
        now, found = time.monotonic(), []
        entries = [*self._before, *self._now, *self._newest]
        last: dict[str, int] = {}
        for at, entry in enumerate(entries):
            last[channel(entry.group, entry.name, entry.peer)] = at
        wanted = set(last.values())
        for at, entry in enumerate(entries):
            done, awaited = status(entry)
            if not done or at in wanted:
                found.append(_operation(entry, done, awaited, now))
        return tuple(found)

    def entries(self) -> list[StartedOperation]:
        """Return all operations that are remembered, in the order of their start."""
        return [*self._older, *self._before, *self._now]

    def departure(self) -> Departure | None:
        """Return how the present step, or the one before, departs from the step before it; None if neither does."""
        older, before, now = (
            step if is_usual else None
            for step, is_usual in zip((self._older, self._before, self._now), self._usual, strict=True)
        )
        found = None
        if older is not None and before is not None:
            found = departure(older, before) or missing_end(older, before, self._now)
        before = self._kept or before
        if found is None and before is not None and now is not None:
            found = departure(before, now)
        if found is None:
            return None
        kind, due, started = found
        return Departure(kind, *(_operation(one, True, False, one.began) for one in (due, started)))


def _operation(entry: StartedOperation, done: bool, awaited: bool, now: float) -> Operation:
    sizes = tuple(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in entry.sizes)
    age_s = round(now - entry.began, 3)
    return Operation(
        *(entry.group, entry.name, entry.sequence, entry.peer, sizes, done, awaited, line(entry.site), age_s)
    )


def line(site: tuple[CodeType, int] | str | None) -> str:
    """Return a place in the program as "file:line function"."""
    if isinstance(site, tuple):
        return f"{shortened(site[0].co_filename)}:{site[1]} {site[0].co_name}"
    return site or ""


@cache
def shortened(filename: str) -> str:
    """Return the path of a source file of this process as :func:`source_name` does."""
    return source_name(filename, os.getcwd())


def _sizes(values: Sequence[Any]) -> tuple[tuple[torch.dtype, torch.Size], ...]:
    found = []
    for value in values:
        if hasattr(value, "dtype"):
            found.append((value.dtype, value.shape))
        elif isinstance(value, list | tuple):
            found += [(one.dtype, one.shape) for one in value if hasattr(one, "dtype")]
    return tuple(found)


_KNOWN: dict[str, bool] = {}


def _site() -> tuple[CodeType, int] | None:
    """Return the innermost call outside of the communication libraries."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        library = _KNOWN.get(name)
        if library is None:
            library = _KNOWN[name] = any(part in name for part in _LIBRARIES)
        if not library:
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None
