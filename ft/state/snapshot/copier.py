"""Copies live tensors into a snapshot's host buffer in a background thread, and computes checksums of the data.

Memory is read and written once: on a CPU, each chunk's checksum is computed while the chunk is still in the cache. On a
device, the copies are queued on a separate stream, and the thread computes the checksums of chunks that have arrived.

Live tensors must not change between ``start`` and the end of the copy. Only the optimizer's step changes them, and the
training thread waits for the copy before it.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ft.state import device as devices
from ft.state.layout import CHUNK, Table
from ft.state.snapshot.buffers import Slot, SlotPart
from ft.state.snapshot.state import Sections

_DEVICE_BATCH = 64 * CHUNK
_CHUNKS_PER_NOTICE = 4


class CopyProgress:
    """Progress of a copy into a slot. Sections are filled one after another, chunks in order.

    Attributes:
        error: the exception that ended the copy, or None.
        seconds: duration of the copy, None while it runs.
        is_wanted: False once :meth:`stop` was called.
    """

    def __init__(self) -> None:
        self._ready: dict[int, int] = {}
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._began = time.perf_counter()
        self.error: BaseException | None = None
        self.seconds: float | None = None
        self.is_wanted = True

    def stop(self) -> None:
        """Have the copy end with an error as soon as possible, unless it is complete."""
        self.is_wanted = False

    def advance(self, part: SlotPart, ready: int) -> None:
        with self._changed:
            self._ready[id(part)] = ready
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        with self._changed:
            self.error, self.seconds = error, time.perf_counter() - self._began
            self._ended.set()
            self._changed.notify_all()

    def ready(self, part: SlotPart, wanted: int) -> int:
        """Wait until ``wanted`` chunks of ``part`` are written, and return the number of written chunks.

        Raises:
            RuntimeError: the copy has failed.
        """
        if self._ended.is_set() and self.error is None:
            return len(part.checksums)
        with self._changed:
            self._changed.wait_for(lambda: self._ended.is_set() or self._ready.get(id(part), 0) >= wanted)
            if self.error is not None:
                raise RuntimeError(f"the snapshot could not be copied: {self.error}") from self.error
            return len(part.checksums) if self._ended.is_set() else self._ready.get(id(part), 0)

    def wait(self) -> None:
        """Wait for the end of the copy, successful or not."""
        self._ended.wait()


@dataclass
class _Batch:
    """Copy operations that fill consecutive chunks of a part.

    Attributes:
        part: the section of the snapshot.
        first: index of the first chunk.
        last: index after the last chunk.
        targets: pieces of the host buffer.
        sources: pieces of live tensors, one for each target.
        beside: (target, source) of tensors in host memory where the others are on a device, as with an optimizer whose
            state is offloaded; the copier's thread copies them.
    """

    part: SlotPart
    first: int
    last: int
    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    beside: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, target: torch.Tensor, source: torch.Tensor, device: torch.device | None) -> None:
        """Add a copy. ``device``: device of the plan, None if all tensors are in host memory."""
        if device is not None and source.device.type == "cpu":
            self.beside.append((target, source))
        else:
            self.targets.append(target)
            self.sources.append(source)


class CopyPlan:
    """The copy operations for one slot and one set of live tensors.

    A plan is made once and reused whenever the slot is written, which is every other step.
    """

    def __init__(self, slot: Slot, sections: Sections):
        self.parts = dict(slot.parts)
        self.sections = dict(sections)
        live = {name: list(tensors.values()) for name, tensors in sections.items()}
        self.device = device_of(sections)
        size = CHUNK if self.device is None else _DEVICE_BATCH
        self.batches = [b for name, part in self.parts.items() for b in _batches(part, live[name], size, self.device)]
        self.nbytes = sum(part.table.nbytes for part in self.parts.values())

    def fits(self, slot: Slot, sections: Sections) -> bool:
        """Return whether the plan was made for this slot and these tensors. Mappings are compared by identity."""
        return self.sections.keys() == sections.keys() and all(
            self.parts.get(name) is slot.parts.get(name) and self.sections[name] is sections[name] for name in sections
        )


def _batches(part: SlotPart, tensors: Sequence[torch.Tensor], size: int, device: torch.device | None) -> list[_Batch]:
    count = -(-part.table.nbytes // size)
    per_batch, chunks = size // CHUNK, len(part.checksums)
    batches = [_Batch(part, i * per_batch, min((i + 1) * per_batch, chunks)) for i in range(count)]
    for entry, tensor, target in zip(part.table.entries, tensors, part.tensors(), strict=True):
        if not tensor.numel():
            continue
        source = tensor.detach()
        if not source.is_contiguous():  # cannot be split: copied as a whole, before the first chunk that it touches
            batches[entry.offset // size].add(target, source, device)
            continue
        source, target, item = source.view(-1), target.view(-1), source.element_size()
        begin = 0
        while begin < source.numel():
            at = entry.offset + begin * item
            end = min(source.numel(), begin + ((at // size + 1) * size - at) // item)
            batches[at // size].add(target[begin:end], source[begin:end], device)
            begin = end
    return batches


_Job = tuple[CopyPlan, Sequence[torch.cuda.Event | None], CopyProgress, Callable[[BaseException | None], None]]
"""A copy, an event for each batch that a device copies, and the function to call at the end."""


class Copier:
    """A background thread that fills slots with copies of live tensors. ``close`` ends it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = threading.Thread(target=self._run, name="ft-snapshot-copy", daemon=True)
        self._thread.start()

    def start(self, plan: CopyPlan, done: Callable[[BaseException | None], None]) -> CopyProgress:
        """Start to fill the plan's slot, and return the progress of the copy.

        ``done(error)`` is called in the background thread before the progress ends; error is None after a success.
        """
        progress = CopyProgress()
        events: Sequence[torch.cuda.Event | None] = [None] * len(plan.batches)
        if plan.device is not None:
            events = self._queue_on_device(plan, plan.device)
        self._jobs.put((plan, events, progress, done))
        return progress

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _queue_on_device(self, plan: CopyPlan, device: torch.device) -> list[torch.cuda.Event]:
        if device not in self._streams:
            self._streams[device] = devices.side_stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        events = []
        with torch.cuda.stream(stream), torch.no_grad():
            for batch in plan.batches:
                if batch.targets:
                    torch._foreach_copy_(batch.targets, batch.sources, non_blocking=True)
                event = torch.cuda.Event(blocking=True)
                event.record(stream)
                events.append(event)
        return events

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            plan, events, progress, done = job
            error = None
            try:
                devices.enter(plan.device)
                _fill(plan, events, progress)
            except BaseException as failure:
                error = failure
            done(error)
            progress.end(error)
            del job, plan, events, progress, done, error  # release all references while the thread waits


@torch.no_grad()
def _fill(plan: CopyPlan, events: Sequence[torch.cuda.Event | None], progress: CopyProgress) -> None:
    for batch, event in zip(plan.batches, events, strict=True):
        if not progress.is_wanted:
            if events[-1] is not None:
                events[-1].synchronize()  # the device writes into the slot until then
            raise RuntimeError("the snapshot is not wanted any more")
        if event is not None:
            event.synchronize()
        elif batch.targets:
            torch._foreach_copy_(batch.targets, batch.sources)
        for target, source in batch.beside:
            target.copy_(source)
        for index in range(batch.first, batch.last):
            batch.part.seal(index)
        if batch.last % _CHUNKS_PER_NOTICE == 0 or batch.last == len(batch.part.checksums):
            progress.advance(batch.part, batch.last)


@torch.no_grad()
def write_back(slot: Slot, sections: Sections) -> None:
    """Copy a snapshot into the live tensors."""
    for name, tensors in sections.items():
        live = [tensor.detach() for tensor in tensors.values()]
        if live:
            torch._foreach_copy_(live, slot.parts[name].tensors())


def device_of(sections: Sections) -> torch.device | None:
    """Return the device of the tensors; None if all are in host memory."""
    return next((t.device for tensors in sections.values() for t in tensors.values() if t.device.type != "cpu"), None)


def tables_of(sections: Sections) -> dict[str, Table]:
    """Return the layout of each section."""
    return {name: Table.of(tensors) for name, tensors in sections.items()}
