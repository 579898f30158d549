"""Deferred verifications on one rank (D-DMR; SpareTrain, Methods 2 to 4): single operators, AGC segments, and their
queue.

A verification is deferred to a window, in which the rank communicates or is idle. The end of a *dynamic window* is not
known when it opens; in such a window the oldest verifications are executed. A DMR plan assigns operators and segments
to windows.

Inputs and results of an operator are kept without copying, by separate tensor objects on the same storages: a trainer
that replaces the ``data`` of a tensor (``deallocate_pipeline_outputs``) does not affect them. Before any of these
storages is changed in place, the operators that use it are verified.

Of an AGC segment, which is replayed as a whole, only the tensors at its boundary are kept until then, and digests
of the tensors that are produced inside it. The replay produces these tensors again, and the results of each operator
are compared by their digests.

Second executions are ordered after the first ones where training computes on several CUDA streams: core computes shared
experts on a stream of their own, and waits for it only after the exchange of tokens, in which deferred operators are
executed. How much of a window has been used cannot be read from the host's clock on an accelerator, where an operator
that was launched has not been computed yet, and to ask the device would mean to wait for it.
"""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ft.systems.dmr.plan import online
from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import WINDOW, Findings, Mismatch
from ft.systems.dmr.runtime.operators import Call, execute_again, results, returned, tensors_in
from ft.systems.dmr.runtime.strategy import CheckMethod, PlannedSegment

_T = TypeVar("_T")


def current(tensors: Sequence[torch.Tensor]) -> "torch.cuda.Stream | None":
    """Return the CUDA stream on which an operator with these results or arguments is executed now; None on a CPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device)


@contextlib.contextmanager
def joined(streams: "Iterable[torch.cuda.Stream | None]") -> Iterator[None]:
    """Return a context in which the current stream has waited for ``streams``; at its end they wait for the current
    one, because torch's allocator gives memory that is freed back to the stream it was allocated on at once.
    """
    others = []
    for stream in streams:
        if stream is not None and (here := torch.cuda.current_stream(stream.device)) != stream:
            here.wait_stream(stream)
            others.append((stream, here))
    try:
        yield
    finally:
        for stream, here in others:
            stream.wait_stream(here)


_WEIGHT = 0.25
"""Weight of a new window in the moving average of measured over planned time."""
_LEAST = 0.01
"""Least such average: events are too coarse for shorter times."""


class HostTime:
    """Tells what still fits into a window on CPUs, on which an operator has been computed when its call returns: the
    host's clock counts."""

    def restart(self) -> None:
        """Begin an iteration."""

    def opens(self, lasts_us: float) -> None:
        """Note that a window has opened. ``lasts_us``: its expected duration in microseconds; infinite: not known."""
        self._lasts, self._began = lasts_us, time.perf_counter()

    def room(self) -> float:
        """Return how long an operator may take, according to the plan, that still fits, in microseconds."""
        return self._lasts - (time.perf_counter() - self._began) * 1e6

    def launches(self, us: float) -> None:
        """Note that an operator is about to be launched, which takes ``us`` microseconds according to the plan."""

    def closes(self) -> None:
        """End the window: no further operator is executed again in it."""


class DeviceTime(HostTime):
    """For accelerators: the planned times of what was launched count, corrected by what earlier windows have taken.

    Events around the operators of each window are read in a later iteration, when the device has passed them. Into a
    window whose duration is not known nothing is launched. ``event`` makes an event that can be timed.
    """

    def __init__(self, event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)):
        self._event = event
        self._unread: list[tuple[Any, Any, float]] = []
        self._lasts, self._planned, self._ratio = 0.0, 0.0, 1.0
        self._began: Any = None

    def restart(self) -> None:
        passed = [window for window in self._unread if window[1].query()]
        self._unread = [window for window in self._unread if window not in passed]
        for began, ended, planned in passed:
            measured = began.elapsed_time(ended) * 1e3 / planned
            self._ratio = max(self._ratio + _WEIGHT * (measured - self._ratio), _LEAST)

    def opens(self, lasts_us: float) -> None:
        self._lasts, self._planned = lasts_us if math.isfinite(lasts_us) else 0.0, 0.0

    def room(self) -> float:
        return self._lasts / self._ratio - self._planned

    def launches(self, us: float) -> None:
        if not self._planned:
            self._began = self._event()
            self._began.record()
        self._planned += us

    def closes(self) -> None:
        if self._planned:
            ended = self._event()
            ended.record()
            self._unread.append((self._began, ended, self._planned))


def spent_on(device: torch.device) -> HostTime:
    """Return the counter for operators of a device."""
    return DeviceTime() if device.type == "cuda" else HostTime()


NEVER = 1 << 62
"""A ``due`` value that is greater than the number of any operator."""


class Execution(NamedTuple):
    """One execution of an operator that does not write in place.

    Attributes:
        at: operator and place in the iteration.
        out: the result.
        state: state of the random generator before the execution; None if it draws no random numbers.
    """

    at: OperatorCall
    call: Call
    out: Any
    state: torch.Tensor | None


@dataclass(slots=True)
class DeferredOperator:
    """One operator whose verification is deferred.

    Attributes:
        done: the execution, with handles of its arguments, and with its results as a list.
        versions: version counters of its tensors at the time of its execution.
        storages: address -> size in bytes of the storages of its tensors.
        due: number of planned operators that precede its window; negative for a dynamic window, one whose duration
            differs in every iteration.
        stream: CUDA stream of its execution; None on a CPU.
    """

    done: Execution
    versions: list[int]
    storages: dict[int, int]
    due: int
    stream: "torch.cuda.Stream | None"


def entry(done: Execution, due: int) -> DeferredOperator:
    """Return the entry of an operator that has just been executed."""
    at, (kind, func, args, kwargs), out, state = done
    call = Call(kind, func, *mapped(torch.Tensor, torch.Tensor.detach, (args, kwargs)))
    outs = [tensor.detach() for tensor in results(call, out)]
    kept = tensors_in((call.args, call.kwargs, outs))
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in kept)}
    return DeferredOperator(
        Execution(at, call, outs, state), [tensor._version for tensor in kept], storages, due, current(kept)
    )


def mapped(kind: type[_T], change: Callable[[_T], Any], value: Any) -> Any:
    """Return arguments with ``change(x)`` in place of each x of a kind; lists, tuples and dicts are searched."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(mapped(kind, change, each) for each in value)
    if isinstance(value, dict):
        return {name: mapped(kind, change, each) for name, each in value.items()}
    return value


class Waiting:
    """The deferred entries, in order of execution.

    Args:
        verify: executes the operator of an entry again and compares the results.
        lasting: addresses of storages that are never freed (parameters); these do not count in ``nbytes``, the memory
            that the entries keep now.
    """

    def __init__(self, verify: Callable[[DeferredOperator], None], lasting: Collection[int] = ()):
        self._verify, self._lasting = verify, frozenset(lasting)
        self._entries: dict[int, DeferredOperator] = {}
        self._users: dict[int, int] = {}
        self.nbytes = 0
        self._next_due = NEVER

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, one: DeferredOperator) -> None:
        """Add an entry."""
        self._entries[id(one)] = one
        if one.due >= 0:
            self._next_due = min(self._next_due, one.due)
        for storage, size in one.storages.items():
            users = self._users.get(storage, 0)
            self._users[storage] = users + 1
            self.nbytes += 0 if users or storage in self._lasting else size

    def take(self, wanted: Callable[[DeferredOperator], bool]) -> int:
        """Verify and remove the entries for which ``wanted`` returns True, in order; return their number."""
        return self.take_these([number for number, one in self._entries.items() if wanted(one)])

    def take_these(self, numbers: Sequence[int]) -> int:
        """Verify and remove the entries whose ``id()`` is in ``numbers``; return their number."""
        for number in numbers:
            one = self._entries.pop(number)
            self._verify(one)
            self._let_go(one)
        return len(numbers)

    def _let_go(self, one: DeferredOperator) -> None:
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


def verify(one: DeferredOperator, findings: Findings, disturb: Disturb | None = None) -> None:
    """Execute the operator of ``one`` again and compare the results. If its tensors have been changed in the meantime,
    note a mismatch instead."""
    at, call, outs, state = one.done
    versions = [tensor._version for tensor in tensors_in((call.args, call.kwargs, outs))]
    if versions != one.versions:
        findings.note(Mismatch(at, WINDOW, note="its tensors were changed unseen by torch's dispatcher"))
        return
    with joined([one.stream]):
        theirs = results(call, execute_again(call, state))
        if disturb is not None:
            disturb(at, theirs)
        findings.pair(at, WINDOW, outs, theirs)


class _Made(NamedTuple):
    """A reference to a tensor that the replay produces: a view, by size, strides and storage offset in elements, of
    result number ``out`` of step number ``step``."""

    step: int
    out: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def among(self, made: Mapping[int, Sequence[torch.Tensor]]) -> torch.Tensor:
        """Return the tensor, given the results of each step."""
        return made[self.step][self.out].as_strided(self.size, self.stride, self.offset)


class Replay:
    """One AGC segment in one iteration: records its operators, and replays them later.

    Args:
        size: number of operators in the segment.
        due: number of planned operators that precede its window.
        lasting: addresses of storages that are never freed (parameters), which do not count in ``nbytes``, the bytes
            that the boundary tensors keep.
    """

    def __init__(self, findings: Findings, size: int, due: int, lasting: Collection[int] = ()):
        self._findings, self._size, self.due = findings, size, due
        self._counted = set(lasting)
        self.nbytes = 0
        # Each operator, with ``_Made`` in place of tensors that the replay produces, and whether it is compared.
        self._steps: list[tuple[Execution, bool]] = []
        self._makers: dict[int, tuple[StorageWeakRef, int, int, torch.dtype]] = {}
        self._kept: dict[int, tuple[torch.Tensor, int]] = {}
        self._expected = findings.rows()
        self._places: list[tuple[OperatorCall, str]] = []
        self._streams: set[torch.cuda.Stream | None] = set()

    @property
    def is_whole(self) -> bool:
        """Return whether all operators of the segment have been recorded."""
        return len(self._steps) == self._size

    def record(self, done: Execution, *, compares: bool = True) -> None:
        """Record an operator that has just been executed. ``compares``: False if the operator is verified by other
        means and replayed only to produce its outputs."""
        at, (kind, func, args, kwargs), out, state = done
        self._streams.add(current(tensors_in((args, kwargs, out))))
        step = Call(kind, func, *mapped(torch.Tensor, self._refer, (args, kwargs)))
        self._steps.append((Execution(at, step, None, state), compares))
        for number, tensor in enumerate(returned(kind, out)):
            storage = tensor.untyped_storage()
            # The weak reference prevents the allocator from reusing the address of the storage.
            self._makers[storage._cdata] = (StorageWeakRef(storage), len(self._steps) - 1, number, tensor.dtype)
            if compares:
                self._expected.add(tensor)
                self._places.append((at, WINDOW))

    def changes(self, storages: Collection[int]) -> bool:
        """Return whether the replay reads any of ``storages``, which are about to be written in place. The caller then
        has to call ``verify`` before the write. Later operators of the segment read the changed contents of these
        storages. The method therefore forgets that the segment produced them, so that such contents will be kept and
        not taken from the replay."""
        for storage in storages:
            self._makers.pop(storage, None)
        return any(tensor.untyped_storage()._cdata in storages for tensor, _ in self._kept.values())

    def verify(self, disturb: Disturb | None = None) -> int:
        """Execute the operators again and compare the results; return the number of compared operators. If a kept
        tensor was changed, compare nothing, count the operators as unverified and return 0."""
        compared = sum(compares for _, compares in self._steps)
        if any(tensor._version != version for tensor, version in self._kept.values()):
            self._findings.unverified += compared
            return 0
        with joined(self._streams):
            self._execute(disturb)
        return compared

    def _execute(self, disturb: Disturb | None) -> None:
        last = self._last_uses()
        made: dict[int, list[torch.Tensor]] = {}
        found = self._findings.rows()
        for number, (step, compares) in enumerate(self._steps):
            kind, func, args, kwargs = step.call
            call = Call(kind, func, *mapped(_Made, lambda one: one.among(made), (args, kwargs)))
            outs = results(call, execute_again(call, step.state))
            if compares and disturb is not None:
                disturb(step.at, outs)
            for tensor in outs if compares else ():
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
        for number, (step, _) in enumerate(self._steps):
            used: list[_Made] = []
            mapped(_Made, used.append, (step.call.args, step.call.kwargs))
            last |= {one.step: number for one in used}
        found: dict[int, list[int]] = {}
        for step, user in last.items():
            found.setdefault(user, []).append(step)
        return found

    def _refer(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        maker = self._makers.get(storage._cdata)
        if maker is not None and maker[3] == tensor.dtype:
            _, step, out, _ = maker
            return _Made(step, out, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        kept = tensor.detach()
        self._kept[id(kept)] = (kept, kept._version)
        if storage._cdata not in self._counted:
            self._counted.add(storage._cdata)
            self.nbytes += storage.nbytes()
        return kept


class Queue:
    """The queue of deferred verifications of one rank. The DMR engine fills it and calls it when windows open.

    Args:
        segments: AGC segments of the plan, by id.
        helpers: operator id -> AGC segments that replay the operator without comparing it: they need its outputs.
        headroom: memory that deferred verifications may keep, in bytes, including the memory reserved by the plan.
        dynamic_us: expected durations, in microseconds, of the dynamic windows of an iteration, in order; not known
            beyond.
        lasting: addresses of storages that are never freed (parameters).

    Attributes:
        disturb: corrupts the results of second executions in fault-injection experiments.
        most_bytes: largest amount of memory kept at one time so far, in bytes. Memory that several single operators
            share, or several operators of one segment, counts once.
        in_windows: number of operators of the iteration that were verified in windows.
        early: number of operators that were verified before their window: memory was about to be changed, or scarce.
        late: number of operators that were verified just before the optimizer step, because no window was left.
    """

    def __init__(
        self,
        findings: Findings,
        segments: Mapping[str, PlannedSegment] | None = None,
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
        self._waiting, self._dynamic = Waiting(self._gone, lasting), online.DeferredQueue()
        self._replays: dict[str, Replay] = {}
        self._over: set[str] = set()
        self._opened = 0
        self._lasting, self._replay_bytes, self.most_bytes = lasting, 0, 0
        self.in_windows = self.early = self.late = 0

    def restart(self) -> None:
        """Begin an iteration. Drop the verifications that an interrupted iteration has left in the queue."""
        self._waiting.drop()
        self._spent.restart()
        self._dynamic = online.DeferredQueue()
        self._replays, self._over, self._replay_bytes, self._opened = {}, set(), 0, 0
        self.in_windows = self.early = self.late = 0

    def __bool__(self) -> bool:
        return bool(len(self._waiting) or self._replays)

    def put(self, done: Execution, decision: CheckMethod) -> bool:
        """Defer the verification of an operator that has just been executed. Return False if the operator has to be
        verified immediately, because its segment has been replayed already."""
        if decision.replay is not None:
            return self._record(decision.replay, done)
        one = entry(done, -1 if decision.due is None else decision.due)
        self._waiting.put(one)
        if decision.due is None:
            self._dynamic.put(online.DeferredCheck(id(one), decision.check_us, decision.bytes))
            self._relieve()
        self._weigh()
        return True

    def help(self, identity: str, done: Execution) -> None:
        """Record an operator, which is verified by other means, for the AGC segments whose replay needs its outputs.
        ``identity``: its id in the plan."""
        for name in self.helpers.get(identity, ()):
            self._record(name, done, compares=False)

    def before_change(self, tensors: Iterable[torch.Tensor]) -> None:
        """Verify all deferred operators that use the memory of ``tensors``, which is about to be written in place."""
        tensors = list(tensors)
        self.early += self._waiting.before_change(tensors)
        if self._replays:
            storages = {tensor.untyped_storage()._cdata for tensor in tensors}
            for name in [name for name, one in self._replays.items() if one.changes(storages)]:
                self.early += self._finish(name)

    def window(self, executed: int) -> None:
        """Verify all operators and segments that are due in a window, which ``executed`` planned operators precede."""
        self.in_windows += self._waiting.take_due(executed)
        due = [name for name, one in self._replays.items() if one.is_whole and one.due <= executed]
        for name in due:
            self.in_windows += self._finish(name)

    def dynamic_window(self, is_over: Callable[[], bool]) -> None:
        """Verify the oldest deferred operators until ``is_over`` says that a window of unknown length has closed
        (SpareTrain, Method 4)."""
        number, self._opened = self._opened, self._opened + 1
        self._spent.opens(self._dynamic_us[number] if number < len(self._dynamic_us) else math.inf)
        while not is_over():
            chosen = self._dynamic.oldest(self._spent.room())
            if chosen is None:
                break
            self._spent.launches(chosen.check_us)
            self.in_windows += self._waiting.take_these([chosen.key])
        self._spent.closes()

    def drain(self) -> None:
        """Verify everything that is still deferred, because the optimizer is about to change the parameters."""
        self.late += self._waiting.take(lambda one: True)
        for name in list(self._replays):
            self.late += self._finish(name)

    def _record(self, name: str, done: Execution, *, compares: bool = True) -> bool:
        if name in self._over:
            return False
        replay = self._replays.get(name)
        if replay is None:
            segment = self._segments[name]
            replay = self._replays[name] = Replay(self._findings, segment.size, segment.due, self._lasting)
        self._replay_bytes -= replay.nbytes
        replay.record(done, compares=compares)
        self._replay_bytes += replay.nbytes
        self._weigh()
        return True

    def _finish(self, name: str) -> int:
        self._over.add(name)
        replay = self._replays.pop(name)
        self._replay_bytes -= replay.nbytes
        return replay.verify(self.disturb)

    def _gone(self, one: DeferredOperator) -> None:
        """Verify an entry, and remove it from the dynamic queue if it is there."""
        if id(one) in self._dynamic:
            self._dynamic.take(id(one))
        verify(one, self._findings, self.disturb)

    def _weigh(self) -> None:
        self.most_bytes = max(self.most_bytes, self._waiting.nbytes + self._replay_bytes)

    def _relieve(self) -> None:
        """Verify deferred operators of dynamic windows early until memory suffices. The memory of what the plan assigns
        to a window is reserved in the plan. The operators that wait for a dynamic window share the rest of
        ``headroom``."""
        planned = max(self._waiting.nbytes - self._dynamic.held, 0.0) + self._replay_bytes
        pressed = self._dynamic.press(max(self._headroom - planned, 0.0))
        self.early += self._waiting.take_these([one.key for one in pressed])
