"""The cause of a hang, by the structure of the wait-for graph (FT-HSDP, section 2.3).

A rank that others wait for and that waits for nobody is at fault: it is dead, stopped, busy, or has left out a call. If
there is none, operations do not fit together: ranks are in different operations of one group, or wait for each other in
a circle. Then the rank at fault is the one whose step departs from its step before. If everybody has started an
operation and it still does not end, a connection is at fault.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import groupby, islice
from typing import Any, NamedTuple

from ft.base.events import named
from ft.faults.hang import look as looks
from ft.faults.hang.format import Who, call, is_in_own_wait, of_departure, place_of, where
from ft.faults.hang.graph import Form, Graph, Wait, all_fit, fits, form
from ft.faults.hang.look import DEAD, RUNNING, SERVED, SERVER, Departure, Look, Operation
from ft.show.text import capitalised

STOPPED_RANK, DEAD_RANK, BUSY, MISSING_CALL, MISMATCH, UNMATCHED, CYCLE, SLOW_RANK, SLOW_LINK = (
    *("stopped", "dead", "busy", "missing-call", "mismatch", "unmatched-message", "cycle", "slow-rank", "slow-link"),
)
KINDS = (DEAD_RANK, STOPPED_RANK, MISSING_CALL, MISMATCH, UNMATCHED, BUSY, SLOW_RANK, CYCLE, SLOW_LINK)
"""All kinds of causes, the most certain first."""

_SHOWN = 3
"""Number of operations that are named in which others wait."""
_MOST = 100
"""Number of causes of one look that are told."""


@dataclass(frozen=True)
class Cause:
    """One cause of a hang.

    Attributes:
        rank: logical rank at fault; of a slow connection, the rank that takes part in most of the slow operations.
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
        moving: the replicas that go on training; empty in a run without replicas.
        further: number of causes that are left out, because there are very many.
    """

    causes: tuple[Cause, ...]
    waiting: tuple[Wait, ...]
    moving: tuple[int, ...] = ()
    further: int = 0


def diagnose(look: Look) -> Diagnosis:
    """Return the causes of a hang at the moment of a look."""
    search = Search(look)
    return search.diagnosis(search.causes)


class Search:
    """The search for causes in one look. Each step leaves out what the steps before it have explained.

    Attributes:
        causes: the causes as the steps have found them, without the ranks that wait for them (``told``).
    """

    def __init__(self, look: Look):
        self.look, self._who = look, Who(look)
        self.graph = Graph(look)
        self.causes: list[Cause] = []
        self._explained: set[int] = set()
        self._followed: set[Any] = set()
        self._departed = _unusual(look)
        for step in (self._processes, self._misfits, self._roots, self._circles, self._links):
            for cause in step():
                self._add(cause)

    def _add(self, cause: Cause) -> None:
        """Record a cause; whoever waits for its rank, directly or not, is explained by it."""
        self.causes.append(cause)
        self._explained.update(cause.guilty)
        if id(cause.delayed) not in self._followed:  # causes in one operation share them
            self._followed.add(id(cause.delayed))
            self._explained.update(cause.delayed)
        open_ = list(cause.guilty)
        while open_:
            for wait in self.graph.awaited.get(open_.pop(), ()):
                if wait not in self._followed:
                    self._followed.add(wait)
                    self._explained.update(wait.ranks)
                    open_ += wait.ranks

    def diagnosis(self, causes: Sequence[Cause]) -> Diagnosis:
        """Return the diagnosis that names these causes, or the first ones if there are very many."""
        chosen = nsmallest(_MOST, causes, key=self._first_of_many) if len(causes) > _MOST else causes
        order = sorted(self.told(chosen), key=lambda cause: (KINDS.index(cause.kind), -len(cause.delayed), cause.rank))
        return Diagnosis(tuple(order), tuple(self.graph.waits), further=len(causes) - len(chosen))

    def _first_of_many(self, cause: Cause) -> tuple[int, int, int]:
        directly = sum(len(wait.ranks) for wait in self.graph.awaited.get(cause.rank, ()))
        return (KINDS.index(cause.kind), -directly, cause.rank)

    def told(self, causes: Sequence[Cause]) -> list[Cause]:
        """Return some of the causes with the ranks that wait for them."""
        marks: dict[int, int] = defaultdict(int)
        for number, cause in enumerate(causes):
            for rank in cause.guilty:
                marks[rank] |= 1 << number
        alike: dict[int, list[int]] = defaultdict(list)
        for rank, mark in self.graph.ahead(marks).items():
            alike[mark].append(rank)
        found = []
        for number, cause in enumerate(causes):
            waiting = {rank for mark, ranks in alike.items() if mark >> number & 1 for rank in ranks}
            delayed = tuple(sorted(waiting.union(cause.delayed).difference(cause.guilty)))
            found.append(replace(cause, evidence=(*cause.evidence, *self._who_waits(cause)), delayed=delayed))
        return found

    # --- the steps ----------------------------------------------------------------------------------------------------

    def _processes(self) -> Iterator[Cause]:
        """Yield the ranks whose process is stopped, dead or silent, and that others wait for."""
        lost = self._lost_together()
        for rank, waits in sorted(self.graph.awaited.items()):
            if self.look.is_elsewhere(rank):
                continue
            said, who, operation = self.look.ranks.get(rank), self._who.one(rank), waits[0].operation
            if rank in lost:
                what, together, first = lost[rank]
                if rank == first:
                    why = f"no process of {what} is known to live"
                    yield _cause(rank, DEAD_RANK, operation, f"nowhere: {what} is lost", why, together=together)
            elif said is None:
                yield _cause(rank, DEAD_RANK, operation, "unknown", f"nothing is known of {who}")
            elif said.process != RUNNING:
                kind, ending, place = STOPPED_RANK, "is stopped by a signal (state T)", where(said)
                if said.process == DEAD:
                    kind, ending, place = DEAD_RANK, "has ended", "nowhere: its process has ended"
                yield _cause(rank, kind, operation, place, f"the process of {who} {ending}")
            elif not said.answers:
                why = f"{who} runs, but no thread of it can run Python code: one of them holds the lock"
                why = f"{who} runs, and answers nobody" if rank == SERVER else why
                yield _cause(rank, BUSY, operation, where(said), why)

    def _misfits(self) -> Iterator[Cause]:
        """Yield the ranks that are in another operation than the other members, or in the same one with other sizes."""
        seen: set[tuple] = set()
        for rank, pending in self.graph.pending.items():
            for operation in () if self.look.ranks[rank].moves else pending:
                key = (operation.group, frozenset((rank, operation.peer)) if operation.is_message else None)
                if key in seen or (key, operation.sequence) in seen:
                    continue
                members = self.graph.started(rank, operation)
                if all_fit(members.values()):
                    if not operation.is_message:
                        seen.add((key, operation.sequence))
                    continue
                seen.add(key)
                others: dict[Form, _Others] = {}
                for odd in self._odd(members):
                    if form(members[odd]) not in others:
                        others[form(members[odd])] = self._others(members, members[odd])
                    yield self._misfit(odd, members[odd], others[form(members[odd])])

    def _roots(self) -> Iterator[Cause]:
        """Yield the ranks that others wait for and that are in no operation."""
        for rank, waits in sorted(self.graph.awaited.items()):
            said = self.look.ranks.get(rank)
            if rank in self._explained or said is None or self.graph.pending[rank]:
                continue
            operation, who = waits[0].operation, self._who.one(rank)
            if rank in self._departed:
                yield self._of_departure(rank, self._departed[rank])
            elif said.ended:
                kind = UNMATCHED if operation.is_message else MISSING_CALL
                why = f"{who} has left the training loop and will not start it any more"
                yield _cause(rank, kind, operation, where(said), why)
            elif not is_in_own_wait(said):
                yield _cause(rank, BUSY, operation, where(said), f"{who} is in no communication")

    def _circles(self) -> Iterator[Cause]:
        """Yield the causes among the ranks that wait for each other in a circle."""
        circles = self._sets_in_circles()
        marks = {rank: 1 << number for number, circle in enumerate(circles) for rank in circle}
        ahead = self.graph.ahead(marks) if marks and self._departed else {}
        for number, circle in enumerate(circles):
            departed = [one for one in sorted(self._departed) if one in circle or ahead.get(one, 0) >> number & 1]
            for rank in departed:
                yield self._of_departure(rank, self._departed[rank])
            if not departed:
                yield from self._circle(circle)

    def _links(self) -> Iterator[Cause]:
        """Yield the cause if everybody has started an operation and it still does not end.

        That is a slow connection, unless a member departs from its step before in this group: a rank that has left a
        collective out has started the next one under the same number, which the numbers alone do not show.
        """
        stuck = self._stuck()
        parties = {party.key: party for _, _, party in stuck}.values()
        departed = sorted({rank for party in parties for rank in self._departed_from(party)})
        for rank in departed:
            yield self._of_departure(rank, self._departed[rank])
        if departed or not stuck:
            return
        times, tally = Counter(party.key for _, _, party in stuck), Counter[int]()
        for party in parties:
            tally.update(dict.fromkeys(party.ranks, times[party.key]))
        senders = {rank for rank, operation, _ in stuck if operation.name == looks.SEND}
        rank = max(tally, key=lambda one: (tally[one], one in senders, -one))
        with_it = {party.key for party in parties if rank in party.ranks}
        operation = next(operation for _, operation, party in stuck if party.key in with_it)
        groups = ", ".join(sorted({operation.group for _, operation, _ in stuck}))
        ends = "both ends" if operation.is_message else "all members"
        found = _cause(
            rank,
            SLOW_LINK,
            operation,
            f"a connection of group(s) {groups}",
            f"{ends} have started {self._who.operation(operation)}, and it has not ended",
            f"{self._who.one(rank)} takes part in {tally[rank]} of {len(stuck)} operations that do not end",
        )
        yield replace(found, ends=tuple(sorted(tally)))

    # --- parts of the steps -------------------------------------------------------------------------------------------

    def _odd(self, members: Mapping[int, Operation]) -> list[int]:
        """Return the ranks that differ from most members; where the numbers are equal, those that departed."""
        departed = [rank for rank in members if rank in self._departed]
        if departed:
            return sorted(departed)
        classes = _classes(members)
        largest = max(map(len, classes))
        if sum(len(one) == largest for one in classes) > 1:
            sender = [rank for rank, operation in members.items() if operation.name == looks.SEND]
            return sender or classes[-1]
        return sorted(rank for one in classes if len(one) < largest for rank in one)

    def _others(self, members: Mapping[int, Operation], own: Operation) -> "_Others":
        """Return the members whose operations do not fit ``own``."""
        others = {rank: operation for rank, operation in members.items() if not fits(own, operation)}
        operation = next(iter(others.values()), own)
        started = f"{self._who.title(others)} {'has' if len(others) == 1 else 'have'} started"
        return _Others(tuple(others), operation, f"{started} {call(self._who.operation(operation), operation)}")

    def _misfit(self, rank: int, own: Operation, others: "_Others") -> Cause:
        departed = self._departed.get(rank)
        kind = MISMATCH
        if departed is not None and departed.kind == looks.SKIPPED:
            kind = UNMATCHED if departed.expected.is_message else MISSING_CALL
        evidence = [f"{self._who.one(rank)} has started {call(self._who.operation(own), own)}", others.text]
        if departed is not None:
            evidence.append(of_departure(departed))
        return _cause(rank, kind, others.operation, self._place(rank), *evidence, besides=others.ranks)

    def _of_departure(self, rank: int, departed: Departure) -> Cause:
        about = departed.found if departed.kind == looks.ADDED else departed.expected
        if departed.kind == looks.SWAPPED:
            kind = CYCLE
        elif about.is_message and (departed.kind != looks.CHANGED or departed.found.peer != about.peer):
            kind = UNMATCHED
        else:
            kind = MISSING_CALL if departed.kind == looks.SKIPPED else MISMATCH
        operations = (wait.operation for wait in self.graph.awaited.get(rank, ()))
        operation = next((one for one in operations if one.channel == about.channel), about)
        return _cause(rank, kind, operation, self._place(rank), of_departure(departed))

    def _sets_in_circles(self) -> list[set[int]]:
        """Return the sets of ranks that wait for each other and for nobody whose fault is known."""
        found: list[set[int]] = []
        leads_to_one: set[Any] = set()
        for nodes in self.graph.components:
            ranks = {node for node in nodes if not isinstance(node, Wait)} if len(nodes) > 1 else set()
            circle = ranks - self._explained
            leads = any(after in leads_to_one for node in nodes for after in self.graph.after(node))
            if circle and not leads:  # a circle that waits for another one follows from it
                found.append(circle)
            if circle or leads:
                leads_to_one.update(nodes)
        return sorted(found, key=min)

    def _circle(self, circle: set[int]) -> Iterator[Cause]:
        """Yield the cause if ranks wait for each other in a circle, and none departs from its step before. There is
        none if they do so only by way of ranks that are explained."""
        inside, first_on = [], {}
        for rank in sorted(circle):
            for operation, pairs in groupby(self.graph.of[rank], key=lambda pair: pair[1]):
                waits = [wait for wait, _ in pairs]
                first_on |= {w: min(circle.intersection(w.on), default=None) for w in waits if w not in first_on}
                if on := [one for wait in waits if (one := first_on[wait]) is not None]:
                    inside.append((rank, operation, min(on), waits))
        if not inside:
            return
        _, first, culprit, _ = max(inside, key=lambda edge: (edge[1].age_s or 0.0, -edge[0]))
        messages = any(operation.is_message for _, operation, _, _ in inside)
        follow: dict[int, int] = {}
        for rank, _, on, _ in inside:
            follow.setdefault(rank, on)
        path = _around(follow, culprit)
        chain = " -> ".join(map(self._who.one if self.look.places else str, path))
        edges = (
            f"{self._who.one(rank)} is in {self._who.operation(operation)}, and waits for {self._who.one(on)}"
            for rank, operation, _, waits in inside
            for on in sorted({one for wait in waits for one in circle.intersection(wait.on)})
        )
        why = f"the ranks wait for each other in a circle: {chain}"
        kind = UNMATCHED if messages else CYCLE
        yield _cause(culprit, kind, first, self._place(culprit), why, *islice(edges, 4))

    def _stuck(self) -> list[tuple[int, Operation, "_Party"]]:
        """Return (rank, operation, who takes part) of the operations that all have started, and that do not end."""
        found = []
        for rank, pending in self.graph.pending.items():
            if rank in self._explained or rank in self.graph.of or self.look.ranks[rank].moves:
                continue
            for operation in pending:
                if operation.name in SERVED:
                    continue
                if operation.peer is None:
                    ranks = self.look.groups.get(operation.group) or (rank,)
                elif len(self.graph.started(rank, operation)) == 2:
                    ranks = (rank, operation.peer)
                else:
                    continue
                key = (operation.group, operation.is_message, *ranks[:2])
                found.append((rank, operation, _Party(key, ranks)))
        return found

    def _departed_from(self, party: "_Party") -> list[int]:
        """Return the ranks that take part in an operation and depart from their step before in its group; none if all
        of them do."""
        found = {rank: self._departed[rank] for rank in party.ranks if rank in self._departed}
        found = {rank: it for rank, it in found.items() if party.group in (it.expected.group, it.found.group)}
        return [] if len(found) == len(party.ranks) else list(found)

    def _lost_together(self) -> dict[int, tuple[str, tuple[int, ...], int]]:
        """Return, for each rank of a replica or a node (with several ranks) of which no process is known to live: the
        name of the replica or the node, all its ranks, and the first one that others wait for."""
        nodes: dict[str, list[int]] = defaultdict(list)
        replicas: dict[str, list[int]] = defaultdict(list)
        for rank, said in self.look.ranks.items():
            place = self.look.places.get(rank)
            if said.node:
                node = f"node {named(said.node, self.look.hosts)}"
                nodes[node + (f" of replica {place.replica}" if place else "")].append(rank)
        for rank, place in self.look.places.items():
            if not self.look.is_elsewhere(rank):
                replicas[f"replica {place.replica}"].append(rank)
        found = {}
        for what, ranks in (*((what, ranks) for what, ranks in nodes.items() if len(ranks) > 1), *replicas.items()):
            if all(map(self._is_lost, ranks)):
                together = tuple(sorted(ranks))
                first = next((rank for rank in together if rank in self.graph.awaited), -1)
                found.update(dict.fromkeys(together, (what, together, first)))
        return found

    def _is_lost(self, rank: int) -> bool:
        said = self.look.ranks.get(rank)
        return said is None or said.process == DEAD

    def _place(self, rank: int) -> str:
        said = self.look.ranks.get(rank)
        return "unknown" if said is None else place_of(said)

    def _who_waits(self, cause: Cause) -> list[str]:
        """Return sentences that say who waits for the ranks at fault, and in which operations."""
        waits = {wait.number: wait for rank in cause.guilty for wait in self.graph.awaited.get(rank, ())}
        direct: dict[str, set[int]] = defaultdict(set)
        for _, wait in sorted(waits.items()):
            direct[self._who.operation(wait.operation)].update(wait.ranks)
        sentences = []
        for what, ranks in islice(direct.items(), _SHOWN):
            sentences.append(f"{self._who.title(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for it in {what}.")
        if len(direct) > _SHOWN:
            sentences.append(f"Others wait for it in {len(direct) - _SHOWN} further operations.")
        return list(map(capitalised, sentences))


class _Others(NamedTuple):
    """Members of a group that have started another operation than a rank; ``operation``: that of the first of them."""

    ranks: tuple[int, ...]
    operation: Operation
    text: str


class _Party(NamedTuple):
    """The ranks that take part in an operation; ``key``: name of the group, and what tells it from others there."""

    key: tuple
    ranks: tuple[int, ...]

    @property
    def group(self) -> str:
        return self.key[0]


def _cause(
    rank: int,
    kind: str,
    operation: Operation,
    place: str,
    *evidence: str,
    besides: tuple[int, ...] = (),
    together: tuple[int, ...] = (),
) -> Cause:
    """Return a cause without the ranks that wait for it.

    Args:
        besides: ranks that it delays although they do not wait for it.
    """
    sentences = tuple(capitalised(one if one.endswith(".") else f"{one}.") for one in evidence)
    about = (operation.group, operation.name, operation.sequence)
    return Cause(rank, kind, *about, place, sentences, delayed=besides, together=together)


def _classes(members: Mapping[int, Operation]) -> list[list[int]]:
    """Return the ranks whose operations fit each other together. The two ends of a message are apart."""
    classes: list[list[int]] = []
    first: dict[Form, int] = {}
    named: dict[str, int] = {}
    for rank, operation in sorted(members.items()):
        own = form(operation)
        if operation.is_message:
            number = None
        elif own.sizes:
            number = min((first[one] for one in (own, Form(own.name, ())) if one in first), default=None)
        else:
            number = named.get(own.name)
        if number is None:
            number = len(classes)
            classes.append([])
            first[own] = number
            named.setdefault(own.name, number)
        classes[number].append(rank)
    return classes


def _unusual(look: Look) -> dict[int, Departure]:
    """Return the departures of ranks, without those that most members of a group have in common."""
    found = {rank: said.departure for rank, said in look.ranks.items() if said.departure is not None}
    usual: set[int] = set()
    for group in look.groups.values() if found else ():
        members = [rank for rank in group if rank in look.ranks]
        departed = [rank for rank in members if rank in found]
        if len(members) > 2 and 2 * len(departed) > len(members):
            usual.update(departed)
    return {rank: departure for rank, departure in found.items() if rank not in usual}


def _around(follow: Mapping[int, int], start: int) -> list[int]:
    """Return the ranks of a circle in order, from ``start`` back to ``start``."""
    path = {start: None}
    last = start
    while (after := follow.get(last)) is not None and after not in path:
        path[after] = None
        last = after
    return [*path, start]
