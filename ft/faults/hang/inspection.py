"""What is known of every rank at one moment: a snapshot from which the wait-for graph of a hang follows.

``Inspection`` is that snapshot. Operations have one name each, where torch has several by release, interface and
recorder; the stacks of threads are read from what :mod:`faulthandler` writes; and a rank's present step is compared
with its step before, because a training step starts the same operations in the same order every time. A rank that
leaves one out, adds one or swaps two departs from this; a rank that only waits for it has started the beginning of its
usual step. Steps differ without a fault, too (an evaluation, a batch that grows), but then all ranks of a group depart
together.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

RUNNING, STOPPED, DEAD = "running", "stopped", "dead"
"""States of a process: it runs (or sleeps), it was stopped by a signal, it has ended."""

SEND, RECV = "send", "recv"

QUORUM, FETCH, CONNECT = "quorum", "fetch", "connect"
"""Names of operations between replicas: the question for the quorum of a step, a fetch of the state, and the connection
of a ring."""
SERVED = frozenset({QUORUM, FETCH})
"""Operations that other processes carry out in the background: that everybody has started one, and that it takes long,
is nobody's fault."""

SERVER = -1
"""Rank under which an inspection of a run of replicas knows the quorum server."""

SKIPPED, SWAPPED, ADDED, CHANGED = "skipped", "swapped", "added", "changed"
"""How a rank departs from its program: it left an operation out, took two in the other order, started one more, or
started one with other sizes or another peer."""


def channel(group: str, name: str, peer: int | None) -> str:
    """Return the key under which operations are counted: messages are counted by direction and peer, because only
    messages of one direction between two ranks are matched in order; collectives are counted by group."""
    if peer is None:
        return group
    return f"{group}{'>' if name == SEND else '<'}{peer}"


@dataclass(frozen=True)
class Operation:
    """One communication operation of one rank.

    Attributes:
        sequence: its number in its channel, from 1 on; see :func:`channel`.
        peer: logical rank of the other end of a message; None for a collective.
        sizes: type and shape of each tensor, such as "float32[4, 8]"; empty where unknown.
        awaited: whether training cannot go on before it has ended. A message that is sent in the background is not
            awaited, and gloo does not tell when it has ended.
        site: the line that started it, outside of the communication libraries: "file:line function".
        age_s: seconds since it was started; None where unknown.
        about: what it is for, for people, such as "step 6".
    """

    group: str
    name: str
    sequence: int
    peer: int | None = None
    sizes: tuple[str, ...] = ()
    done: bool = False
    awaited: bool = True
    site: str = ""
    age_s: float | None = None
    about: str = ""

    @property
    def channel(self) -> str:
        return channel(self.group, self.name, self.peer)

    @property
    def is_message(self) -> bool:
        return self.peer is not None

    def __str__(self) -> str:
        if self.peer is None:
            about = f" ({self.about})" if self.about else ""
            return f"{self.name} number {self.sequence} of group {self.group}{about}"
        way = "to" if self.name == SEND else "from"
        return f"{self.name} number {self.sequence} {way} rank {self.peer} in group {self.group}"


@dataclass(frozen=True)
class Thread:
    """One thread of a process.

    Attributes:
        frames: its Python calls, the innermost first, each "file:line function".
        kernel: what the operating system says of it: a state letter, and the kernel function in which it waits.
    """

    name: str
    frames: tuple[str, ...] = ()
    trains: bool = False
    kernel: str = ""


@dataclass(frozen=True)
class Departure:
    """How a rank's operations of the present step differ from those of its step before.

    Attributes:
        expected: the operation that was due by the step before.
        found: the operation that was started instead.
    """

    kind: str
    expected: Operation
    found: Operation


@dataclass(frozen=True)
class Rank:
    """What one rank says of itself, or what its node says of it if it does not answer.

    Attributes:
        answers: whether the process itself has answered. If not, its operations and threads are unknown: no thread
            of it could run Python code.
        ended: whether its training thread has left the training loop.
        operations: those that have not ended, and the last one of each channel; in the order in which they were
            started.
        departure: how its present step differs from the one before; None if it does not.
        step_s: usual duration of a step in seconds; None while unknown.
        moves: whether it is known that this rank, or another one of its replica, makes progress: nobody hangs because
            of it.
        round_trip_s: shortest round trip of packets from its host to another one, in seconds; None where unknown.
    """

    rank: int
    worker: str = ""
    node: str = ""
    process: str = RUNNING
    answers: bool = True
    ended: bool = False
    step: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()
    departure: Departure | None = None
    threads: tuple[Thread, ...] = ()
    step_s: float | None = None
    moves: bool = False
    round_trip_s: float | None = None

    def operation(self, key: str, sequence: int) -> Operation | None:
        """Return the operation of this number in a channel, if it is among ``operations``."""
        return next((one for one in self.operations if one.sequence == sequence and one.channel == key), None)

    @property
    def pending(self) -> list[Operation]:
        """Return the first operation of each channel that has not ended and that training waits for."""
        found: dict[str, Operation] = {}
        for one in self.operations:
            if one.awaited and not one.done:
                found.setdefault(one.channel, one)
        return list(found.values())

    @property
    def training(self) -> Thread | None:
        return next((thread for thread in self.threads if thread.trains), None)


class ReplicaRank(NamedTuple):
    """A rank of a run of replicas: the number of its replica, and its logical rank there."""

    replica: int
    rank: int


@dataclass(frozen=True)
class ReplicaGroup:
    """A group of ranks of several replicas, of which ``SERVER`` stands for the quorum server; ``rank``: logical rank in
    each.
    """

    replicas: tuple[int, ...]
    rank: int


def united(parts: Iterable[Mapping[str, ReplicaGroup]]) -> dict[str, ReplicaGroup]:
    """Return the groups of ranks of several replicas, each with all members that any part names."""
    found: dict[str, ReplicaGroup] = {}
    for part in parts:
        for name, across in part.items():
            known = found.get(name, across)
            found[name] = ReplicaGroup(tuple(sorted({*known.replicas, *across.replicas})), across.rank)
    return found


@dataclass(frozen=True)
class Inspection:
    """What all ranks say at one moment.

    Attributes:
        ranks: logical rank -> what it says. A member of a group that is not here is unknown.
        groups: name of a process group -> logical ranks of its members.
        wall: when, in seconds since 1970; 0 where unknown.
        across: name of a group of ranks of several replicas -> its members, in an inspection of one replica. The peers
            of messages in such a group are numbers of replicas.
        places: rank -> its replica and its logical rank there, in an inspection of several replicas
            (:func:`ft.faults.hang.replicas.combine`), whose ranks are numbered through. Empty in others.
        home: the replica of which the inspection is, if it is that of one replica only.
        takers: replicas that have made the inspection by themselves because a limit passed, so that the others were
            asked. Empty if a person has asked all of them.
        unasked: replicas that were not asked, or are just being started, so that nothing is known of their ranks.
        hosts: node -> host name, for the nodes of a run without replicas; empty where unknown.
    """

    ranks: Mapping[int, Rank]
    groups: Mapping[str, tuple[int, ...]]
    wall: float = 0.0
    why: str = ""
    across: Mapping[str, ReplicaGroup] = field(default_factory=dict)
    places: Mapping[int, ReplicaRank] = field(default_factory=dict)
    home: int | None = None
    takers: frozenset[int] = frozenset()
    unasked: frozenset[int] = frozenset()
    hosts: Mapping[str, str] = field(default_factory=dict)

    def is_elsewhere(self, rank: int) -> bool:
        """Return whether nothing is known of a rank because it was not asked."""
        if rank in self.ranks:
            return False
        if rank == SERVER:
            return self.home is not None
        return rank in self.places and self.places[rank].replica in self.unasked


_SAME: dict[str, tuple[str, ...]] = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": (
        *("allgather", "allgather_coalesced", "_allgather_base", "_all_gather_base", "all_gather_into_tensor"),
        *("all_gather_single", "all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        *("all_gather_into_tensor_coalesced", "ALLGATHER_coalesced"),
    ),
    "reduce_scatter": (
        *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
        *("reduce_scatter_tensor_coalesced", "REDUCE_SCATTER_coalesced"),
    ),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single"),
    "broadcast": ("_broadcast_oop",),
    "reduce": ("_reduce_oop",),
    "barrier": ("monitored_barrier", "all_reduce_barrier"),
    "coalesced": ("_end_coalescing",),
    RECV: ("recv_anysource",),
}
_NAMES = {other: name for name, others in _SAME.items() for other in others}


def source_name(filename: str, folder: str) -> str:
    """Return the path of a source file without the folder of installed packages, or without ``folder``.

    Args:
        folder: working directory of the process that runs it; "" if that is not known.
    """
    _, packages, rest = filename.rpartition("/site-packages/")
    return rest if packages else filename.removeprefix(f"{folder.rstrip('/')}/") if folder else filename


def operation_name(name: str) -> str:
    """Return the one name of an operation that torch, or its flight recorder, calls ``name``."""
    return _NAMES.get(name, name)


_HEAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*?)\])? \(most recent call first\):")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_COLLECTING = "  Garbage-collecting"
COLLECTION = "garbage collection of Python"
"""Stands as the innermost call in the stack of a thread that collects garbage."""


def read_stacks(text: str, training: int, folder: str = "") -> list[Thread]:
    """Return the threads of a process, the training thread first.

    Args:
        folder: working directory of the process; paths in it are shortened, like those of installed packages.
    """
    found: list[Thread] = []
    for line in text.splitlines():
        if (head := _HEAD.fullmatch(line)) is not None:
            trains = int(head[1], 16) == training
            name = head[2] or ("MainThread" if trains else f"thread {len(found)}")
            found.append(Thread(name, trains=trains))
        elif found and line == _COLLECTING:
            found[-1] = replace(found[-1], frames=(COLLECTION,))
        elif found and (call := _CALL.fullmatch(line)) is not None:
            frame = f"{source_name(call[1], folder)}:{call[2]} {call[3]}"
            found[-1] = replace(found[-1], frames=(*found[-1].frames, frame))
    return sorted(found, key=lambda thread: not thread.trains)


def with_kernel(threads: Sequence[Thread], of_the_system: Sequence[Thread]) -> tuple[Thread, ...]:
    """Return the threads of a process with their calls, and with what the operating system says of them.

    Only the training thread is known to be the same in both, the first one. All others are listed twice.
    """
    main = next((thread for thread in of_the_system if thread.trains), Thread(""))
    merged = [replace(one, kernel=main.kernel) if one.trains else one for one in threads]
    if not any(thread.trains for thread in merged):
        return (*of_the_system, *merged)
    return (*merged, *(thread for thread in of_the_system if not thread.trains))


_NEAR = 64
"""Number of operations within which a skipped or swapped operation is looked for."""


class Started(Protocol):
    """An operation that was started. ``sizes`` and ``site`` may be any values that are equal for equal operations."""

    @property
    def group(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def peer(self) -> int | None: ...
    @property
    def sizes(self) -> Any: ...
    @property
    def site(self) -> Any: ...


T = TypeVar("T", bound=Started)


def departure(before: Sequence[T], now: Sequence[T]) -> tuple[str, T, T] | None:
    """Return the first departure of a step from the step before; None if ``now`` is a beginning of ``before``.

    Returns:
        (kind, the operation that was due, the operation that was started instead); see
        :class:`ft.faults.hang.inspection.Departure`.
    """
    if not before:
        return None
    at = next((i for i, (old, new) in enumerate(zip(before, now, strict=False)) if _what(old) != _what(new)), None)
    if at is None:
        return None if len(now) <= len(before) else (ADDED, before[-1], now[len(before)])
    due, found = before[at], now[at]
    if (due.group, due.name, due.site) == (found.group, found.name, found.site):
        return CHANGED, due, found
    ahead = before[at + 1 : at + 1 + _NEAR]
    if _what(found) in map(_what, ahead):
        # A rank that makes up for the operation has taken two in the other order.
        after, usual = (
            [_what(one) for one in steps[place : place + 1]] for steps, place in ((now, at + 1), (before, at + 2))
        )
        is_made_up = _what(found) == _what(ahead[0]) and after == [_what(due)] != usual
        return SWAPPED if is_made_up else SKIPPED, due, found
    # The same call from another line is a branch of the program in which the order is another one.
    return SWAPPED if _call(found) in map(_call, ahead) else ADDED, due, found


def missing_end(before: Sequence[T], now: Sequence[T], after: Sequence[T]) -> tuple[str, T, T] | None:
    """Return the operation that a step has left out at its end, compared with the step before; None if it is complete.

    Args:
        before: the operations of the step before.
        now: those of the step that has ended.
        after: those of the step that follows it.

    Returns:
        (SKIPPED, the first operation that is missing, the operation that was started instead).
    """
    return (SKIPPED, before[len(now)], after[0]) if len(now) < len(before) and after else None


def _what(one: Started) -> tuple:
    return (*_call(one), one.site)


def _call(one: Started) -> tuple:
    return (one.group, one.name, one.peer, one.sizes)
