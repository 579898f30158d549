"""AGC (activation-gradient checkpointing) in DMR: execute a sequence of operators again as a whole (SpareTrain, Method
2).

DMR (dual modular redundancy) verifies operators by executing them a second time. An AGC segment is a sequence of
neighbouring operators that is executed again (replayed) in a *window*, a time in which the rank communicates or is
idle. Until then only the tensors at the boundary of the segment are kept, and digests of the tensors that are produced
inside it. The replay produces these tensors again, and the results of each operator are compared by their digests.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ft.systems.dmr.runtime import streams
from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.deferred import Disturb
from ft.systems.dmr.runtime.findings import WINDOW, Findings
from ft.systems.dmr.runtime.operators import OperatorProperties, tensors_in
from ft.systems.dmr.runtime.redundant import execute_again, results


@dataclass(frozen=True, slots=True)
class _Made:
    """A reference to a tensor that the replay produces: a view of a result of an earlier step.

    Attributes:
        step: number of the step.
        out: number of the result among the results of the step.
        size: shape of the view.
        stride: strides of the view, in elements.
        offset: storage offset of the view, in elements.
    """

    step: int
    out: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Step:
    """One recorded operator. ``args`` and ``kwargs`` contain ``_Made`` in place of tensors that the replay produces.
    ``compares`` is True if the replay compares its results."""

    at: OperatorCall
    kind: OperatorProperties
    func: Any
    args: Any
    kwargs: Any
    state: torch.Tensor | None
    compares: bool


class Replay:
    """One AGC segment in one iteration: records its operators, and replays them later.

    Args:
        findings: receives the mismatches.
        size: number of operators in the segment.
        due: number of planned operators that precede its window.
        lasting: addresses of storages that are never freed (parameters), which do not count in ``nbytes``.

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
        self._places: list[tuple[OperatorCall, str]] = []
        self._streams: set[torch.cuda.Stream | None] = set()

    @property
    def is_whole(self) -> bool:
        """Return whether all operators of the segment have been recorded."""
        return len(self._steps) == self._size

    def record(
        self,
        at: OperatorCall,
        kind: OperatorProperties,
        call: tuple[Any, Sequence[Any], dict[str, Any]],
        out: Any,
        state: torch.Tensor | None,
        *,
        compares: bool = True,
    ) -> None:
        """Record an operator that has just been executed.

        Args:
            at: identity of the execution.
            kind: properties of the operator.
            call: function, positional arguments and keyword arguments.
            out: the result.
            state: state of the random generator before the execution; None if it draws no random numbers.
            compares: False if the operator is verified by other means and replayed only to produce its outputs.
        """
        func, args, kwargs = call
        self._streams.add(streams.current(tensors_in((args, kwargs, out))))
        self._steps.append(_Step(at, kind, func, self._refer(args), self._refer(kwargs), state, compares))
        for number, tensor in enumerate(tensors_in(out)):
            storage = tensor.untyped_storage()
            # The weak reference prevents the allocator from reusing the address of the storage.
            self._makers[storage._cdata] = (StorageWeakRef(storage), len(self._steps) - 1, number, tensor.dtype)
            if compares:
                self._expected.add(tensor)
                self._places.append((at, WINDOW))

    def changes(self, storages: Collection[int]) -> bool:
        """Return whether the replay reads any of ``storages``, which are about to be written in place. The caller then
        has to call ``verify`` before the write.

        Later operators of the segment read the changed contents of these storages. The method therefore forgets that
        the segment produced them, so that such contents will be kept and not taken from the replay.
        """
        for storage in storages:
            self._makers.pop(storage, None)
        return any(tensor.untyped_storage()._cdata in storages for tensor, _ in self._kept.values())

    def verify(self, disturb: Disturb | None = None) -> int:
        """Execute the operators again and compare the results; return the number of compared operators. If a kept
        tensor was changed, compare nothing, count the operators as unverified and return 0."""
        compared = sum(step.compares for step in self._steps)
        if any(tensor._version != version for tensor, version in self._kept.values()):
            self._findings.unverified += compared
            return 0
        with streams.joined(self._streams):
            self._execute(disturb)
        return compared

    def _execute(self, disturb: Disturb | None) -> None:
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

    def _last_uses(self) -> dict[int, list[int]]:
        """Return number of a step -> numbers of the steps whose results are used by this step and by no later step."""
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
