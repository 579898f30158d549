"""Who waits for whom: the wait-for graph of an inspection (FT-HSDP, section 2.3).

A rank in a collective operation waits for all members that have not started it. A rank that receives waits for the
sender until it has sent as many messages, and a rank that sends waits for the receiver until it has posted as many
receives. Nobody waits for a rank that is known to make progress.

The members of a group that are in the same operation wait for the same ranks. The graph holds the ones and the others
as two lists, not as pairs, so its size grows with the number of ranks and of the groups of a rank.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ft.faults.hang.inspection import RECV, RUNNING, SEND, Inspection, Operation, Rank, channel

ABSENT, UNKNOWN, DIFFERENT = "has not started it", "does not answer", "has started another operation"
ELSEWHERE = "is in a replica that was not asked"
"""Why ranks wait for other ones, or seem to."""

_MOST_FORMS = 8
"""Number of forms of one operation that are told apart. If there are more, each rank counts as waiting for all others
that have started it."""


@dataclass(eq=False)
class Wait:
    """Ranks that wait in one operation for the same ranks.

    Attributes:
        on: the ranks that each of them waits for.
        operation: the operation in which they wait, as the first of them has started it.
        why: one of ``ABSENT``, ``UNKNOWN``, ``DIFFERENT`` and ``ELSEWHERE``.
    """

    ranks: list[int]
    on: tuple[int, ...]
    operation: Operation
    why: str
    number: int


class Form(NamedTuple):
    """What has to be equal on all members of a collective; of operations that fit by name alone, the name."""

    name: str
    sizes: tuple[str, ...]


class Graph:
    """The wait-for graph of an inspection.

    Attributes:
        waits: the edges, by the first waiting rank and then in the order of its operations.
        pending: rank -> the operations that it waits in, if their partners have started them or not.
        of: rank -> the waits that it is in, each with its own operation; only ranks that wait for others.
        awaited: rank -> the waits that are for it, in the order of ``waits``; only ranks that others wait for.
    """

    def __init__(self, seen: Inspection):
        self._seen = seen
        self.pending = {rank: said.pending for rank, said in sorted(seen.ranks.items())}
        self._started = self._collectives()
        self.waits: list[Wait] = []
        self.of: dict[int, list[tuple[Wait, Operation]]] = {}
        self.awaited: dict[int, list[Wait]] = {}
        together: dict[tuple, list[Wait]] = {}
        for rank, operations in self.pending.items():
            for operation in operations:
                key = self._key(rank, operation)
                if key not in together:
                    together[key] = []
                    for why, on in self._awaited(rank, operation).items():
                        together[key].append(Wait([], tuple(on), operation, why, len(self.waits)))
                        self.waits.append(together[key][-1])
                for wait in together[key]:
                    wait.ranks.append(rank)
                    self.of.setdefault(rank, []).append((wait, operation))
        for wait in self.waits:
            for other in wait.on:
                self.awaited.setdefault(other, []).append(wait)

    # --- who has started what -----------------------------------------------------------------------------------------

    def _collectives(self) -> dict[tuple[str, int], dict[int, Operation]]:
        """Return (group, number) of each collective in which a rank waits -> rank -> what it has started there."""
        found: dict[tuple[str, int], dict[int, Operation]] = {
            (one.group, one.sequence): {} for pending in self.pending.values() for one in pending if one.peer is None
        }
        for rank, said in self._seen.ranks.items():
            for one in said.operations:
                if one.peer is None and (started := found.get((one.group, one.sequence))) is not None:
                    started.setdefault(rank, one)
        return found

    def started(self, rank: int, operation: Operation) -> dict[int, Operation]:
        """Return, for all ranks that have started an operation in which ``rank`` waits, what each has started."""
        found = {rank: operation}
        if operation.peer is None:
            started = self._started[operation.group, operation.sequence]
            found |= {one: started[one] for one in partners(self._seen, rank, operation) if one in started}
        elif (said := self._seen.ranks.get(operation.peer)) is not None:
            same = said.operation(counterpart(rank, operation), operation.sequence)
            found |= {operation.peer: same} if same is not None else {}
        return found

    @cached_property
    def _forms(self) -> dict[tuple[str, int], set[Form]]:
        """(group, number) of each collective -> the forms in which it was started."""
        return {key: {form(one) for one in started.values()} for key, started in self._started.items()}

    # --- who is waited for --------------------------------------------------------------------------------------------

    def _key(self, rank: int, operation: Operation) -> tuple:
        """Return a key that is equal for ranks that wait in the same operation for the same ranks."""
        if operation.peer is not None:
            return rank, operation.channel
        key = (operation.group, operation.sequence)
        return *key, operation.about, form(operation) if len(self._forms[key]) <= _MOST_FORMS else operation.name

    def _awaited(self, rank: int, operation: Operation) -> dict[str, list[int]]:
        """Return why ``rank`` waits in an operation -> the ranks that it waits for."""
        found: dict[str, list[int]] = defaultdict(list)
        key, meeting = counterpart(rank, operation), (operation.group, operation.sequence)
        is_message = operation.peer is not None
        differ = not is_message and len(self._forms[meeting]) > _MOST_FORMS
        for other in (operation.peer,) if is_message else self._seen.groups.get(operation.group, ()):
            said = self._seen.ranks.get(other)
            if said is None:
                found[ELSEWHERE if self._seen.is_elsewhere(other) else UNKNOWN].append(other)
            elif not said.moves:
                same = said.operation(key, operation.sequence) if is_message else self._started[meeting].get(other)
                if why := _why(said, key, operation, same, differ):
                    found[why].append(other)
        return found

    # --- paths --------------------------------------------------------------------------------------------------------

    def after(self, node: Any) -> Iterable[Any]:
        """Return the nodes after a rank, which are waits, or after a wait, which are ranks."""
        return node.on if isinstance(node, Wait) else [wait for wait, _ in self.of.get(node, ())]

    def reached(self, starts: Iterable[int]) -> set[int]:
        """Return the ranks that some ranks wait for, directly or not."""
        found: set[Any] = set()
        open_: list[Any] = list(starts)
        while open_:
            for after in self.after(open_.pop()):
                if after not in found:
                    found.add(after)
                    open_.append(after)
        return {node for node in found if not isinstance(node, Wait)}

    @cached_property
    def components(self) -> list[list[Any]]:
        """The strongly connected components of ranks and waits, each after those to which paths lead from it. A
        component of several nodes contains a circle."""
        return list(_components(list(self.of), self.after))

    def ahead(self, marks: Mapping[int, int]) -> dict[int, int]:
        """Return for each rank that waits the marks (bits) of all ranks for which it waits, directly or not."""
        found: dict[Any, int] = {}
        for nodes in self.components:
            mark = 0
            for node in nodes:
                for after in self.after(node):
                    mark |= marks.get(after, 0) | found.get(after, 0)
            found.update(dict.fromkeys(nodes, mark))
        return {rank: found[rank] for rank in self.of}


def _why(other: Rank, key: str, operation: Operation, same: Operation | None, differ: bool) -> str:
    """Return why ranks wait for another one, "" if they do not.

    Args:
        same: what the other one has started under its number, if that is known.
        differ: whether all that have started it count as different.
    """
    if not other.answers:
        return UNKNOWN
    if same is not None:
        return DIFFERENT if differ or not fits(operation, same) else ""
    if other.counts.get(key, 0) < operation.sequence:
        return ABSENT if other.process == RUNNING else UNKNOWN
    return ""


def partners(seen: Inspection, rank: int, operation: Operation) -> list[int]:
    """Return the other ranks that take part in an operation of ``rank``."""
    if operation.peer is not None:
        return [operation.peer]
    return [member for member in seen.groups.get(operation.group, ()) if member != rank]


def counterpart(rank: int, operation: Operation) -> str:
    """Return the channel in which the partners of an operation of ``rank`` count it."""
    if operation.peer is None:
        return operation.channel
    return channel(operation.group, RECV if operation.name == SEND else SEND, rank)


EQUAL_SIZES = frozenset({"all_reduce", "reduce", "broadcast", "barrier", "all_gather", "reduce_scatter"})
"""Collectives whose tensors are equally large on all members."""


def form(operation: Operation) -> Form:
    """Return the form of a collective."""
    return Form(operation.name, operation.sizes if operation.name in EQUAL_SIZES else ())


def fits(one: Operation, other: Operation) -> bool:
    """Return whether two ranks' operations can be the same collective, or the two ends of one message."""
    if one.is_message:
        return not (one.sizes and other.sizes) or one.sizes == other.sizes
    if one.name != other.name:
        return False
    compared = one.name in EQUAL_SIZES and one.sizes and other.sizes
    return not compared or one.sizes == other.sizes


def all_fit(operations: Iterable[Operation]) -> bool:
    """Return whether all these operations of different ranks fit each other."""
    first, *others = operations
    if first.is_message:
        return all(fits(first, other) for other in others)
    forms = {form(first), *map(form, others)}
    return len({one.name for one in forms}) == 1 and sum(bool(one.sizes) for one in forms) <= 1


def _components(starts: Iterable[Any], after: Callable[[Any], Iterable[Any]]) -> Iterator[list[Any]]:
    """Yield the strongly connected components of a graph, each after those to which paths lead from it (Tarjan)."""
    number: dict[Any, int] = {}
    low: dict[Any, int] = {}
    path: list[tuple[Any, Iterator[Any]]] = []
    stack: list[Any] = []
    done: set[Any] = set()

    def enter(node: Any) -> None:
        number[node] = low[node] = len(number)
        path.append((node, iter(after(node))))
        stack.append(node)

    for start in starts:
        if start not in number:
            enter(start)
        while path:
            node, rest = path[-1]
            for other in rest:
                if other not in number:
                    enter(other)
                    break
                if other not in done:
                    low[node] = min(low[node], number[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == number[node]:
                    found = [stack.pop()]
                    while found[-1] != node:
                        found.append(stack.pop())
                    done.update(found)
                    yield found
