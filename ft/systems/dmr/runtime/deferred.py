"""D-DMR: verifications of single operators that are deferred to a window (SpareTrain, Methods 2 and 3).

DMR (dual modular redundancy) verifies an operator by executing it a second time. D-DMR defers that to a *window*, a
time in which the rank communicates or is idle. Inputs and results are kept without copying, by separate tensor objects
on the same storages: a trainer that replaces the ``data`` of a tensor (``deallocate_pipeline_outputs``) does not affect
them. Before any of these storages is changed in place, the operators that use it are verified.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ft.systems.dmr.runtime import streams
from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import WINDOW, Findings, Mismatch
from ft.systems.dmr.runtime.operators import OperatorProperties, tensors_in
from ft.systems.dmr.runtime.redundant import execute_again, results

NEVER = 1 << 62
"""A ``due`` value that is greater than the number of any operator."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a deferred verification.

    Attributes:
        us: duration, in microseconds.
        bytes: memory that is kept until the verification and would be free otherwise, in bytes.
    """

    us: float = 0.0
    bytes: float = 0.0


@dataclass(slots=True)
class Entry:
    """One operator whose verification is deferred.

    Args:
        at: identity of the execution: operator and place in the iteration.
        kind: properties of the operator.
        func: the operator overload, which is called again.
        args: its positional arguments.
        kwargs: its keyword arguments.
        outs: its results.
        versions: version counters of its tensors at the time of its execution.
        storages: address -> size in bytes of the storages of its tensors.
        state: state of the random generator before its execution; None if it draws no random numbers.
        due: number of planned operators that precede its window; negative for a dynamic window, one whose duration
            differs in every iteration.
        cost: expected cost of verifying and keeping it.
        stream: CUDA stream of its execution; None on a CPU.
    """

    at: OperatorCall
    kind: OperatorProperties
    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: list[torch.Tensor]
    versions: list[int]
    storages: dict[int, int]
    state: torch.Tensor | None
    due: int
    cost: Cost
    stream: "torch.cuda.Stream | None"


def entry(
    at: OperatorCall,
    kind: OperatorProperties,
    call: tuple[Any, Sequence[Any], dict[str, Any]],
    out: Any,
    state: torch.Tensor | None,
    due: int,
    cost: Cost = Cost(),
) -> Entry:
    """Return the entry of an operator that has just been executed. The operator must not write in place.

    Args:
        at: identity of the execution.
        kind: properties of the operator.
        call: function, positional arguments and keyword arguments.
        out: the result.
        state: state of the random generator before the execution; None if it draws no random numbers.
        due: see ``Entry``.
        cost: see ``Entry``.
    """
    func, args, kwargs = call
    kept_args, kept_kwargs = _handles(args), _handles(kwargs)
    outs = [tensor.detach() for tensor in tensors_in(out)]
    kept = tensors_in((kept_args, kept_kwargs, outs))
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in kept)}
    versions = [tensor._version for tensor in kept]
    stream = streams.current(kept)
    return Entry(at, kind, func, kept_args, kept_kwargs, outs, versions, storages, state, due, cost, stream)


def _handles(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return type(value)(_handles(each) for each in value)
    if isinstance(value, dict):
        return {name: _handles(each) for name, each in value.items()}
    return value


class Waiting:
    """The deferred entries, in order of execution.

    Args:
        verify: executes the operator of an entry again and compares the results.
        lasting: addresses of storages that are never freed (parameters); these do not count as kept memory.

    Attributes:
        nbytes: memory that the entries keep now, in bytes.
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
        """Add an entry."""
        self._entries[id(one)] = one
        if one.due >= 0:
            self._next_due = min(self._next_due, one.due)
        for storage, size in one.storages.items():
            users = self._users.get(storage, 0)
            self._users[storage] = users + 1
            self.nbytes += 0 if users or storage in self._lasting else size

    def take(self, wanted: Callable[[Entry], bool]) -> int:
        """Verify and remove the entries for which ``wanted`` returns True, in order; return their number."""
        return self.take_these([number for number, one in self._entries.items() if wanted(one)])

    def take_these(self, numbers: Sequence[int]) -> int:
        """Verify and remove the entries whose ``id()`` is in ``numbers``; return their number."""
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
        """Verify and remove the entries that are due after ``executed`` planned operators; return their number."""
        if executed < self._next_due:
            return 0
        done = self.take(lambda one: 0 <= one.due <= executed)
        self._next_due = min((one.due for one in self._entries.values() if one.due >= 0), default=NEVER)
        return done

    def before_change(self, tensors: Iterable[torch.Tensor]) -> int:
        """Verify and remove the entries that use the memory of ``tensors``, which is about to be written in place;
        return their number."""
        hit = {storage for tensor in tensors if (storage := tensor.untyped_storage()._cdata) in self._users}
        return self.take(lambda one: not hit.isdisjoint(one.storages)) if hit else 0

    def drop(self) -> None:
        """Drop all entries without verifying them."""
        self._entries, self._users, self.nbytes, self._next_due = {}, {}, 0, NEVER


Disturb = Callable[[OperatorCall, Sequence[torch.Tensor]], None]
"""Corrupts the results of a second execution, in fault-injection experiments."""


def verify(one: Entry, findings: Findings, disturb: Disturb | None = None) -> None:
    """Execute the operator of ``one`` again and compare the results. If its tensors have been changed in the meantime,
    note a mismatch instead."""
    versions = [tensor._version for tensor in tensors_in((one.args, one.kwargs, one.outs))]
    if versions != one.versions:
        findings.note(Mismatch(one.at, WINDOW, note="its tensors were changed unseen by torch's dispatcher"))
        return
    with streams.joined([one.stream]):
        again = execute_again(one.func, one.args, one.kwargs, one.state)
        theirs = results(one.kind, one.args, one.kwargs, again)
        if disturb is not None:
            disturb(one.at, theirs)
        findings.pair(one.at, WINDOW, one.outs, theirs)
