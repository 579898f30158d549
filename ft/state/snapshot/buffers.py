"""Host memory for snapshots: two buffers that take turns, so that a complete snapshot always remains (section VI-A).

             step 6        step 7        fault while 7 is staged
slot A   complete 6    complete 6    complete 6    <- restored from
slot B   staging  7 -> complete 7    dropped
"""

import mmap
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from ft.state.snapshot.layout import CHUNK, Table, checksum, chunk_count


class Status(Enum):
    EMPTY = "empty"
    STAGING = "staging"
    COMPLETE = "complete"


class HostBuffer:
    """``nbytes`` of zeroed host memory, page-locked where a device copies into it.

    Ordinary memory is kept from forked children: a data loader's worker would otherwise make every page of it be copied
    at the next write.

    Attributes:
        tensor: [nbytes] uint8. view: the same bytes.
    """

    def __init__(self, nbytes: int, pinned: bool):
        self.nbytes = nbytes
        if pinned and nbytes:
            self.tensor = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
            self.view = memoryview(self.tensor.numpy())
            return
        memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        if nbytes >= 2 << 20:
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
        self.view = memoryview(memory)[:nbytes]


class Part:
    """One section of a snapshot in memory.

    Attributes:
        checksums: one per chunk, taken when the chunk was written.
    """

    def __init__(self, table: Table, pinned: bool):
        self.table = table
        self.buffer = HostBuffer(table.nbytes, pinned)
        self.checksums = [0] * chunk_count(table.nbytes)

    def chunk(self, index: int) -> memoryview:
        return self.buffer.view[index * CHUNK : (index + 1) * CHUNK]

    def seal(self, index: int) -> None:
        """Notes the checksum of a chunk that has just been written."""
        self.checksums[index] = checksum(self.chunk(index))

    def damage(self) -> int | None:
        """Index of the first chunk that is not what was written, None when all are."""
        for index, expected in enumerate(self.checksums):
            if checksum(self.chunk(index)) != expected:
                return index
        return None

    def tensors(self) -> list[torch.Tensor]:
        return [entry.view(self.buffer.tensor) for entry in self.table.entries]


@dataclass
class Slot:
    """One of two buffers: memory for each section, and whose state of which step it holds.

    ``meta``: envelope and blobs (:func:`ft.state.snapshot.state.pack_meta`); ``meta_checksum``: of its bytes.
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
        """Makes room for sections of these tables; allocates only when they are others than before."""
        if {name: part.table for name, part in self.parts.items()} != dict(tables):
            self.parts = {}  # freed before the new ones are made
            self.parts = {name: Part(table, pinned) for name, table in tables.items()}

    def set_meta(self, meta: bytes) -> None:
        self.meta, self.meta_checksum = meta, checksum(meta)

    def damage(self, envelope_only: bool = False) -> str | None:
        """In words what is not as it was written; None when all is."""
        if checksum(self.meta) != self.meta_checksum:
            return "its envelope"
        for name, part in () if envelope_only else self.parts.items():
            index = part.damage()
            if index is not None:
                return f"chunk {index} of {len(part.checksums)} of its {name} tensors"
        return None


class PingPong:
    """Two slots for the snapshots of one logical rank; thread-safe.

    Between ``begin`` and ``commit`` (or ``drop``) the slot belongs to whoever began. ``pinned``: page-locked memory.
    """

    def __init__(self, pinned: bool = False):
        self.pinned = pinned
        self._slots = [Slot(), Slot()]
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots)

    def begin(self, step: int, epoch: int, tables: Mapping[str, Table], *, own: bool = False) -> Slot:
        """The slot to write the state of ``step`` into; the other one stays as it is.

        Overwritten is, in this order: what is not complete, what lies in the future that a recovery has undone, the
        older step, the older epoch. But of its ``own`` state a worker that takes a step once more overwrites just that
        step: it has it in memory still, and the one before may be all that peers hold.
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
        """Forgets the complete snapshots of steps after ``step``."""
        with self._lock:
            for slot in self._slots:
                if slot.status is Status.COMPLETE and slot.step > step:
                    slot.status = Status.EMPTY

    def find(self, step: int | None = None) -> Slot | None:
        """The complete snapshot of ``step`` (default: the newest), of the latest epoch; None without one."""
        with self._lock:
            found = [s for s in self._slots if s.status is Status.COMPLETE and step in (None, s.step)]
            return max(found, key=lambda s: (s.step, s.epoch), default=None)

    def newest_epoch(self) -> int:
        """Of all that is held or coming in; -1 where nothing is."""
        with self._lock:
            return max((slot.epoch for slot in self._slots if slot.status is not Status.EMPTY), default=-1)

    def steps(self) -> list[int]:
        """Steps of the complete snapshots."""
        with self._lock:
            return sorted({slot.step for slot in self._slots if slot.status is Status.COMPLETE})

    def close(self) -> None:
        """Frees the memory."""
        with self._lock:
            self._slots = [Slot(), Slot()]
