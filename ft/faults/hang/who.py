"""Names ranks and operations of a look for people: "rank 5", or "replica 1 rank 2" in a run of replicas."""

from collections import defaultdict
from collections.abc import Collection, Iterable

from ft.faults.hang.look import SEND, SERVER, Look, Operation
from ft.show.text import spans

THE_SERVER = "the quorum server"


class Who:
    """The names of the ranks of one look."""

    def __init__(self, look: Look):
        self._places, self._home = look.places, look.home

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
        return _words("rank", ranks)

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
            found.append(_words("rank", own))
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for replica, members in sorted(by.items()):
            alike[tuple(sorted(members))].append(replica)
        found += [f"{_words('replica', replicas)} {_words('rank', members)}" for members, replicas in alike.items()]
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


def _words(name: str, numbers: Collection[int]) -> str:
    return f"{name}{'s' * (len(numbers) > 1)} {spans(numbers)}"
