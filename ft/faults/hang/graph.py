"""Who waits for whom: the edges of the wait-for graph of a look (FT-HSDP, section 2.3).

A rank in a collective operation waits for all members that have not started it. A rank that receives waits for the
sender until it has sent as many messages, and a rank that sends waits for the receiver until it has posted as many
receives. Nobody waits for a rank that is known to make progress.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ft.faults.hang.look import RECV, RUNNING, SEND, Look, Operation, Rank, channel

ABSENT, UNKNOWN, DIFFERENT = "has not started it", "does not answer", "has started another operation"
ELSEWHERE = "is in a replica that was not asked"
"""Why a rank waits for another one, or seems to."""


@dataclass(frozen=True)
class Wait:
    """One rank waits for another one.

    Attributes:
        rank: the rank that waits.
        on: the rank that it waits for.
        operation: the operation in which it waits.
        why: one of ``ABSENT``, ``UNKNOWN``, ``DIFFERENT`` and ``ELSEWHERE``.
    """

    rank: int
    on: int
    operation: Operation
    why: str


def waits(look: Look) -> list[Wait]:
    """Return all edges of the wait-for graph, by waiting rank and then in the order of its operations."""
    return [edge for _, rank in sorted(look.ranks.items()) for one in rank.pending for edge in _edges(look, rank, one)]


def _edges(look: Look, rank: Rank, operation: Operation) -> Iterable[Wait]:
    for other in partners(look, rank.rank, operation):
        said = look.ranks.get(other)
        if said is not None and said.moves:
            continue
        why = ELSEWHERE if look.is_elsewhere(other) else _why(said, rank.rank, operation)
        if why:
            yield Wait(rank.rank, other, operation, why)


def partners(look: Look, rank: int, operation: Operation) -> list[int]:
    """Return the other ranks that take part in an operation of ``rank``."""
    if operation.peer is not None:
        return [operation.peer]
    return [member for member in look.groups.get(operation.group, ()) if member != rank]


def counterpart(rank: int, operation: Operation) -> str:
    """Return the channel in which the partners of an operation of ``rank`` count it."""
    if operation.peer is None:
        return operation.channel
    return channel(operation.group, RECV if operation.name == SEND else SEND, rank)


def _why(other: Rank | None, rank: int, operation: Operation) -> str:
    if other is None or not other.answers:
        return UNKNOWN
    key = counterpart(rank, operation)
    started = other.counts.get(key, 0)
    if started < operation.sequence:
        return ABSENT if other.process == RUNNING else UNKNOWN
    same = other.operation(key, operation.sequence)
    if same is not None and not fits(operation, same):
        return DIFFERENT
    return ""


EQUAL_SIZES = frozenset({"all_reduce", "reduce", "broadcast", "barrier", "all_gather", "reduce_scatter"})
"""Collectives whose tensors are equally large on all members."""


def fits(one: Operation, other: Operation) -> bool:
    """Return whether two ranks' operations can be the same collective, or the two ends of one message."""
    if one.is_message:
        return not (one.sizes and other.sizes) or one.sizes == other.sizes
    if one.name != other.name:
        return False
    compared = one.name in EQUAL_SIZES and one.sizes and other.sizes
    return not compared or one.sizes == other.sizes


def reachable(start: int, edges: Mapping[int, Iterable[int]]) -> set[int]:
    """Return all nodes to which a path leads from ``start``; ``start`` itself only if it lies on a cycle."""
    found: set[int] = set()
    open_ = list(edges.get(start, ()))
    while open_:
        node = open_.pop()
        if node not in found:
            found.add(node)
            open_ += edges.get(node, ())
    return found
