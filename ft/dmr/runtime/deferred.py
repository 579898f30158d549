"""D-DMR: verifications that wait for a window (SpareTrain, Method 2 and 3).

Inputs and results are kept as they are in memory, under handles of their own: a trainer that swaps a tensor's ``data``
away (deallocate_pipeline_outputs) does not reach these. Before anything of that memory is changed in place, what waits
for it is verified.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ft.dmr.runtime.course import At
from ft.dmr.runtime.findings import WINDOW, Findings, Mismatch
from ft.dmr.runtime.operators import Nature, tensors_in
from ft.dmr.runtime.twice import execute_again, results


@dataclass(slots=True)
class Entry:
    """One operator that waits. ``due``: the number of executed operators from which on its window has begun."""

    at: At
    kind: Nature
    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: list[torch.Tensor]
    versions: list[int]
    state: torch.Tensor | None
    due: int
    check_us: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that wait with it; what other entries share is counted with each."""
        return sum(tensor.nbytes for tensor in (*tensors_in((self.args, self.kwargs)), *self.outs))


def entry(
    at: At,
    kind: Nature,
    call: tuple[Any, Sequence[Any], dict[str, Any]],
    out: Any,
    state: torch.Tensor | None,
    due: int,
    check_us: float = 0.0,
) -> Entry:
    """An operator that has just been executed, kept for later. It must write nothing in place."""
    func, args, kwargs = call
    kept_args, kept_kwargs = _handles(args), _handles(kwargs)
    outs = [tensor.detach() for tensor in tensors_in(out)]
    versions = [tensor._version for tensor in tensors_in((kept_args, kept_kwargs, outs))]
    return Entry(at, kind, func, kept_args, kept_kwargs, outs, versions, state, due, check_us)


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
        verify: takes an entry, and compares.
    """

    def __init__(self, verify: Callable[[Entry], None]):
        self._verify = verify
        self._entries: list[Entry] = []
        self._users: dict[int, int] = {}
        self.most_bytes = 0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Sequence[Entry]:
        return self._entries

    @property
    def nbytes(self) -> int:
        return self._bytes

    def put(self, one: Entry) -> None:
        self._entries.append(one)
        for storage in _storages(one):
            self._users[storage] = self._users.get(storage, 0) + 1
        self._bytes += one.nbytes
        self.most_bytes = max(self.most_bytes, self._bytes)

    def take(self, wanted: Callable[[Entry], bool]) -> int:
        """Verifies what is ``wanted``, in order; returns how many."""
        due = [one for one in self._entries if wanted(one)]
        if not due:
            return 0
        ids = set(map(id, due))
        self._entries = [one for one in self._entries if id(one) not in ids]
        for one in due:
            for storage in _storages(one):
                self._users[storage] -= 1
                if not self._users[storage]:
                    del self._users[storage]
            self._bytes -= one.nbytes
            self._verify(one)
        return len(due)

    def before_change(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are about to be written in place: what waits for their memory is verified first."""
        hit = {storage for tensor in tensors if (storage := _storage(tensor)) in self._users}
        if hit:
            self.take(lambda one: not hit.isdisjoint(_storages(one)))

    def drop(self) -> None:
        """Forgets all that waits."""
        self._entries, self._users, self._bytes = [], {}, 0


def verify(one: Entry, findings: Findings) -> None:
    """Executes an entry's operator again and compares."""
    versions = [tensor._version for tensor in tensors_in((one.args, one.kwargs, one.outs))]
    if versions != one.versions:
        findings.note(Mismatch(one.at, WINDOW, note="its tensors were changed behind the dispatcher while it waited"))
        return
    again = execute_again(one.func, one.args, one.kwargs, one.state)
    findings.pair(one.at, WINDOW, one.outs, results(one.kind, one.args, one.kwargs, again))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storages(one: Entry) -> set[int]:
    return {_storage(tensor) for tensor in (*tensors_in((one.args, one.kwargs)), *one.outs)}
