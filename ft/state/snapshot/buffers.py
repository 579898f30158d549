"""Host memory for snapshots of a rank's training state: two alternating buffers (DEADPOOL, section VI-A).

While one buffer (slot) is being written, the other one holds the previous complete snapshot:

             step 6        step 7        fault while 7 is staged
slot A   complete 6    complete 6    complete 6    <- restored from
slot B   staging  7 -> complete 7    dropped
"""

import contextlib
import mmap
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from ft.base.errors import UserError
from ft.net.framed import checksum
from ft.state import device as devices
from ft.state.layout import CHUNK, Table, chunk_count


class Status(Enum):
    """Status of a slot: without a snapshot, being written, or with a complete snapshot."""

    EMPTY = "empty"
    STAGING = "staging"
    COMPLETE = "complete"


class _Memory(mmap.mmap):
    """Zeroed memory of this process, which can be page-locked until it is freed."""

    _locked: tuple[int, torch.device] | None = None

    def lock(self, address: int) -> None:
        """Page-lock the memory, which begins at ``address``, for copies by CUDA devices.

        Raises:
            UserError: CUDA cannot lock it.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        except RuntimeError as error:
            raise UserError(
                f"{len(self) / 2**30:.1f} GiB of host memory for snapshots cannot be page-locked: {error}",
                "run with fewer workers per node, or without snapshots",
            ) from error
        self._locked = (address, device)

    def __del__(self):
        if self._locked is not None:
            address, device = self._locked
            with contextlib.suppress(Exception):  # the interpreter is ending, so CUDA may have ended
                devices.enter(device)
                torch.cuda.cudart().cudaHostUnregister(address)


class HostBuffer:
    """A block of zeroed host memory, page-locked if a device copies into it.

    A copy from a device into memory that is not page-locked blocks the thread that queues it. The memory is allocated
    here and then locked, because torch's page-locked memory takes the next power of two bytes and is never given back
    (CachingHostAllocator.h, ``PowerOf2Ceil``). Locking takes the time to map all pages, once for each buffer.

    The memory is excluded from forked children: otherwise, after a data loader has forked a worker, the next write to
    each page would copy the page (copy-on-write), away from the one that a device writes to.

    Attributes:
        nbytes: size in bytes.
        is_pinned: whether the memory is page-locked.
        tensor: the memory as a tensor, [nbytes] uint8.
        view: the same memory as a memoryview.

    Raises:
        UserError: the memory cannot be page-locked.
    """

    def __init__(self, nbytes: int, pinned: bool):
        self.nbytes, self.is_pinned = nbytes, False
        self._memory = _Memory(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_DONTFORK)
        if nbytes >= 2 << 20:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)[:nbytes]
        self.view = memoryview(self._memory)[:nbytes]
        if pinned:
            self.pin()

    def pin(self) -> None:
        """Page-lock the memory, unless it is page-locked already."""
        if not self.is_pinned and self.nbytes:
            self._memory.lock(self.tensor.data_ptr())
        self.is_pinned = True


class Part:
    """One section of a snapshot in memory: the tensors that no other rank has, or those that peers have too.

    It is a :class:`ft.state.transfer.moving.Memory`, whose bytes are always in place.

    Attributes:
        table: layout of the tensors.
        buffer: the memory.
        checksums: one checksum per chunk (1 MiB), computed when the chunk was written.
    """

    def __init__(self, table: Table, pinned: bool):
        self.table = table
        self.buffer = HostBuffer(table.nbytes, pinned)
        self.checksums = [0] * chunk_count(table.nbytes)

    def chunk(self, index: int) -> memoryview:
        return self.buffer.view[index * CHUNK : (index + 1) * CHUNK]

    def seal(self, index: int) -> None:
        """Compute the checksum of a chunk that has just been written."""
        self.checksums[index] = checksum(self.chunk(index))

    def whole(self, start: int, stop: int) -> memoryview:
        return self.buffer.view[start:stop]

    def checksum(self, start: int, chunk: memoryview) -> int:
        """Return the stored checksum of the chunk at byte ``start``. Raises ValueError if no chunk begins there."""
        if start % CHUNK or len(chunk) != min(CHUNK, self.table.nbytes - start):
            raise ValueError(f"{len(chunk)} bytes from byte {start} are no chunk")
        return self.checksums[start // CHUNK]

    def note(self, start: int, check: int) -> None:
        """Store the checksum of the chunk that was received at byte ``start``."""
        self.checksums[start // CHUNK] = check

    def damage(self) -> int | None:
        """Return the index of the first chunk whose checksum is wrong, None if all checksums are right."""
        for index, expected in enumerate(self.checksums):
            if checksum(self.chunk(index)) != expected:
                return index
        return None

    def tensors(self) -> list[torch.Tensor]:
        return [entry.view(self.buffer.tensor) for entry in self.table.entries]


@dataclass
class Slot:
    """One of two buffers for the snapshots of one rank, the owner.

    Attributes:
        parts: name of a section -> its memory.
        status: whether the slot is empty, being written, or complete.
        step: step of the snapshot.
        epoch: epoch (version of the assignment of workers to ranks) in which the snapshot was taken.
        meta: everything but the tensors, encoded (:func:`ft.state.snapshot.state.pack_meta`).
        meta_checksum: checksum of ``meta``.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    status: Status = Status.EMPTY
    step: int = -1
    epoch: int = -1
    meta: bytes = b""
    meta_checksum: int = 0

    @property
    def nbytes(self) -> int:
        return sum(part.buffer.nbytes for part in self.parts.values())

    def fit(self, tables: Mapping[str, Table], pinned: bool) -> None:
        """Allocate memory for sections with these layouts, unless the present memory has the same layouts.

        Args:
            tables: name of a section -> its layout.
            pinned: whether the memory has to be page-locked.
        """
        if {name: part.table for name, part in self.parts.items()} != dict(tables):
            self.parts = {}  # the old memory is freed before the new is allocated
            self.parts = {name: Part(table, pinned) for name, table in tables.items()}
        elif pinned:
            for part in self.parts.values():
                part.buffer.pin()

    def set_meta(self, meta: bytes) -> None:
        self.meta, self.meta_checksum = meta, checksum(meta)

    def damage(self, envelope_only: bool = False) -> str | None:
        """Verify all checksums. Describe the first damaged part in words, None if no part is damaged."""
        if checksum(self.meta) != self.meta_checksum:
            return "its envelope"
        for name, part in () if envelope_only else self.parts.items():
            index = part.damage()
            if index is not None:
                return f"chunk {index} of {len(part.checksums)} of its {name} tensors"
        return None


class PingPong:
    """Two slots for the snapshots of one logical rank. Thread-safe.

    Between ``begin`` and ``commit`` (or ``drop``), only the caller of ``begin`` may access the slot.

    Attributes:
        pinned: whether the next snapshots are written into page-locked memory.
    """

    def __init__(self):
        self.pinned = False
        self._slots = [Slot(), Slot()]
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots)

    def begin(self, step: int, epoch: int, tables: Mapping[str, Table], *, own: bool = False) -> Slot:
        """Return the slot to write the state of ``step`` into. The other slot is kept.

        The slot to overwrite is chosen by these criteria, in this order: a slot that is not complete; a slot with a
        later step than ``step``, which a recovery has undone; the slot with the older step; the slot with the older
        epoch. But a worker that repeats a step overwrites its own snapshot of the same step (``own``): that state is
        still in the live tensors, and the other slot has the step before, which may be the newest one that peers hold.
        """
        with self._lock:
            slot = min(
                self._slots,
                key=lambda s: (
                    not (own and s.step == step),
                    s.status is Status.COMPLETE,
                    s.step <= step,
                    s.step,
                    s.epoch,
                ),
            )
            slot.status, slot.step, slot.epoch = Status.STAGING, step, epoch
        slot.fit(tables, self.pinned)
        return slot

    def commit(self, slot: Slot) -> None:
        with self._lock:
            slot.status = Status.COMPLETE

    def drop(self, slot: Slot) -> None:
        with self._lock:
            slot.status = Status.EMPTY

    def drop_after(self, step: int) -> None:
        """Drop the complete snapshots of steps after ``step``."""
        with self._lock:
            for slot in self._slots:
                if slot.status is Status.COMPLETE and slot.step > step:
                    slot.status = Status.EMPTY

    def find(self, step: int | None = None) -> Slot | None:
        """Return the complete snapshot of ``step`` (default: the newest) from the latest epoch, or None."""
        with self._lock:
            found = [s for s in self._slots if s.status is Status.COMPLETE and step in (None, s.step)]
            return max(found, key=lambda s: (s.step, s.epoch), default=None)

    def newest_epoch(self) -> int:
        """Return the newest epoch of all slots that are complete or being written, -1 if there are none."""
        with self._lock:
            return max((slot.epoch for slot in self._slots if slot.status is not Status.EMPTY), default=-1)

    def is_coming(self, step: int) -> bool:
        """Return whether a snapshot of ``step`` is being written."""
        with self._lock:
            return any(slot.status is Status.STAGING and slot.step == step for slot in self._slots)

    def steps(self) -> list[int]:
        """Return the steps of the complete snapshots."""
        with self._lock:
            return sorted({slot.step for slot in self._slots if slot.status is Status.COMPLETE})

    def close(self) -> None:
        """Free the memory."""
        with self._lock:
            self._slots = [Slot(), Slot()]
