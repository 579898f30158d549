"""The cause of a hang, by the structure of the wait-for graph (FT-HSDP, section 2.3).

A rank that others wait for and that waits for nobody is at fault: it is dead, stopped, busy, or has left out a call. If
there is none, operations do not fit together: ranks are in different operations of one group, or wait for each other in
a circle. Then the rank at fault is the one whose step departs from its step before. If everybody has started an
operation and it still does not end, a connection is at fault.

In a run that moves, somebody computes and others wait at any moment, so a single inspection names whoever happens to
compute. Over several inspections (:func:`over_time`), a slow rank is the one that most of the waiting is for, and a
slow connection is the one whose operations everybody has started in most inspections. Of several replicas (FT-HSDP),
some may hang while others train on; a rank of a replica that moves is not at fault.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import groupby, islice
from typing import Any, NamedTuple

from ft.base.events import named
from ft.faults.hang import inspection as kinds
from ft.faults.hang.format import Who, call, is_in_own_wait, of_departure, place_of, where
from ft.faults.hang.graph import Form, Graph, Wait, all_fit, fits, form
from ft.faults.hang.inspection import DEAD, RUNNING, SERVED, SERVER, Departure, Inspection, Operation, Rank
from ft.show.text import capitalised

STOPPED_RANK, DEAD_RANK, BUSY, MISSING_CALL, MISMATCH, UNMATCHED, CYCLE, SLOW_RANK, SLOW_LINK = (
    *("stopped", "dead", "busy", "missing-call", "mismatch", "unmatched-message", "cycle", "slow-rank", "slow-link"),
)
KINDS = (DEAD_RANK, STOPPED_RANK, MISSING_CALL, MISMATCH, UNMATCHED, BUSY, SLOW_RANK, CYCLE, SLOW_LINK)
"""All kinds of causes, the most certain first."""

_SHOWN = 3
"""Number of operations that are named in which others wait."""
_MOST = 100
"""Number of causes of one inspection that are told."""


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
    """Why a run hangs, as far as one or several inspections show it.

    Attributes:
        causes: the ranks or connections at fault, each with the evidence.
        waiting: the operations in which other ranks wait.
        moving: the replicas that go on training; empty in a run without replicas.
        further: number of causes that are left out, because there are very many.
    """

    causes: tuple[Cause, ...]
    waiting: tuple[Wait, ...]
    moving: tuple[int, ...] = ()
    further: int = 0


def diagnose(seen: Inspection) -> Diagnosis:
    """Return the causes of a hang at the moment of an inspection."""
    search = Search(seen)
    return search.diagnosis(search.causes)


class Search:
    """The search for causes in one inspection. Each step leaves out what the steps before it have explained.

    Attributes:
        causes: the causes as the steps have found them, without the ranks that wait for them (``told``).
    """

    def __init__(self, seen: Inspection):
        self.seen, self._who = seen, Who(seen)
        self.graph = Graph(seen)
        self.causes: list[Cause] = []
        self._explained: set[int] = set()
        self._followed: set[Any] = set()
        self._departed = _unusual(seen)
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
            if self.seen.is_elsewhere(rank):
                continue
            said, who, operation = self.seen.ranks.get(rank), self._who.one(rank), waits[0].operation
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
            for operation in () if self.seen.ranks[rank].moves else pending:
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
            said = self.seen.ranks.get(rank)
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
        senders = {rank for rank, operation, _ in stuck if operation.name == kinds.SEND}
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
            sender = [rank for rank, operation in members.items() if operation.name == kinds.SEND]
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
        if departed is not None and departed.kind == kinds.SKIPPED:
            kind = UNMATCHED if departed.expected.is_message else MISSING_CALL
        evidence = [f"{self._who.one(rank)} has started {call(self._who.operation(own), own)}", others.text]
        if departed is not None:
            evidence.append(of_departure(departed))
        return _cause(rank, kind, others.operation, self._place(rank), *evidence, besides=others.ranks)

    def _of_departure(self, rank: int, departed: Departure) -> Cause:
        about = departed.found if departed.kind == kinds.ADDED else departed.expected
        if departed.kind == kinds.SWAPPED:
            kind = CYCLE
        elif about.is_message and (departed.kind != kinds.CHANGED or departed.found.peer != about.peer):
            kind = UNMATCHED
        else:
            kind = MISSING_CALL if departed.kind == kinds.SKIPPED else MISMATCH
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
        chain = " -> ".join(map(self._who.one if self.seen.places else str, path))
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
            if rank in self._explained or rank in self.graph.of or self.seen.ranks[rank].moves:
                continue
            for operation in pending:
                if operation.name in SERVED:
                    continue
                if operation.peer is None:
                    ranks = self.seen.groups.get(operation.group) or (rank,)
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
        for rank, said in self.seen.ranks.items():
            place = self.seen.places.get(rank)
            if said.node:
                node = f"node {named(said.node, self.seen.hosts)}"
                nodes[node + (f" of replica {place.replica}" if place else "")].append(rank)
        for rank, place in self.seen.places.items():
            if not self.seen.is_elsewhere(rank):
                replicas[f"replica {place.replica}"].append(rank)
        found = {}
        for what, ranks in (*((what, ranks) for what, ranks in nodes.items() if len(ranks) > 1), *replicas.items()):
            if all(map(self._is_lost, ranks)):
                together = tuple(sorted(ranks))
                first = next((rank for rank in together if rank in self.graph.awaited), -1)
                found.update(dict.fromkeys(together, (what, together, first)))
        return found

    def _is_lost(self, rank: int) -> bool:
        said = self.seen.ranks.get(rank)
        return said is None or said.process == DEAD

    def _place(self, rank: int) -> str:
        said = self.seen.ranks.get(rank)
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


def _unusual(seen: Inspection) -> dict[int, Departure]:
    """Return the departures of ranks, without those that most members of a group have in common."""
    found = {rank: said.departure for rank, said in seen.ranks.items() if said.departure is not None}
    usual: set[int] = set()
    for group in seen.groups.values() if found else ():
        members = [rank for rank in group if rank in seen.ranks]
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


# --- several inspections ----------------------------------------------------------------------------------------------


_SHARE = 0.5
"""Share of the inspections in which a slow rank is the one that others wait for."""
_LEAD = 1.5
"""Factor by which its number of inspections exceeds that of any other rank."""


_FAR = 3.0
"""Factor by which the round trip to a host with a slow connection exceeds that to any other."""
_AT_WORK = 0.5
"""A replica does not hang if its newest operation is younger than this share of that of a replica that does."""
_TELLING = 3
"""Number of inspections from which on a slow rank can be told from one that happens to compute."""


def over_time(inspections: Sequence[Inspection]) -> Diagnosis:
    """Return the causes over several inspections, in the order in which they were taken; a single one is allowed."""
    if inspections[-1].places:
        return _over_replicas(inspections)
    if len(inspections) == 1 or not moves(inspections[0], inspections[-1]):
        return diagnose(inspections[-1])
    return _slowing(inspections)


def moves(before: Inspection, after: Inspection) -> bool:
    """Return whether any rank has made progress between two inspections."""
    return any(has_moved(before.ranks.get(rank), said) for rank, said in after.ranks.items())


def has_moved(before: Rank | None, after: Rank) -> bool:
    """Return whether a rank has made progress between two inspections of it."""
    if before is None or not before.answers or not after.answers:
        return False
    return (before.step, before.counts) != (after.step, after.counts)


# --- replicas --------------------------------------------------------------------------------------------------------


def _over_replicas(inspections: Sequence[Inspection]) -> Diagnosis:
    """Return the causes in replicas that do not move. If all move and there are enough inspections, who slows them
    down."""
    first, last = inspections[0], inspections[-1]
    moving = moving_between(first, last) | (at_work(last) if last.home is None else set())
    ranks = {rank: replace(said, moves=_is_part_of(last, said, moving)) for rank, said in last.ranks.items()}
    search = Search(replace(last, ranks=ranks))
    causes = search.causes
    if last.takers and len(inspections) == 1:
        concerned = {rank for rank, place in last.places.items() if place.replica in last.takers}
        awaited = concerned | search.graph.reached(concerned)
        causes = [one for one in causes if not (awaited.isdisjoint(one.guilty) and concerned.isdisjoint(one.delayed))]
    found = search.diagnosis(causes)
    if not found.causes and moving and len(inspections) >= _TELLING:
        found = _slowing(inspections)
    return replace(found, moving=tuple(sorted(moving)))


def _is_part_of(seen: Inspection, said: Rank, moving: set[int]) -> bool:
    """Return whether a rank is in one of the replicas that make progress, and its process runs.

    A process that has ended or is stopped is at fault even if the other ranks of its replica still make progress.
    """
    place = seen.places.get(said.rank)
    return place is not None and place.replica in moving and said.process == RUNNING


def moving_between(before: Inspection, after: Inspection) -> set[int]:
    """Return the replicas of which a rank has made progress between two inspections."""
    ranks = (rank for rank, said in after.ranks.items() if has_moved(before.ranks.get(rank), said))
    return {after.places[rank].replica for rank in ranks if rank in after.places}


def at_work(seen: Inspection) -> set[int]:
    """Return the replicas that do not hang as far as a single inspection tells: their newest operation is younger than
    a step takes, or much younger than that of a replica in which a limit has passed.
    """
    newest: dict[int, float] = {}
    step_s: dict[int, float] = defaultdict(float)
    for rank, place in seen.places.items():
        said = seen.ranks.get(rank)
        ages = [one.age_s for one in said.operations if one.age_s is not None] if said is not None else []
        if said is not None and ages:
            newest[place.replica] = min(*ages, newest.get(place.replica, float("inf")))
            step_s[place.replica] = max(step_s[place.replica], said.step_s or 0.0)
    least_s = _AT_WORK * max((age_s for replica, age_s in newest.items() if replica in seen.takers), default=0.0)
    found = {replica for replica, age_s in newest.items() if age_s < max(least_s, step_s[replica])}
    return found - seen.takers


# --- slow ranks ------------------------------------------------------------------------------------------------------


def _slowing(inspections: Sequence[Inspection]) -> Diagnosis:
    """Return the rank or the connection that slows down a run that moves, if one stands out."""
    searches = [Search(seen) for seen in inspections]
    waiting = tuple(searches[-1].graph.waits)
    found = [(search, cause) for search in searches for cause in search.causes]
    ranks = Counter(cause.rank for _, cause in found if cause.kind == BUSY)
    links = Counter(rank for _, cause in found if cause.kind == SLOW_LINK for rank in cause.ends)
    slow = _outstanding(ranks, _SHARE * len(inspections), _LEAD)
    if slow is not None:
        causes = _told((search, cause) for search, cause in found if (cause.rank, cause.kind) == (slow, BUSY))
        return Diagnosis((_slow(causes, SLOW_RANK, len(inspections)),), waiting)
    link = _outstanding(links, _SHARE * len(inspections), 1.0)
    if link is not None:
        causes = _told((search, cause) for search, cause in found if cause.kind == SLOW_LINK)
        return Diagnosis((_slow_link(inspections, links, causes, link),), waiting)
    return Diagnosis((), waiting)


def _told(found: Iterable[tuple[Search, Cause]]) -> list[Cause]:
    return [told for search, cause in found for told in search.told([cause])]


def _slow_link(inspections: Sequence[Inspection], links: Counter[int], causes: Sequence[Cause], link: int) -> Cause:
    """Return the cause that names the rank with the slow connection.

    Args:
        links: rank -> number of inspections in which it took part in operations that everybody had started.
        causes: the slow connections found in these inspections.
        link: the first rank with the highest number.
    """
    alike = sorted(rank for rank, votes in links.items() if votes == links[link])
    far, round_trips = _farthest(inspections[-1], alike)
    is_open = len(alike) > 1 and far is None
    who, rank = Who(inspections[-1]).title(alike), link if far is None else far
    least = max((votes for votes in links.values() if votes < links[link]), default=0)
    votes = f"{capitalised(who)} took part in the slow operations of {links[link]} inspections, the others of"
    votes += f" {least} at most" + (": any of them may be slow." if is_open else ".")
    found = _slow([replace(one, rank=rank) for one in causes if rank in one.ends], SLOW_LINK, len(inspections))
    # what else is known from one inspection is about the rank that was named there
    evidence = (*found.evidence[:2], votes, *round_trips)
    return replace(found, ends=tuple(alike) if is_open else found.ends, evidence=evidence)


def _farthest(seen: Inspection, ranks: Collection[int]) -> tuple[int | None, tuple[str, ...]]:
    """Return, of several ranks, the one to whose host packets take much longer than to the others, and a sentence that
    says so; None if there is none."""
    known = {rank: said.round_trip_s for rank in ranks if (said := seen.ranks.get(rank)) and said.round_trip_s}
    if len(known) < 2 or len(known) < len(ranks):
        return None, ()
    *_, second, first = sorted(known, key=lambda rank: known[rank])
    if known[first] < _FAR * known[second]:
        return None, ()
    who, other = Who(seen).one(first), Who(seen).one(second)
    took = f"{1e3 * known[first]:.3g} ms at least; to and from that of {other}, {1e3 * known[second]:.3g} ms"
    return first, (f"Packets to and from the host of {who} take {took}.",)


def _outstanding(votes: Counter[int], least: float, lead: float) -> int | None:
    """Return the rank with the most votes if it has ``least`` of them, and ``lead`` times those of any other."""
    ordered = sorted(votes.items(), key=lambda item: (-item[1], item[0]))
    if not ordered:
        return None
    rank, count = ordered[0]
    second = ordered[1][1] if len(ordered) > 1 else 0
    return rank if count >= least and count >= lead * second else None


def _slow(causes: list[Cause], kind: str, number: int) -> Cause:
    where = Counter(cause.where for cause in causes).most_common(1)[0][0]
    one = next(cause for cause in causes if cause.where == where)
    delayed = tuple(sorted({rank for cause in causes for rank in cause.delayed} - {one.rank}))
    why = f"In {len(causes)} of {number} inspections the others waited for it, and the run moved on in between."
    return replace(one, kind=kind, where=where, evidence=(why, *one.evidence), delayed=delayed)
