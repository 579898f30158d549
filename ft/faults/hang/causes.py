"""The cause of a hang, by the structure of the wait-for graph (FT-HSDP, section 2.3).

A rank that others wait for and that waits for nobody is at fault: it is dead, stopped, busy, or has left out a call. If
there is none, operations do not fit together: ranks are in different operations of one group, or wait for each other in
a circle. Then the rank at fault is the one whose step departs from its step before. If everybody has started an
operation and it still does not end, a connection is at fault.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ft.faults.hang import look as looks
from ft.faults.hang.graph import Wait, counterpart, fits, partners, reachable, waits
from ft.faults.hang.look import DEAD, RUNNING, SERVED, SERVER, Departure, Look, Operation
from ft.faults.hang.places import where
from ft.faults.hang.who import Who
from ft.faults.hang.words import call, of_departure, place_of
from ft.show.text import capitalised

STOPPED_, DEAD_, BUSY, MISSING_CALL, MISMATCH, UNMATCHED, CYCLE, SLOW_RANK, SLOW_LINK = (
    *("stopped", "dead", "busy", "missing-call", "mismatch", "unmatched-message", "cycle", "slow-rank", "slow-link"),
)
KINDS = (DEAD_, STOPPED_, MISSING_CALL, MISMATCH, UNMATCHED, BUSY, SLOW_RANK, CYCLE, SLOW_LINK)
"""All kinds of causes, the most certain first."""

_SHOWN = 3
"""Number of operations that are named in which others wait."""


@dataclass(frozen=True)
class Cause:
    """One cause of a hang.

    Attributes:
        rank: logical rank at fault; of a slow connection, the rank that all slow operations have in common.
        kind: one of ``KINDS``.
        group: name of the process group in which the others wait for it.
        operation: name of the operation in which they wait.
        sequence: number of that operation in its channel.
        where: where the rank is instead, as text.
        evidence: sentences that say from what this follows.
        delayed: the other ranks that wait for it, directly or not.
        ends: of a slow connection, all ranks that take part in the operations that do not end.
        together: all ranks at fault, if a whole replica or node is.
    """

    rank: int
    kind: str
    group: str
    operation: str
    sequence: int
    where: str
    evidence: tuple[str, ...]
    delayed: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    together: tuple[int, ...] = ()

    @property
    def guilty(self) -> tuple[int, ...]:
        """Return all ranks at fault, at least one."""
        return self.together or (self.rank,)


@dataclass(frozen=True)
class Diagnosis:
    """What follows from one or several looks.

    Attributes:
        causes: the causes of the hang, the most certain first.
        waiting: who waits for whom.
        moving: the replicas that go on training; empty in a run without replicas.
    """

    causes: tuple[Cause, ...]
    waiting: tuple[Wait, ...]
    moving: tuple[int, ...] = ()


def diagnose(look: Look) -> Diagnosis:
    """Return the causes of a hang at the moment of a look."""
    found = _Search(look)
    for step in (found.processes, found.misfits, found.roots, found.circles, found.links):
        for cause in step():
            found.add(cause)
    order = sorted(found.causes, key=lambda cause: (KINDS.index(cause.kind), -len(cause.delayed), cause.rank))
    return Diagnosis(tuple(order), tuple(found.edges))


class _Search:
    """The search for causes in one look. Each step leaves out what the steps before it have explained."""

    def __init__(self, look: Look):
        self.look, self._who = look, Who(look)
        self.edges = waits(look)
        self._on: dict[int, list[Wait]] = defaultdict(list)
        self._to: dict[int, set[int]] = defaultdict(set)
        self._from: dict[int, set[int]] = defaultdict(set)
        for edge in self.edges:
            self._on[edge.on].append(edge)
            self._to[edge.rank].add(edge.on)
            self._from[edge.on].add(edge.rank)
        self.causes: list[Cause] = []
        self._explained: set[int] = set()
        self._departed = _unusual(look)

    def add(self, cause: Cause) -> None:
        """Record a cause; whoever waits for its rank is explained by it."""
        self.causes.append(cause)
        self._explained |= {*cause.guilty, *cause.delayed}

    # --- the steps ----------------------------------------------------------------------------------------------------

    def processes(self) -> Iterator[Cause]:
        """Yield the ranks whose process is stopped, dead or silent, and that others wait for."""
        lost = self._lost_together()
        for rank, edges in sorted(self._on.items()):
            if self.look.is_elsewhere(rank):
                continue
            said, who = self.look.ranks.get(rank), self._who.one(rank)
            if rank in lost:
                what, together = lost[rank]
                if rank == next(one for one in together if one in self._on):
                    why = f"no process of {what} is known to live"
                    operation, place = edges[0].operation, f"nowhere: {what} is lost"
                    yield self._cause(rank, DEAD_, operation, place, why, together=together)
            elif said is None:
                yield self._cause(rank, DEAD_, edges[0].operation, "unknown", f"nothing is known of {who}")
            elif said.process != RUNNING:
                kind, ending, place = STOPPED_, "is stopped by a signal (state T)", where(said)
                if said.process == DEAD:
                    kind, ending, place = DEAD_, "has ended", "nowhere: its process has ended"
                yield self._cause(rank, kind, edges[0].operation, place, f"the process of {who} {ending}")
            elif not said.answers:
                why = f"{who} runs, but no thread of it can run Python code: one of them holds the lock"
                why = f"{who} runs, and answers nobody" if rank == SERVER else why
                yield self._cause(rank, BUSY, edges[0].operation, where(said), why)

    def misfits(self) -> Iterator[Cause]:
        """Yield the ranks that are in another operation than the other members, or in the same one with other sizes."""
        seen = set()
        for rank, said in sorted(self.look.ranks.items()):
            for operation in () if said.moves else said.pending:
                key = (operation.group, frozenset((rank, operation.peer)) if operation.is_message else None)
                if key in seen:
                    continue
                members = self._who_started(rank, operation)
                if all(fits(one, other) for one in members.values() for other in members.values()):
                    continue
                seen.add(key)
                for odd in self._odd(members):
                    yield self._misfit(odd, members)

    def roots(self) -> Iterator[Cause]:
        """Yield the ranks that others wait for and that are in no operation."""
        for rank, edges in sorted(self._on.items()):
            said = self.look.ranks.get(rank)
            if rank in self._explained or said is None or said.pending:
                continue
            edge, who = edges[0], self._who.one(rank)
            if rank in self._departed:
                yield self._of_departure(rank, self._departed[rank])
            elif said.ended:
                kind = UNMATCHED if edge.operation.is_message else MISSING_CALL
                why = f"{who} has left the training loop and will not start it any more"
                yield self._cause(rank, kind, edge.operation, where(said), why)
            else:
                yield self._cause(rank, BUSY, edge.operation, where(said), f"{who} is in no communication")

    def circles(self) -> Iterator[Cause]:
        """Yield the causes among the ranks that wait for each other in a circle."""
        for circle in self._circles():
            around = {rank for rank in self._to if circle & reachable(rank, self._to)} | circle
            departed = sorted(around & self._departed.keys())
            for rank in departed:
                yield self._of_departure(rank, self._departed[rank])
            if departed:
                continue
            inside = [edge for edge in self.edges if {edge.rank, edge.on} <= circle]
            first = max(inside, key=lambda edge: (edge.operation.age_s or 0.0, -edge.rank))
            messages = any(edge.operation.is_message for edge in inside)
            path = _around(inside, first.on)
            chain = " -> ".join(map(self._who.one if self.look.places else str, path))
            yield self._cause(
                first.on,
                UNMATCHED if messages else CYCLE,
                first.operation,
                self._place(first.on),
                f"the ranks wait for each other in a circle: {chain}",
                *(self._waits(edge) for edge in inside[:4]),
            )

    def links(self) -> Iterator[Cause]:
        """Yield the cause if everybody has started an operation and it still does not end.

        That is a slow connection, unless a member departs from its step before in this group: a rank that has left a
        collective out has started the next one under the same number, which the numbers alone do not show.
        """
        stuck = []
        for rank, said in sorted(self.look.ranks.items()):
            if rank in self._explained or self._to.get(rank) or said.moves:
                continue
            pending = [operation for operation in said.pending if operation.name not in SERVED]
            stuck += [(rank, operation) for operation in pending if self._is_under_way(rank, operation)]
        departed = sorted({one for rank, operation in stuck for one in self._departed_from(rank, operation)})
        for rank in departed:
            yield self._of_departure(rank, self._departed[rank])
        if departed or not stuck:
            return
        tally: Counter[int] = Counter()
        for rank, operation in stuck:
            tally.update({rank, *partners(self.look, rank, operation)})
        rank = max(tally, key=lambda one: (tally[one], any(one == r and o.name == looks.SEND for r, o in stuck), -one))
        operation = next(o for r, o in stuck if rank in (r, *partners(self.look, r, o)))
        groups = ", ".join(sorted({operation.group for _, operation in stuck}))
        ends = "both ends" if operation.is_message else "all members"
        found = self._cause(
            rank,
            SLOW_LINK,
            operation,
            f"a connection of group(s) {groups}",
            f"{ends} have started {self._who.operation(operation)}, and it has not ended",
            f"{self._who.one(rank)} takes part in {tally[rank]} of {len(stuck)} operations that do not end",
        )
        yield replace(found, ends=tuple(sorted(tally)))

    # --- parts of the steps -------------------------------------------------------------------------------------------

    def _who_started(self, rank: int, operation: Operation) -> dict[int, Operation]:
        """Return, for all ranks that have started this operation of ``rank``, what each of them has started."""
        found = {rank: operation}
        for other in partners(self.look, rank, operation):
            said = self.look.ranks.get(other)
            same = said.operation(counterpart(rank, operation), operation.sequence) if said is not None else None
            if same is not None:
                found[other] = same
        return found

    def _odd(self, members: dict[int, Operation]) -> list[int]:
        """Return the ranks that differ from most members; where the numbers are equal, those that departed."""
        classes: list[list[int]] = []
        for rank, operation in sorted(members.items()):
            fitting = next((one for one in classes if fits(members[one[0]], operation)), None)
            if fitting is None or operation.is_message:
                classes.append([rank])
            else:
                fitting.append(rank)
        departed = [rank for rank in members if rank in self._departed]
        if departed:
            return sorted(departed)
        largest = max(map(len, classes))
        if sum(len(one) == largest for one in classes) > 1:
            sender = [rank for rank, operation in members.items() if operation.name == looks.SEND]
            return sender or classes[-1]
        return sorted(rank for one in classes if len(one) < largest for rank in one)

    def _misfit(self, rank: int, members: dict[int, Operation]) -> Cause:
        own = members[rank]
        others = {other: operation for other, operation in members.items() if not fits(own, operation)}
        operation = next(iter(others.values()), own)
        departed = self._departed.get(rank)
        kind = MISMATCH
        if departed is not None and departed.kind == looks.SKIPPED:
            kind = UNMATCHED if departed.expected.is_message else MISSING_CALL
        started = f"{self._who.title(others)} {'has' if len(others) == 1 else 'have'} started"
        evidence = [
            f"{self._who.one(rank)} has started {call(self._who.operation(own), own)}",
            f"{started} {call(self._who.operation(operation), operation)}",
        ]
        if departed is not None:
            evidence.append(of_departure(departed))
        return self._cause(rank, kind, operation, self._place(rank), *evidence, besides=others)

    def _of_departure(self, rank: int, departed: Departure) -> Cause:
        about = departed.found if departed.kind == looks.ADDED else departed.expected
        if departed.kind == looks.SWAPPED:
            kind = CYCLE
        elif about.is_message and (departed.kind != looks.CHANGED or departed.found.peer != about.peer):
            kind = UNMATCHED
        else:
            kind = MISSING_CALL if departed.kind == looks.SKIPPED else MISMATCH
        edge = next((edge for edge in self._on.get(rank, ()) if edge.operation.channel == about.channel), None)
        operation = edge.operation if edge is not None else about
        return self._cause(rank, kind, operation, self._place(rank), of_departure(departed))

    def _circles(self) -> list[set[int]]:
        """Return the sets of ranks that wait for each other and for nobody whose fault is known."""
        reach = {rank: reachable(rank, self._to) for rank in self._to if rank not in self._explained}
        found: list[set[int]] = []
        for rank, ahead in sorted(reach.items()):
            circle = {one for one in ahead if rank in reach.get(one, ())} if rank in ahead else set()
            if circle and circle not in found:
                found.append(circle)
        # a circle that waits for another one follows from it
        return [one for one in found if not any(o is not one and reach[min(one)] & o and not o & one for o in found)]

    def _departed_from(self, rank: int, operation: Operation) -> list[int]:
        """Return the ranks that take part in an operation of ``rank`` and depart from their step before in its group;
        none if all of them do."""
        members = [rank, *partners(self.look, rank, operation)]
        found = {one: self._departed[one] for one in members if one in self._departed}
        found = {one: it for one, it in found.items() if operation.group in (it.expected.group, it.found.group)}
        return [] if len(found) == len(members) else list(found)

    def _is_under_way(self, rank: int, operation: Operation) -> bool:
        """Return whether all others have started an operation, and it has ended nowhere, or in part."""
        started = self._who_started(rank, operation)
        if operation.is_message:
            return len(started) == 2
        return True

    def _waits(self, edge: Wait) -> str:
        one, operation, other = self._who.one(edge.rank), self._who.operation(edge.operation), self._who.one(edge.on)
        return f"{one} is in {operation}, and waits for {other}"

    def _lost_together(self) -> dict[int, tuple[str, tuple[int, ...]]]:
        """Return, for each rank of a replica or a node (with several ranks) of which no process is known to live: the
        name of the replica or the node, and all its ranks."""
        nodes: dict[str, list[int]] = defaultdict(list)
        replicas: dict[str, list[int]] = defaultdict(list)
        for rank, said in self.look.ranks.items():
            place = self.look.places.get(rank)
            if said.node:
                nodes[f"node {said.node}" + (f" of replica {place.replica}" if place else "")].append(rank)
        for rank, place in self.look.places.items():
            if not self.look.is_elsewhere(rank):
                replicas[f"replica {place.replica}"].append(rank)
        lost = [*((what, ranks) for what, ranks in nodes.items() if len(ranks) > 1), *replicas.items()]
        lost = [(what, ranks) for what, ranks in lost if all(map(self._is_lost, ranks))]
        return {rank: (what, tuple(sorted(ranks))) for what, ranks in lost for rank in ranks}

    def _is_lost(self, rank: int) -> bool:
        said = self.look.ranks.get(rank)
        return said is None or said.process == DEAD

    def _place(self, rank: int) -> str:
        said = self.look.ranks.get(rank)
        return "unknown" if said is None else place_of(said)

    def _cause(
        self,
        rank: int,
        kind: str,
        operation: Operation,
        place: str,
        *evidence: str,
        besides: Iterable[int] = (),
        together: tuple[int, ...] = (),
    ) -> Cause:
        """Return a cause.

        Args:
            rank: rank at fault.
            kind: kind of the cause.
            operation: operation in which others wait for it.
            place: where the rank is.
            evidence: sentences, with or without a full stop.
            besides: ranks that it delays although they do not wait for it.
            together: all ranks at fault, if there are several.
        """
        guilty = {rank, *together}
        waiting = {one for each in guilty for one in reachable(each, self._from)} | set(besides)
        sentences = [one if one.endswith(".") else f"{one}." for one in evidence]
        direct: dict[str, set[int]] = defaultdict(set)
        for edge in self.edges:
            if edge.on in guilty:
                direct[self._who.operation(edge.operation)].add(edge.rank)
        for what, ranks in list(direct.items())[:_SHOWN]:
            sentences.append(f"{self._who.title(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for it in {what}.")
        if len(direct) > _SHOWN:
            sentences.append(f"Others wait for it in {len(direct) - _SHOWN} further operations.")
        return Cause(
            *(rank, kind, operation.group, operation.name, operation.sequence, place),
            evidence=tuple(map(capitalised, sentences)),
            delayed=tuple(sorted(waiting - guilty)),
            together=together,
        )


def _unusual(look: Look) -> dict[int, Departure]:
    """Return the departures of ranks, without those that most members of a group have in common."""
    found = {rank: said.departure for rank, said in look.ranks.items() if said.departure is not None}
    usual = set()
    for group in look.groups.values():
        members = [rank for rank in group if rank in look.ranks]
        departed = [rank for rank in members if rank in found]
        if len(members) > 2 and 2 * len(departed) > len(members):
            usual.update(departed)
    return {rank: departure for rank, departure in found.items() if rank not in usual}


def _around(edges: list[Wait], start: int) -> list[int]:
    """Return the ranks of a circle in order, from ``start`` back to ``start``."""
    follow: dict[int, int] = {}
    for edge in edges:
        follow.setdefault(edge.rank, edge.on)
    path = [start]
    while (after := follow.get(path[-1])) is not None and after not in path:
        path.append(after)
    return [*path, start]
