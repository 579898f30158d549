"""AGC (activation-gradient checkpointing): replay neighbouring operators as one segment from the tensors at its
boundary (SpareTrain, Method 2).

Only digests are kept of the tensors that are produced inside the segment. The replay produces these tensors again, and
the results of each operator are compared.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ft.systems.dmr.runtime.cursor import At
from ft.systems.dmr.runtime.deferred import Disturb
from ft.systems.dmr.runtime.findings import WINDOW, Findings
from ft.systems.dmr.runtime.operators import Nature, tensors_in
from ft.systems.dmr.runtime.redundant import execute_again, results


@dataclass(frozen=True, slots=True)
class _Made:
    """A reference to a tensor that the replay produces: a view of result ``out`` of step ``step``."""

    step: int
    out: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Step:
    at: At
    kind: Nature
    func: Any
    args: Any
    kwargs: Any
    state: torch.Tensor | None
    compares: bool


class Replay:
    """One AGC segment in one iteration.

    Args:
        findings: receives the mismatches.
        size: number of operators in the segment.
        due: number of planned operators that precede its window.
        lasting: addresses of storages that are never freed.

    Attributes:
        nbytes: memory that the boundary tensors keep, in bytes.
    """

    def __init__(self, findings: Findings, size: int, due: int, lasting: Collection[int] = ()):
        self._findings, self._size, self.due = findings, size, due
        self._counted = set(lasting)
        self.nbytes = 0
        self._steps: list[_Step] = []
        self._makers: dict[int, tuple[StorageWeakRef, int, int, torch.dtype]] = {}
        self._kept: dict[int, tuple[torch.Tensor, int]] = {}
        self._expected = findings.rows()
        self._places: list[tuple[At, str]] = []

    @property
    def is_whole(self) -> bool:
        """Return whether all operators of the segment have been recorded."""
        return len(self._steps) == self._size

    def record(
        self,
        at: At,
        kind: Nature,
        call: tuple[Any, Sequence[Any], dict[str, Any]],
        out: Any,
        state: torch.Tensor | None,
        *,
        compares: bool = True,
    ) -> None:
        """Record an operator of the segment that has just been executed. With ``compares`` False, the operator is
        verified by other means and is replayed only to produce its outputs."""
        func, args, kwargs = call
        self._steps.append(_Step(at, kind, func, self._refer(args), self._refer(kwargs), state, compares))
        for number, tensor in enumerate(tensors_in(out)):
            storage = tensor.untyped_storage()
            # The weak reference prevents the allocator from reusing the address of the storage.
            self._makers[storage._cdata] = (StorageWeakRef(storage), len(self._steps) - 1, number, tensor.dtype)
            if compares:
                self._expected.add(tensor)
                self._places.append((at, WINDOW))

    def changes(self, storages: Collection[int]) -> bool:
        """Return whether the replay reads any of ``storages``, which are about to be written in place; it then has to
        be verified before the write. Also stops referring to results of the segment in these storages, because later
        operators read the changed contents there."""
        for storage in storages:
            self._makers.pop(storage, None)
        return any(tensor.untyped_storage()._cdata in storages for tensor, _ in self._kept.values())

    def verify(self, disturb: Disturb | None = None) -> int:
        """Replay and compare; return the number of operators that were compared."""
        compared = sum(step.compares for step in self._steps)
        if any(tensor._version != version for tensor, version in self._kept.values()):
            self._findings.unverified += compared
            return 0
        last = self._last_uses()
        made: dict[int, list[torch.Tensor]] = {}
        found = self._findings.rows()
        for number, step in enumerate(self._steps):
            args, kwargs = _resolve(step.args, made), _resolve(step.kwargs, made)
            outs = results(step.kind, args, kwargs, execute_again(step.func, args, kwargs, step.state))
            if step.compares and disturb is not None:
                disturb(step.at, outs)
            for tensor in outs if step.compares else ():
                found.add(tensor)
            made[number] = outs
            for old in last.get(number, ()):
                made.pop(old, None)
        expected, got = self._expected.table(), found.table()
        if got.device.type != "cpu" or not torch.equal(expected, got):
            self._findings.tables(self._places, expected, got)
        return compared

    def _last_uses(self) -> dict[int, list[int]]:
        """Return step -> the steps whose results are not needed after it."""
        last = {number: number for number in range(len(self._steps))}
        for number, step in enumerate(self._steps):
            for reference in _references((step.args, step.kwargs)):
                last[reference.step] = number
        found: dict[int, list[int]] = {}
        for step, user in last.items():
            found.setdefault(user, []).append(step)
        return found

    def _refer(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            maker = self._makers.get(value.untyped_storage()._cdata)
            if maker is not None and maker[3] == value.dtype:
                _, step, out, _ = maker
                return _Made(step, out, tuple(value.shape), value.stride(), value.storage_offset())
            kept = value.detach()
            self._kept[id(kept)] = (kept, kept._version)
            storage = value.untyped_storage()
            if storage._cdata not in self._counted:
                self._counted.add(storage._cdata)
                self.nbytes += storage.nbytes()
            return kept
        if isinstance(value, tuple | list):
            return type(value)(self._refer(each) for each in value)
        if isinstance(value, dict):
            return {name: self._refer(each) for name, each in value.items()}
        return value


def _resolve(value: Any, made: dict[int, list[torch.Tensor]]) -> Any:
    if isinstance(value, _Made):
        return made[value.step][value.out].as_strided(value.size, value.stride, value.offset)
    if isinstance(value, tuple | list):
        return type(value)(_resolve(each, made) for each in value)
    if isinstance(value, dict):
        return {name: _resolve(each, made) for name, each in value.items()}
    return value


def _references(value: Any) -> list[_Made]:
    if isinstance(value, _Made):
        return [value]
    if isinstance(value, tuple | list):
        return [one for each in value for one in _references(each)]
    if isinstance(value, dict):
        return _references(tuple(value.values()))
    return []
