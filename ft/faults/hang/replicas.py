"""Combines the inspections of several replicas (FT-HSDP), so that one wait-for graph shows who waits across replicas.

Each replica has a world of its own, with logical ranks from 0 on. In the combined inspection, the ranks of all replicas
are numbered through, and ``Inspection.places`` says which is which. Ranks of different replicas meet in groups whose
names are the same in all replicas: the question for the quorum of a step, which only leaders (rank 0) ask; the
all-reduces of a ring, whose members are the same rank of all replicas of a quorum; and fetches of the state.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ft.faults.hang.inspection import SERVER, Departure, Inspection, Operation, Rank, ReplicaRank

QUESTIONS = "QUORUM"
"""Name of the group in which the leaders of all replicas ask for the quorum of a step."""
AGREEMENT = "AGREEMENT"
"""Purpose of the groups in which the leader of a replica passes the quorum of a step on to its other ranks."""

FOR_OTHERS = "replica "
"""How the reason begins if a replica was inspected only because another replica had reached a time limit."""

_CHANNEL = re.compile(r"(.*)([<>])(\d+)")


@dataclass(frozen=True)
class _Numbering:
    """The numbers of ranks and the names of groups in a combined inspection; ``width`` is the size of a replica's
    world."""

    width: int

    def number(self, replica: int, rank: int) -> int:
        return SERVER if replica == SERVER else replica * self.width + rank

    def group(self, replica: int, seen: Inspection, name: str) -> str:
        return name if name in seen.across else f"replica {replica}/{name}"

    def peer(self, replica: int, seen: Inspection, group: str, peer: int) -> int:
        across = seen.across.get(group)
        return self.number(replica, peer) if across is None else self.number(peer, across.rank)

    def channel(self, replica: int, seen: Inspection, key: str) -> str:
        """Translate the key of a channel (:func:`ft.faults.hang.inspection.channel`) of one replica's inspection into
        that of the combined inspection, which has other names of groups and other numbers of ranks."""
        match = _CHANNEL.fullmatch(key)
        if match is None:
            return self.group(replica, seen, key)
        group, way, peer = match[1], match[2], int(match[3])
        return f"{self.group(replica, seen, group)}{way}{self.peer(replica, seen, group, peer)}"

    def operation(self, replica: int, seen: Inspection, one: Operation) -> Operation:
        peer = None if one.peer is None else self.peer(replica, seen, one.group, one.peer)
        return replace(one, group=self.group(replica, seen, one.group), peer=peer)

    def rank(self, replica: int, seen: Inspection, said: Rank) -> Rank:
        departed = said.departure
        if departed is not None:
            due, found = (self.operation(replica, seen, one) for one in (departed.expected, departed.found))
            departed = Departure(departed.kind, due, found)
        return replace(
            said,
            rank=self.number(replica, said.rank),
            counts={self.channel(replica, seen, key): count for key, count in said.counts.items()},
            operations=tuple(self.operation(replica, seen, one) for one in said.operations),
            departure=departed,
        )


def combine(
    inspections: Mapping[int, Inspection],
    lost: Iterable[int] = (),
    unasked: Iterable[int] = (),
    server: Rank | None = None,
    home: int | None = None,
) -> Inspection:
    """Return one inspection of several replicas of a run.

    Args:
        lost: replicas that have not answered, so that they count as dead.
        unasked: replicas that were not asked. Others that ``inspections`` mention belong to these as well.
        server: what is known of the process of the quorum server.
        home: the replica whose inspection it is, if it is that of one replica only.
    """
    numbering = _Numbering(max((_width(seen) for seen in inspections.values()), default=1))
    lost = set(lost)
    others = {*unasked, *(one for seen in inspections.values() for one in _named(seen))} - inspections.keys() - lost
    places = {
        numbering.number(replica, rank): ReplicaRank(replica, rank)
        for replica in sorted({*inspections, *lost, *others})
        for rank in range(numbering.width)
    }
    ranks: dict[int, Rank] = {}
    members: dict[str, set[int]] = defaultdict(set)
    for replica, seen in inspections.items():
        for said in _with_leaders_wait(seen):
            ranks[numbering.number(replica, said.rank)] = numbering.rank(replica, seen, said)
        for name, group in seen.groups.items():
            members[numbering.group(replica, seen, name)].update(numbering.number(replica, one) for one in group)
        for name, across in seen.across.items():
            members[name].update(numbering.number(one, across.rank) for one in across.replicas)
    if not _all_miss_the_server(inspections.values()):
        members[QUESTIONS].discard(SERVER)
    if server is not None:
        ranks[SERVER] = replace(server, rank=SERVER)
    wall = max((seen.wall for seen in inspections.values()), default=0.0)
    groups = {name: tuple(sorted(group)) for name, group in members.items()}
    known = dict(sorted(ranks.items()))
    takers = frozenset(replica for replica, seen in inspections.items() if not seen.why.startswith(FOR_OTHERS))
    takers = takers if len(takers) < len(inspections) else frozenset()
    why = _why(inspections, takers)
    return Inspection(known, groups, wall, why, places=places, home=home, takers=takers, unasked=frozenset(others))


def _why(inspections: Mapping[int, Inspection], takers: Collection[int]) -> str:
    """Return why the first inspection was made."""
    if not inspections:
        return ""
    replica, first = min(inspections.items(), key=lambda item: item[1].wall)
    return f"{FOR_OTHERS}{replica}: {first.why}" if replica in takers else first.why


def _width(seen: Inspection) -> int:
    inside = {rank for group in seen.groups.values() for rank in group} | seen.ranks.keys()
    return 1 + max(inside | {across.rank for across in seen.across.values()}, default=0)


def _named(seen: Inspection) -> set[int]:
    return {one for across in seen.across.values() for one in across.replicas if one != SERVER}


def _with_leaders_wait(seen: Inspection) -> Iterator[Rank]:
    """Yield the ranks of a replica. If any waits for the quorum of a step, those that obtain it or pass it on wait as
    well: they do that in a thread of their own, while their trainers may compute.
    """
    is_awaited = any(one.awaited for said in seen.ranks.values() for one in _of_agreement(said))
    for said in seen.ranks.values():
        if is_awaited:
            awaited = {id(one) for one in _of_agreement(said)}
            operations = (replace(one, awaited=True) if id(one) in awaited else one for one in said.operations)
            said = replace(said, operations=tuple(operations))
        yield said


def _of_agreement(said: Rank) -> list[Operation]:
    return [one for one in said.operations if not one.done and one.group.partition("/")[0] in (QUESTIONS, AGREEMENT)]


def _all_miss_the_server(inspections: Iterable[Inspection]) -> bool:
    """Return whether all leaders that have asked for a quorum hear nothing from the server."""
    asked = [seen for seen in inspections if any(_asks(said) for said in seen.ranks.values())]
    return bool(asked) and all(SERVER in seen.across[QUESTIONS].replicas for seen in asked if QUESTIONS in seen.across)


def _asks(said: Rank) -> bool:
    return any(one.group == QUESTIONS and not one.done for one in said.operations)
