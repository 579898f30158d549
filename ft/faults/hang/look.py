"""The data from which the cause of a hang is found: what every rank says of itself at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field

RUNNING, STOPPED, DEAD = "running", "stopped", "dead"
"""States of a process: it runs (or sleeps), it was stopped by a signal, it has ended."""

SEND, RECV = "send", "recv"

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
        group: name of the process group.
        name: name of the operation, such as "all_reduce", "send" or "recv".
        sequence: its number in its channel, from 1 on; see :func:`channel`.
        peer: logical rank of the other end of a message; None for a collective.
        sizes: type and shape of each tensor, such as "float32[4, 8]"; empty where unknown.
        done: whether it is known to have ended.
        awaited: whether training cannot go on before it has ended. A message that is sent in the background is not
            awaited, and gloo does not tell when it has ended.
        site: the line that started it, outside of the communication libraries: "file:line function".
        age_s: seconds since it was started; None where unknown.
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

    @property
    def channel(self) -> str:
        return channel(self.group, self.name, self.peer)

    @property
    def is_message(self) -> bool:
        return self.peer is not None

    def __str__(self) -> str:
        if self.peer is None:
            return f"{self.name} number {self.sequence} of group {self.group}"
        way = "to" if self.name == SEND else "from"
        return f"{self.name} number {self.sequence} {way} rank {self.peer} in group {self.group}"


@dataclass(frozen=True)
class Thread:
    """One thread of a process.

    Attributes:
        name: name of the thread.
        frames: its Python calls, the innermost first, each "file:line function".
        trains: whether it is the training thread.
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
        kind: one of ``SKIPPED``, ``SWAPPED``, ``ADDED`` and ``CHANGED``.
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
        rank: logical rank.
        worker: name of the worker that holds it.
        node: name of its node.
        process: one of ``RUNNING``, ``STOPPED`` and ``DEAD``.
        answers: whether the process itself has answered. If not, its operations and threads are unknown: no thread
            of it could run Python code.
        ended: whether its training thread has left the training loop.
        step: last committed step.
        counts: number of operations that it has started, by channel.
        operations: those that have not ended, and the last one of each channel; in the order in which they were
            started.
        departure: how its present step differs from the one before; None if it does not.
        threads: its threads.
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

    def operation(self, key: str, sequence: int) -> Operation | None:
        """Return the operation of this number in a channel, if it is among ``operations``."""
        return next((one for one in self.operations if one.channel == key and one.sequence == sequence), None)

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


@dataclass(frozen=True)
class Look:
    """What all ranks say at one moment.

    Attributes:
        ranks: logical rank -> what it says. A member of a group that is not here is unknown.
        groups: name of a process group -> logical ranks of its members.
        wall: when, in seconds since 1970; 0 where unknown.
        why: why the look was taken.
    """

    ranks: Mapping[int, Rank]
    groups: Mapping[str, tuple[int, ...]]
    wall: float = 0.0
    why: str = ""
