"""Host memory for snapshots of a rank's training state: two alternating buffers (DEADPOOL, section VI-A).

While one buffer (slot) is being written, the other one holds the previous complete snapshot:

             step 6        step 7        fault while 7 is staged
slot A   complete 6    complete 6    complete 6    <- restored from
slot B   staging  7 -> complete 7    dropped

The memory of a slot is a file without a name (:class:`SlotFile`). The node agent opens it too, so that the worker that
takes the seat of a crashed or hung one over on the same node inherits the snapshots.
"""

import contextlib
import itertools
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec
import torch

from ft.base.errors import FallbackError, UserError
from ft.job.messages import SNAPSHOT_MEMORY
from ft.net.framed import checksum
from ft.state import device as devices
from ft.state.layout import CHUNK, StateMemory, Table, chunk_count


class Status(Enum):
    """Status of a slot: without a snapshot, being written, or with a complete snapshot."""

    EMPTY = "empty"
    STAGING = "staging"
    COMPLETE = "complete"


class _Memory(mmap.mmap):
    """Zeroed memory of this process, which can be page-locked until it is freed."""

    _locked: tuple[tuple[int, torch.device], ...] = ()

    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock ``nbytes`` bytes from ``address`` on, a part of the memory, for copies by CUDA devices.

        Raises:
            UserError: CUDA cannot lock it.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        except RuntimeError as error:
            raise UserError(
                f"{nbytes / 2**30:.1f} GiB of host memory for snapshots cannot be page-locked: {error}",
                "run with fewer workers per node, or without snapshots",
            ) from error
        self._locked += ((address, device),)

    def __del__(self) -> None:
        for address, device in self._locked:
            with contextlib.suppress(Exception):  # the interpreter is ending, so CUDA may have ended
                devices.enter(device)
                torch.cuda.cudart().cudaHostUnregister(address)


_PLACE = 2 << 20
"""Alignment of the sections of a slot file in bytes: the size of a huge page."""
_HEAD = struct.Struct("<8sQQII")
_MAGIC = b"ftslot01"


class Label(msgspec.Struct, array_like=True, frozen=True):
    """What a slot holds, as it is written into the slot's file.

    Attributes:
        owner: logical rank of the owner, -1 for the snapshots of the process itself.
        step: step of the snapshot.
        epoch: epoch in which it was taken.
        meta: see :class:`Slot`.
        meta_checksum: see :class:`Slot`.
        sections: name of a section -> (encoded layout, one checksum per chunk).
    """

    owner: int
    step: int
    epoch: int
    meta: bytes
    meta_checksum: int
    sections: dict[str, tuple[bytes, list[int]]]


class Spare:
    """Memory for a slot that is there before it is needed: a file without a name, mapped by this process.

    Args:
        nbytes: bytes of the tensors of two sections.

    Attributes:
        nbytes: size of the file in bytes.
        touched: bytes from the beginning on whose pages are there.
        fd: the file descriptor.
        memory: the mapping.

    Raises:
        OSError: the file is larger than this process may make one (``ulimit -f``).
    """

    def __init__(self, nbytes: int):
        self.nbytes, self.touched = nbytes + 3 * _PLACE, 0
        self.fd = os.memfd_create(SNAPSHOT_MEMORY)
        os.ftruncate(self.fd, self.nbytes)
        self.memory = _Memory(self.fd, self.nbytes, flags=mmap.MAP_SHARED)

    def touch(self, nbytes: int) -> None:
        """Touch the next ``nbytes`` bytes."""
        stop = min(self.touched + nbytes, self.nbytes)
        self.memory[self.touched : stop] = bytes(stop - self.touched)
        self.touched = stop

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


_changes = itertools.count(1)


class SlotFile:
    """The memory of a slot as a file without a name (memfd_create(2)), which other processes can open through /proc.

    The file is complete in itself: another process can use the snapshot when this one was killed in any instruction.

        byte 0     head: position, length and checksum of the label; zeros while the slot has no complete snapshot
        2 MiB ...  the sections, each at a multiple of 2 MiB
        then       the label

    Args:
        sizes: name of a section -> its bytes.
        fd: file descriptor of an existing file, which this object closes; None: a new file is made.
        spare: memory that the file takes over, if it is large enough.

    Raises:
        OSError: the file is larger than this process may make one (``ulimit -f``).

    Attributes:
        fd: the file descriptor.
        places: name of a section -> its position in bytes.
        end: end of the sections in bytes.
        changed: number that grows with every slot file that this process makes or closes.
    """

    changed = 0

    def __init__(self, sizes: Mapping[str, int], fd: int | None = None, spare: Spare | None = None):
        self.places: dict[str, int] = {}
        at = _PLACE
        for name, nbytes in sizes.items():
            self.places[name] = at
            at += -(-max(nbytes, 1) // _PLACE) * _PLACE
        self.end = at
        self.spare = spare if spare is not None and spare.nbytes >= at else None
        if self.spare is not None:
            fd = os.dup(self.spare.fd)
        self.fd = os.memfd_create(SNAPSHOT_MEMORY) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, at)
        self._head = mmap.mmap(self.fd, mmap.PAGESIZE)  # written without a system call, which a limit could refuse
        SlotFile.changed = next(_changes)

    def publish(self, label: Label) -> None:
        """Say that the file has a complete snapshot, which ``label`` describes.

        A limit on the size of files (``ulimit -f``) also holds for files without a name. If it leaves no room for the
        label, nobody can inherit the snapshot.
        """
        data = msgspec.msgpack.encode(label)
        try:
            os.pwrite(self.fd, data, self.end)
        except OSError:
            return
        head = _HEAD.pack(_MAGIC, self.end, len(data), zlib.crc32(data), 0)
        self._head[: _HEAD.size] = head[:-4] + struct.pack("<I", zlib.crc32(head[:-4]))

    def withdraw(self) -> None:
        """Say that the file has no complete snapshot."""
        self._head[: _HEAD.size] = bytes(_HEAD.size)

    def __del__(self) -> None:
        if getattr(self, "fd", None) is not None:
            os.close(self.fd)
            SlotFile.changed = next(_changes)


def read_label(fd: int) -> Label | None:
    """Return what the file of a slot holds; None if it has no complete snapshot, or is no such file."""
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        return None
    magic, at, length, check, own_check = _HEAD.unpack(head)
    if magic != _MAGIC or own_check != zlib.crc32(head[:-4]) or at + length > os.fstat(fd).st_size:
        return None
    data = os.pread(fd, length, at)
    try:
        return msgspec.msgpack.decode(data, type=Label) if zlib.crc32(data) == check else None
    except msgspec.DecodeError:
        return None


class HostBuffer:
    """A block of zeroed host memory, page-locked if a device copies into it.

    A copy from a device into memory that is not page-locked blocks the thread that queues it. The memory is allocated
    here and then locked, because torch's page-locked memory takes the next power of two bytes and is never given back
    (CachingHostAllocator.h, ``PowerOf2Ceil``). Locking takes the time to map all pages, once for each buffer.

    The memory is excluded from forked children: otherwise, after a data loader has forked a worker, the next write to
    each page of private memory would copy the page (copy-on-write), away from the one that a device writes to.

    Args:
        nbytes: size in bytes.
        pinned: whether to page-lock the memory.
        place: (file, position in bytes) of the memory; None: it is private to this process.

    Attributes:
        nbytes: size in bytes.
        is_pinned: whether the memory is page-locked.
        tensor: the memory as a tensor, [nbytes] uint8.
        view: the same memory as a memoryview.

    Raises:
        UserError: the memory cannot be page-locked.
    """

    def __init__(self, nbytes: int, pinned: bool, place: tuple[SlotFile, int] | None = None):
        self.nbytes, self.is_pinned, start = nbytes, False, 0
        if place is None:
            self._memory = _Memory(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            file, at = place
            if file.spare is None:
                self._memory = _Memory(file.fd, max(nbytes, 1), flags=mmap.MAP_SHARED, offset=at)
            else:
                self._memory, start = file.spare.memory, at
        self._memory.madvise(mmap.MADV_DONTFORK)
        if nbytes >= 2 << 20:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)[start : start + nbytes]
        self.view = memoryview(self._memory)[start : start + nbytes]
        if pinned:
            self.pin()

    def pin(self) -> None:
        """Page-lock the memory, unless it is page-locked already."""
        if not self.is_pinned and self.nbytes:
            self._memory.lock(self.tensor.data_ptr(), self.nbytes)
        self.is_pinned = True


class SlotPart(StateMemory):
    """One section of a snapshot in memory: the tensors that no other rank has, or those that peers have too.

    Its bytes are always in place.

    Attributes:
        table: layout of the tensors.
        buffer: the memory.
        checksums: one checksum per chunk (1 MiB), computed when the chunk was written.
    """

    def __init__(self, table: Table, pinned: bool, place: tuple[SlotFile, int] | None = None):
        self.table = table
        self.buffer = HostBuffer(table.nbytes, pinned, place)
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
        owner: logical rank of the owner, -1 for the snapshots of this process; None: the memory is private to this
            process, and nobody can inherit it.
        file: the memory, unless it is private.
    """

    parts: dict[str, SlotPart] = field(default_factory=dict)
    status: Status = Status.EMPTY
    step: int = -1
    epoch: int = -1
    meta: bytes = b""
    meta_checksum: int = 0
    owner: int | None = None
    file: SlotFile | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.buffer.nbytes for part in self.parts.values())

    def fits(self, tables: Mapping[str, Table]) -> bool:
        """Return whether the present memory is for sections with these layouts (name of a section -> its layout)."""
        return {name: part.table for name, part in self.parts.items()} == dict(tables)

    def fit(self, tables: Mapping[str, Table], pinned: bool, spare: Spare | None = None) -> None:
        """Allocate memory for sections with these layouts, unless the present memory has the same layouts.

        Args:
            tables: name of a section -> its layout.
            pinned: whether the memory has to be page-locked.
            spare: memory that is used if it is large enough.
        """
        if not self.fits(tables):
            self.parts, self.file = {}, None  # the old memory is freed before the new is allocated
            if self.owner is not None:
                with contextlib.suppress(OSError):  # then the memory is private, and nobody can inherit it
                    self.file = SlotFile({name: table.nbytes for name, table in tables.items()}, spare=spare)
            self.parts = {name: SlotPart(table, pinned, self._place(name)) for name, table in tables.items()}
        elif pinned:
            for part in self.parts.values():
                part.buffer.pin()

    def set_meta(self, meta: bytes) -> None:
        self.meta, self.meta_checksum = meta, checksum(meta)

    def turn(self, status: Status) -> None:
        """Change the status, in the slot's file too."""
        if self.file is not None and status is not Status.COMPLETE:
            self.file.withdraw()
        self.status = status
        if self.file is not None and self.owner is not None and status is Status.COMPLETE:
            sections = {name: (part.table.encoded, part.checksums) for name, part in self.parts.items()}
            self.file.publish(Label(self.owner, self.step, self.epoch, self.meta, self.meta_checksum, sections))

    @classmethod
    def inherited(cls, fd: int) -> "Slot | None":
        """Return the complete snapshot in the file of a slot of a process that has ended; None if there is none.

        The tensors are not verified here, but by :meth:`damage`. The object closes ``fd``.
        """
        label, tables = read_label(fd), dict[str, Table]()
        with contextlib.suppress(FallbackError):
            tables = {name: Table.decode(table) for name, (table, _) in label.sections.items()} if label else {}
        if label is None or not tables or os.fstat(fd).st_size < _PLACE:
            os.close(fd)
            return None
        file = SlotFile({name: table.nbytes for name, table in tables.items()}, fd)
        if os.fstat(fd).st_size < file.end:
            return None
        slot = cls({}, Status.COMPLETE, label.step, label.epoch, label.meta, label.meta_checksum, label.owner, file)
        for name, table in tables.items():
            slot.parts[name] = SlotPart(table, False, slot._place(name))
            slot.parts[name].checksums = label.sections[name][1]
        whole = all(len(part.checksums) == chunk_count(part.table.nbytes) for part in slot.parts.values())
        return slot if whole else None

    def rename(self, owner: int) -> None:
        """Change the owner of this complete snapshot to ``owner``, in the slot's file too."""
        if owner != self.owner:
            self.owner = owner
            self.turn(Status.COMPLETE)

    def _place(self, name: str) -> tuple[SlotFile, int] | None:
        return None if self.file is None else (self.file, self.file.places[name])

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

    Args:
        owner: the logical rank, -1 for that of this process.

    Attributes:
        pinned: whether the next snapshots are written into page-locked memory.
        spare: memory for the next slot that needs some, or None.
    """

    def __init__(self, owner: int = -1):
        self.pinned, self._owner = False, owner
        self.spare: Spare | None = None
        self._slots = [Slot(owner=owner), Slot(owner=owner)]
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
            slot = self._slots[self._next(step, own)]
            slot.turn(Status.STAGING)
            slot.step, slot.epoch = step, epoch
        spare = None
        if self.spare is not None and not slot.fits(tables):
            spare, self.spare = self.spare, None
        slot.fit(tables, self.pinned, spare)
        return slot

    def adopt(self, slot: Slot) -> None:
        """Take over a complete slot that was filled elsewhere, in the place of the one that ``begin`` would return."""
        with self._lock:
            self._slots[self._next(slot.step, False)] = slot
            slot.turn(Status.COMPLETE)

    def _next(self, step: int, own: bool) -> int:
        return min(
            range(len(self._slots)),
            key=lambda index: (
                not (own and self._slots[index].step == step),
                self._slots[index].status is Status.COMPLETE,
                self._slots[index].step <= step,
                self._slots[index].step,
                self._slots[index].epoch,
            ),
        )

    def commit(self, slot: Slot) -> None:
        with self._lock:
            slot.turn(Status.COMPLETE)

    def drop(self, slot: Slot) -> None:
        with self._lock:
            slot.turn(Status.EMPTY)

    def inherit(self, slot: Slot) -> bool:
        """Take over a complete snapshot; return whether it was taken.

        It takes the place of the same snapshot if that one has fewer sections, and otherwise that of a free slot.
        """
        with self._lock:
            free = [index for index, s in enumerate(self._slots) if s.status is Status.EMPTY]
            for index, held in enumerate(self._slots):
                if held.status is not Status.EMPTY and (held.step, held.epoch) == (slot.step, slot.epoch):
                    has_less = held.status is Status.COMPLETE and len(held.parts) < len(slot.parts)
                    free = [index] if has_less else []
            if free:
                self._slots[free[0]] = slot
            return bool(free)

    def drop_after(self, step: int) -> None:
        """Drop the complete snapshots of steps after ``step``."""
        with self._lock:
            for slot in self._slots:
                if slot.status is Status.COMPLETE and slot.step > step:
                    slot.turn(Status.EMPTY)

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

    def steps(self, section: str | None = None) -> list[int]:
        """Return the steps of the complete snapshots; with ``section``, only of those that contain this section."""
        with self._lock:
            complete = [slot for slot in self._slots if slot.status is Status.COMPLETE]
        return sorted({slot.step for slot in complete if section is None or section in slot.parts})

    def close(self) -> None:
        """Free the memory."""
        with self._lock:
            self._slots, self.spare = [Slot(owner=self._owner), Slot(owner=self._owner)], None
