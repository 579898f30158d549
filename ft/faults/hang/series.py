"""The cause over several looks: whether a run hangs or is slow, and who slows it down.

In a run that moves, somebody computes and others wait at any moment, so a single look names whoever happens to compute.
Over several looks, a slow rank is the one that most of the waiting is for, and a slow connection is the one whose
operations everybody has started in most looks.

Of several replicas (FT-HSDP), some may hang while others train on. A rank of a replica that moves is not at fault.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ft.faults.hang.causes import BUSY, SLOW_LINK, SLOW_RANK, Cause, Diagnosis, Search, diagnose
from ft.faults.hang.format import Who
from ft.faults.hang.look import RUNNING, Look, Rank
from ft.show.text import capitalised

_SHARE = 0.5
"""Share of the looks in which a slow rank is the one that others wait for."""
_LEAD = 1.5
"""Factor by which its number of looks exceeds that of any other rank."""


_FAR = 3.0
"""Factor by which the round trip to a host with a slow connection exceeds that to any other."""
_AT_WORK = 0.5
"""A replica does not hang if its newest operation is younger than this share of that of a replica that does."""
_TELLING = 3
"""Number of looks from which on a slow rank can be told from one that happens to compute."""


def over_time(looks: Sequence[Look]) -> Diagnosis:
    """Return the causes over several looks, in the order in which they were taken; a single one is allowed."""
    if looks[-1].places:
        return _over_replicas(looks)
    if len(looks) == 1 or not moves(looks[0], looks[-1]):
        return diagnose(looks[-1])
    return _slowing(looks)


def moves(before: Look, after: Look) -> bool:
    """Return whether any rank has made progress between two looks."""
    return any(has_moved(before.ranks.get(rank), said) for rank, said in after.ranks.items())


def has_moved(before: Rank | None, after: Rank) -> bool:
    """Return whether a rank has made progress between two looks at it."""
    if before is None or not before.answers or not after.answers:
        return False
    return (before.step, before.counts) != (after.step, after.counts)


# --- replicas --------------------------------------------------------------------------------------------------------


def _over_replicas(looks: Sequence[Look]) -> Diagnosis:
    """Return the causes in replicas that do not move. If all move and there are enough looks, who slows them down."""
    first, last = looks[0], looks[-1]
    moving = moving_between(first, last) | (at_work(last) if last.home is None else set())
    ranks = {rank: replace(said, moves=_is_part_of(last, said, moving)) for rank, said in last.ranks.items()}
    search = Search(replace(last, ranks=ranks))
    causes = search.causes
    if last.takers and len(looks) == 1:
        concerned = {rank for rank, place in last.places.items() if place.replica in last.takers}
        awaited = concerned | search.graph.reached(concerned)
        causes = [one for one in causes if not (awaited.isdisjoint(one.guilty) and concerned.isdisjoint(one.delayed))]
    found = search.diagnosis(causes)
    if not found.causes and moving and len(looks) >= _TELLING:
        found = _slowing(looks)
    return replace(found, moving=tuple(sorted(moving)))


def _is_part_of(look: Look, said: Rank, moving: set[int]) -> bool:
    """Return whether a rank is in one of the replicas that make progress, and its process runs.

    A process that has ended or is stopped is at fault even if the other ranks of its replica still make progress.
    """
    place = look.places.get(said.rank)
    return place is not None and place.replica in moving and said.process == RUNNING


def moving_between(before: Look, after: Look) -> set[int]:
    """Return the replicas of which a rank has made progress between two looks."""
    ranks = (rank for rank, said in after.ranks.items() if has_moved(before.ranks.get(rank), said))
    return {after.places[rank].replica for rank in ranks if rank in after.places}


def at_work(look: Look) -> set[int]:
    """Return the replicas that do not hang as far as a single look tells: their newest operation is younger than a step
    takes, or much younger than that of a replica in which a limit has passed.
    """
    newest: dict[int, float] = {}
    step_s: dict[int, float] = defaultdict(float)
    for rank, place in look.places.items():
        said = look.ranks.get(rank)
        ages = [one.age_s for one in said.operations if one.age_s is not None] if said is not None else []
        if said is not None and ages:
            newest[place.replica] = min(*ages, newest.get(place.replica, float("inf")))
            step_s[place.replica] = max(step_s[place.replica], said.step_s or 0.0)
    least_s = _AT_WORK * max((age_s for replica, age_s in newest.items() if replica in look.takers), default=0.0)
    found = {replica for replica, age_s in newest.items() if age_s < max(least_s, step_s[replica])}
    return found - look.takers


# --- slow ranks ------------------------------------------------------------------------------------------------------


def _slowing(looks: Sequence[Look]) -> Diagnosis:
    """Return the rank or the connection that slows down a run that moves, if one stands out."""
    searches = [Search(look) for look in looks]
    waiting = tuple(searches[-1].graph.waits)
    found = [(search, cause) for search in searches for cause in search.causes]
    ranks = Counter(cause.rank for _, cause in found if cause.kind == BUSY)
    links = Counter(rank for _, cause in found if cause.kind == SLOW_LINK for rank in cause.ends)
    slow = _outstanding(ranks, _SHARE * len(looks), _LEAD)
    if slow is not None:
        causes = _told((search, cause) for search, cause in found if (cause.rank, cause.kind) == (slow, BUSY))
        return Diagnosis((_slow(causes, SLOW_RANK, len(looks)),), waiting)
    link = _outstanding(links, _SHARE * len(looks), 1.0)
    if link is not None:
        causes = _told((search, cause) for search, cause in found if cause.kind == SLOW_LINK)
        return Diagnosis((_slow_link(looks, links, causes, link),), waiting)
    return Diagnosis((), waiting)


def _told(found: Iterable[tuple[Search, Cause]]) -> list[Cause]:
    return [told for search, cause in found for told in search.told([cause])]


def _slow_link(looks: Sequence[Look], links: Counter[int], causes: Sequence[Cause], link: int) -> Cause:
    """Return the cause that names the rank with the slow connection.

    Args:
        links: rank -> number of looks in which it took part in operations that everybody had started.
        causes: the slow connections found in these looks.
        link: the first rank with the highest number.
    """
    alike = sorted(rank for rank, votes in links.items() if votes == links[link])
    far, round_trips = _farthest(looks[-1], alike)
    is_open = len(alike) > 1 and far is None
    who, rank = Who(looks[-1]).title(alike), link if far is None else far
    least = max((votes for votes in links.values() if votes < links[link]), default=0)
    votes = f"{capitalised(who)} took part in the slow operations of {links[link]} looks, the others of"
    votes += f" {least} at most" + (": any of them may be slow." if is_open else ".")
    found = _slow([replace(one, rank=rank) for one in causes if rank in one.ends], SLOW_LINK, len(looks))
    # what else is known from one look is about the rank that was named there
    evidence = (*found.evidence[:2], votes, *round_trips)
    return replace(found, ends=tuple(alike) if is_open else found.ends, evidence=evidence)


def _farthest(look: Look, ranks: Collection[int]) -> tuple[int | None, tuple[str, ...]]:
    """Return, of several ranks, the one to whose host packets take much longer than to the others, and a sentence that
    says so; None if there is none."""
    known = {rank: said.round_trip_s for rank in ranks if (said := look.ranks.get(rank)) and said.round_trip_s}
    if len(known) < 2 or len(known) < len(ranks):
        return None, ()
    *_, second, first = sorted(known, key=lambda rank: known[rank])
    if known[first] < _FAR * known[second]:
        return None, ()
    who, other = Who(look).one(first), Who(look).one(second)
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
    why = f"In {len(causes)} of {number} looks the others waited for it, and the run moved on in between."
    return replace(one, kind=kind, where=where, evidence=(why, *one.evidence), delayed=delayed)
