"""D-DMR: verifications that wait for a window (SpareTrain, Method 2 and 3).

Inputs and results are kept as they are in memory, under handles of their own: a trainer that swaps a tensor's ``data``
away (deallocate_pipeline_outputs) does not reach these. Before anything of that memory is changed in place, what waits
for it is verified.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ft.systems.dmr.runtime.cursor import At
from ft.systems.dmr.runtime.findings import WINDOW, Findings, Mismatch
from ft.systems.dmr.runtime.operators import Nature, tensors_in
from ft.systems.dmr.runtime.redundant import execute_again, results

NEVER = 1 << 62
"""Later than any operator."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of a verification, and bytes that wait with it and would be free without."""

    us: float = 0.0
    bytes: float = 0.0


@dataclass(slots=True)
class Entry:
    """One operator that waits.

    Args:
        versions: of its tensors, as it was executed. storages: address -> bytes of the memory they lie in.
        due: the number of executed operators from which on its window has begun; below 0: a dynamic one.
        cost: what verifying it is expected to take and to keep.
    """

    at: At
    kind: Nature
    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: list[torch.Tensor]
    versions: list[int]
    storages: dict[int, int]
    state: torch.Tensor | None
    due: int
    cost: Cost


def entry(
    at: At,
    kind: Nature,
    call: tuple[Any, Sequence[Any], dict[str, Any]],
    out: Any,
    state: torch.Tensor | None,
    due: int,
    cost: Cost = Cost(),
) -> Entry:
    """An operator that has just been executed, kept for later. It must write nothing in place."""
    func, args, kwargs = call
    kept_args, kept_kwargs = _handles(args), _handles(kwargs)
    outs = [tensor.detach() for tensor in tensors_in(out)]
    kept = tensors_in((kept_args, kept_kwargs, outs))
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in kept)}
    versions = [tensor._version for tensor in kept]
    return Entry(at, kind, func, kept_args, kept_kwargs, outs, versions, storages, state, due, cost)


def _handles(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return type(value)(_handles(each) for each in value)
    if isinstance(value, dict):
        return {name: _handles(each) for name, each in value.items()}
    return value


class Waiting:
    """The queue, in order of execution.

    Args:
        verify: takes an entry, and compares. lasting: addresses of memory that is there anyway: parameters.

    Attributes:
        nbytes: of the memory that is kept now.
    """

    def __init__(self, verify: Callable[[Entry], None], lasting: Collection[int] = ()):
        self._verify, self._lasting = verify, frozenset(lasting)
        self._entries: dict[int, Entry] = {}
        self._users: dict[int, int] = {}
        self.nbytes = 0
        self._next_due = NEVER

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, one: Entry) -> None:
        self._entries[id(one)] = one
        if one.due >= 0:
            self._next_due = min(self._next_due, one.due)
        for storage, size in one.storages.items():
            users = self._users.get(storage, 0)
            self._users[storage] = users + 1
            self.nbytes += 0 if users or storage in self._lasting else size

    def take(self, wanted: Callable[[Entry], bool]) -> int:
        """Verifies what is ``wanted``, in order; returns how many."""
        return self.take_these([number for number, one in self._entries.items() if wanted(one)])

    def take_these(self, numbers: Sequence[int]) -> int:
        """Verifies those with these ``id``s; returns how many."""
        for number in numbers:
            one = self._entries.pop(number)
            self._verify(one)
            self._let_go(one)
        return len(numbers)

    def _let_go(self, one: Entry) -> None:
        for storage, size in one.storages.items():
            self._users[storage] -= 1
            if not self._users[storage]:
                del self._users[storage]
                self.nbytes -= 0 if storage in self._lasting else size

    def take_due(self, executed: int) -> int:
        """Verifies what is due after so many operators; returns how many."""
        if executed < self._next_due:
            return 0
        done = self.take(lambda one: 0 <= one.due <= executed)
        self._next_due = min((one.due for one in self._entries.values() if one.due >= 0), default=NEVER)
        return done

    def before_change(self, tensors: Iterable[torch.Tensor]) -> int:
        """These are about to be written in place: what waits for their memory is verified first; returns how many."""
        hit = {storage for tensor in tensors if (storage := tensor.untyped_storage()._cdata) in self._users}
        return self.take(lambda one: not hit.isdisjoint(one.storages)) if hit else 0

    def drop(self) -> None:
        """Forgets all that waits."""
        self._entries, self._users, self.nbytes, self._next_due = {}, {}, 0, NEVER


Disturb = Callable[[At, Sequence[torch.Tensor]], None]
"""Falsifies what a second execution has made, in experiments."""


def verify(one: Entry, findings: Findings, disturb: Disturb | None = None) -> None:
    """Executes an entry's operator again and compares."""
    versions = [tensor._version for tensor in tensors_in((one.args, one.kwargs, one.outs))]
    if versions != one.versions:
        findings.note(Mismatch(one.at, WINDOW, note="its tensors were changed behind the dispatcher while it waited"))
        return
    again = execute_again(one.func, one.args, one.kwargs, one.state)
    theirs = results(one.kind, one.args, one.kwargs, again)
    if disturb is not None:
        disturb(one.at, theirs)
    findings.pair(one.at, WINDOW, one.outs, theirs)
