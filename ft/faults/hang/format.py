"""Formats what is known of a hang for people: names of ranks and operations, where a thread is, and departures.

Where a thread is follows from its Python calls and from what the operating system says of it.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

from ft.faults.hang import inspection as kinds
from ft.faults.hang.inspection import SEND, SERVER, Departure, Inspection, Operation, Rank, Thread
from ft.show.text import spans

DATA, STORAGE, LOCK, KERNEL, COMMUNICATION, USER = (
    "data loader",
    "storage",
    "lock",
    "kernel or native code",
    "communication",
    "user code",
)

_RULES: tuple[tuple[str, str], ...] = (
    (DATA, r"torch/utils/data/|core/datasets/|/datasets?/|data_loader|dataloader|get_batch|data_iterator"),
    (STORAGE, r"torch/serialization|dist_checkpointing|checkpoint|/storage|shutil\.py|pathlib\.py|fsync|tarfile"),
    (LOCK, r"threading\.py:\d+ (acquire|wait|join|_wait_for_tstate_lock|__enter__)|/lock|filelock|queue\.py:\d+ get"),
    (COMMUNICATION, r"torch/distributed/|ft/state/groups/"),
    (KERNEL, r"torch/cuda/.*(synchronize|query)|torch/_ops\.py"),
)
"""(place, pattern of a call): the first call from the inside that matches a rule says the place."""

_STANDARD = re.compile(r"(^|/)(threading|queue)\.py:")
_OWN_WAITS = re.compile(r"(^|/)ft/(worker/(orders|protocol|session)|state/snapshot/store)\.py:")
"""Calls in which a rank waits for the control plane or for a peer's answer to a snapshot."""

_OF_THE_SYSTEM: tuple[tuple[str, str], ...] = (
    (STORAGE, r"^D\b|nfs|rpc_wait|io_schedule|jbd2|ext4|xfs|fuse|lustre|cl_sync|wait_on_page|blkdev"),
    (LOCK, r"futex|flock|posix_lock|fcntl"),
)
_DEEP = 6
"""Number of innermost calls that are looked at; further out, every thread is in the training loop."""


def place(thread: Thread | None) -> str:
    """Return in which kind of place a thread is: one of the constants of this module."""
    if thread is None or not thread.frames:
        return KERNEL
    for frame in thread.frames[:_DEEP]:
        for found, pattern in _RULES:
            if re.search(pattern, frame):
                return found
    return next((found for found, pattern in _OF_THE_SYSTEM if re.search(pattern, thread.kernel)), USER)


def is_in_own_wait(rank: Rank) -> bool:
    """Return whether the training thread of a rank waits inside this project's code: for an order or a verdict of
    the control plane, or for the peers that take its snapshot. Another process has to act first.
    """
    frames = rank.training.frames if rank.training is not None else ()
    inner = next((frame for frame in frames if not _STANDARD.search(frame)), "")
    return _OWN_WAITS.search(inner) is not None


def where(rank: Rank) -> str:
    """Return as text what the training thread of a rank is doing: the kind of place, its innermost Python call, and the
    kernel function in which it waits. If the threads are unknown, it is the last operation that the rank has started.
    """
    thread = rank.training
    if thread is None and rank.operations:
        last = rank.operations[-1]
        return f"after {last}" + (f", which was started at {last.site}" if last.site else "")
    kind = place(thread)
    if thread is None:
        return kind
    top = thread.frames[0] if thread.frames else ""
    details = [text for text in (top, thread.kernel and f"kernel: {thread.kernel}") if text]
    return f"{kind} ({'; '.join(details)})" if details else kind


THE_SERVER = "the quorum server"


class Who:
    """Gives the ranks of an inspection the names that people read, such as "replica 1 rank 3"."""

    def __init__(self, seen: Inspection):
        self._places, self._home = seen.places, seen.home

    def one(self, rank: int) -> str:
        """Return the name of a rank."""
        if rank == SERVER:
            return THE_SERVER
        place = self._places.get(rank)
        if place is None or place.replica == self._home:
            return f"rank {rank if place is None else place.rank}"
        return f"replica {place.replica} rank {place.rank}"

    def title(self, ranks: Iterable[int]) -> str:
        """Return the name of one or several ranks: "rank 3", "ranks 0-4"."""
        ranks = sorted(ranks)
        if any(rank in self._places or rank == SERVER for rank in ranks):
            return self.listed(ranks)
        return _numbered("rank", ranks)

    def listed(self, ranks: Iterable[int]) -> str:
        """Return ranks for a table, "nobody" if there are none; replicas with the same ranks are named together."""
        ranks = set(ranks)
        by: dict[int, set[int]] = defaultdict(set)
        plain = set()
        for rank in ranks - {SERVER}:
            if (place := self._places.get(rank)) is None:
                plain.add(rank)
            else:
                by[place.replica].add(place.rank)
        found = []
        if (own := by.pop(self._home, None) if self._home is not None else None) is not None:
            found.append(_numbered("rank", own))
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for replica, members in sorted(by.items()):
            alike[tuple(sorted(members))].append(replica)
        found += [
            f"{_numbered('replica', replicas)} {_numbered('rank', members)}" for members, replicas in alike.items()
        ]
        found += [spans(plain)] if plain else []
        found += [THE_SERVER] if SERVER in ranks else []
        return ", ".join(found) or "nobody"

    def operation(self, operation: Operation) -> str:
        """Return the name of an operation, with its number and its group."""
        if operation.peer is None:
            return str(operation)
        way = "to" if operation.name == SEND else "from"
        peer = self.one(operation.peer)
        return f"{operation.name} number {operation.sequence} {way} {peer} in group {operation.group}"


def _numbered(name: str, numbers: Collection[int]) -> str:
    return f"{name}{'s' * (len(numbers) > 1)} {spans(numbers)}"


def call(operation: str, values: Operation) -> str:
    """Return the name of an operation with the sizes of its tensors and the line that started it."""
    sizes = f"with {', '.join(values.sizes)} " if values.sizes else ""
    return f"{operation} {sizes}at {values.site or 'an unknown line'}"


def place_of(said: Rank) -> str:
    """Return where a rank is: in its first operation that has not ended, or what its training thread does."""
    operation = next(iter(said.pending), None)
    if operation is None:
        return where(said)
    if said.training is None or place(said.training) == COMMUNICATION:
        return f"in {operation}" + (f", which was started at {operation.site}" if operation.site else "")
    return f"in {operation}: {where(said)}"


def of_departure(departed: Departure) -> str:
    """Return how a rank's present step departs from its step before."""
    due, found = departed.expected, departed.found
    how = {
        kinds.SKIPPED: f"left out {_operation_name(due)}, and started {_operation_name(found)}",
        kinds.SWAPPED: f"took {_operation_name(found)} before {_operation_name(due)}",
        kinds.ADDED: f"started {_operation_name(found)}, which no step before had there",
        kinds.CHANGED: f"changed {_operation_name(due)} from {_sizes_of(due)} to {_sizes_of(found)}",
    }[departed.kind]
    return f"compared with its step before, it {how}"


def _operation_name(operation: Operation) -> str:
    return f"{operation.name} of group {operation.group}" + (f" at {operation.site}" if operation.site else "")


def _sizes_of(operation: Operation) -> str:
    peer = f" and rank {operation.peer}" if operation.is_message else ""
    return f"{', '.join(operation.sizes) or 'unknown sizes'}{peer}"
