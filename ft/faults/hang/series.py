"""The cause over several looks: whether a run hangs or is slow, and who slows it down.

In a run that moves, somebody computes and others wait at any moment, so a single look names whoever happens to compute.
Over several looks, a slow rank is the one that most of the waiting is for, and a slow connection is the one whose
operations everybody has started in most looks.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ft.faults.hang.causes import BUSY, SLOW_LINK, SLOW_RANK, Cause, Diagnosis, diagnose
from ft.faults.hang.look import Look

_SHARE = 0.5
"""Share of the looks in which a slow rank is the one that others wait for."""
_LEAD = 1.5
"""Factor by which its number of looks exceeds that of any other rank."""


def over_time(looks: Sequence[Look]) -> Diagnosis:
    """Return the causes over several looks, in the order in which they were taken; a single one is allowed."""
    if len(looks) == 1 or not moves(looks[0], looks[-1]):
        return diagnose(looks[-1])
    found = [diagnose(look) for look in looks]
    ranks, links, of_rank, of_link = Counter[int](), Counter[int](), defaultdict(list), defaultdict(list)
    for diagnosis in found:
        for cause in diagnosis.causes:
            if cause.kind == SLOW_LINK:
                for rank in cause.ends:
                    links[rank] += 1
                    of_link[rank].append(replace(cause, rank=rank))
            elif cause.kind == BUSY:
                ranks[cause.rank] += 1
                of_rank[cause.rank].append(cause)
    slow = _outstanding(ranks, _SHARE * len(looks), _LEAD)
    if slow is not None:
        return Diagnosis((_slow(of_rank[slow], SLOW_RANK, len(looks)),), found[-1].waiting)
    link = _outstanding(links, _SHARE * len(looks), 1.0)
    if link is not None:
        cause = _slow(of_link[link], SLOW_LINK, len(looks))
        alike = sorted(rank for rank, votes in links.items() if votes == links[link])
        if len(alike) > 1:
            why = f"Ranks {', '.join(map(str, alike))} take part in all of these operations alike: one of them it is."
            cause = replace(cause, ends=tuple(alike), evidence=(*cause.evidence, why))
        return Diagnosis((cause,), found[-1].waiting)
    return Diagnosis((), found[-1].waiting)


def moves(before: Look, after: Look) -> bool:
    """Return whether any rank has made progress between two looks."""
    return any(
        said.answers and earlier.answers and (said.step, said.counts) != (earlier.step, earlier.counts)
        for rank, said in after.ranks.items()
        if (earlier := before.ranks.get(rank)) is not None
    )


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
    delayed = tuple(sorted({rank for cause in causes for rank in cause.delayed}))
    why = f"In {len(causes)} of {number} looks the others waited for it, and the run moved on in between."
    return replace(one, kind=kind, where=where, evidence=(why, *one.evidence), delayed=delayed)
