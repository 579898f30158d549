"""Turn the diagnosis of a hang into text and JSON values, for ``ft diagnose hang``."""

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from ft.base.events import named
from ft.faults.hang.causes import Cause, Diagnosis
from ft.faults.hang.format import THE_SERVER, Who, is_in_own_wait
from ft.faults.hang.graph import ELSEWHERE
from ft.faults.hang.inspection import FETCH, SERVER, Inspection, Thread
from ft.show.text import count, spans, table

_MOST_FRAMES = 12


def as_values(seen: Inspection, found: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as JSON values.

    Returns:
        ``causes``, the most certain first, each with ``rank`` (logical), ``worker``, ``node``, ``host``, ``kind``,
        ``group``, ``operation``, ``sequence``, ``where``, ``evidence``, ``together`` (all ranks at fault, if a whole
        node or replica is) and ``delayed`` (the ranks that wait for it, directly or not); ``further``: the number of
        causes that are left out, because there are very many; ``waiting``: who waits for whom, each with ``ranks``,
        ``on`` (each of the ranks waits for all of these but itself), ``group``, ``operation``, ``sequence`` and
        ``why``; ``threads``: the stacks of the ranks at fault. Of a run of replicas, causes also have ``replica``; the
        lists of ranks have objects with ``replica`` and ``rank``; ``moving`` lists the replicas that train on; and the
        keys of ``threads`` are "replica/rank". The quorum server has neither replica nor rank.
    """
    causes = [_cause(seen, cause) for cause in found.causes]
    waiting = [
        {
            "ranks": _ranks(seen, wait.ranks),
            "on": _ranks(seen, wait.on),
            "group": wait.operation.group,
            "operation": wait.operation.name,
            "sequence": wait.operation.sequence,
            "why": wait.why,
        }
        for wait in found.waiting
    ]
    threads = {
        _key(seen, cause.rank): [
            {"name": thread.name, "frames": list(thread.frames), "kernel": thread.kernel} for thread in said.threads
        ]
        for cause in found.causes
        if (said := seen.ranks.get(cause.rank)) is not None
    }
    values = {"wall": seen.wall, "why": seen.why, "causes": causes, "further": found.further}
    values |= {"waiting": waiting, "threads": threads}
    return values if not seen.places else {**values, "moving": list(found.moving)}


def _place(seen: Inspection, rank: int) -> dict[str, int | None]:
    """Return a rank as JSON values."""
    if not seen.places:
        return {"rank": rank}
    place = seen.places.get(rank)
    return {"replica": None, "rank": None} if place is None else {"replica": place.replica, "rank": place.rank}


def _key(seen: Inspection, rank: int) -> str:
    place = seen.places.get(rank)
    if place is not None:
        return f"{place.replica}/{place.rank}"
    return THE_SERVER if rank == SERVER else str(rank)


def _cause(seen: Inspection, cause: Cause) -> dict[str, Any]:
    said = seen.ranks.get(cause.rank)
    return {
        **_place(seen, cause.rank),
        "worker": said.worker if said is not None else "",
        "node": said.node if said is not None else "",
        "host": seen.hosts.get(said.node, "") if said is not None else "",
        "kind": cause.kind,
        "group": cause.group,
        "operation": cause.operation,
        "sequence": cause.sequence,
        "where": cause.where,
        "evidence": list(cause.evidence),
        "together": _ranks(seen, cause.together),
        "delayed": _ranks(seen, cause.delayed),
    }


def _ranks(seen: Inspection, ranks: Iterable[int]) -> list:
    return [_place(seen, rank) for rank in ranks] if seen.places else list(ranks)


def as_text(seen: Inspection, found: Diagnosis) -> str:
    """Return the diagnosis as text: the causes with their evidence and stacks, then who waits for whom."""
    lines = []
    if seen.wall:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.wall))
        lines.append(f"inspection of {_what(seen)}, {at}{f': {seen.why}' if seen.why else ''}")
    elif seen.why:
        lines.append(seen.why)
    if not found.causes:
        lines.append(f"no rank is at fault: {_moving(found) or _why_none(seen, found)}")
    elif found.moving and set(found.moving) < {one.replica for rank in seen.ranks if (one := seen.places.get(rank))}:
        lines.append(_moving(found))
    for number, cause in enumerate(found.causes, 1):
        lines += ["", *_text_of(seen, number, cause)]
    lines += ["", f"and {count(found.further, 'further cause')}"] if found.further else []
    if found.waiting:
        lines += ["", *chain(seen, found)]
    return "\n".join(lines).lstrip("\n")


def _what(seen: Inspection) -> str:
    ranks = [rank for rank in seen.ranks if rank != SERVER]
    if not seen.places or seen.home is not None:
        return f"{len(ranks)} ranks"
    replicas = {seen.places[rank].replica for rank in ranks}
    return f"{len(ranks)} ranks of replica{'s' * (len(replicas) > 1)} {spans(replicas)}"


def _moving(found: Diagnosis) -> str:
    """Return which replicas train on, "" if none is known to."""
    if len(found.moving) == 1:
        return f"replica {found.moving[0]} trains on"
    return f"replicas {spans(found.moving)} train on" if found.moving else ""


def _why_none(seen: Inspection, found: Diagnosis) -> str:
    """Return why no rank is at fault."""
    if any(wait.why == ELSEWHERE for wait in found.waiting):
        return "it waits for other replicas; ask the whole run" if seen.home is not None else "it waits for a replica"
    fetches = [(rank, one.peer) for rank, said in seen.ranks.items() for one in said.pending if one.name == FETCH]
    if fetches:
        return f"{Who(seen).listed({rank if peer is None else peer for rank, peer in fetches})} fetch their state"
    for waited_for in sorted({rank for wait in found.waiting for rank in wait.on}):
        if waited_for in seen.ranks and is_in_own_wait(seen.ranks[waited_for]):
            return f"{Who(seen).one(waited_for)} waits for the control plane, or for the peers that take its snapshot"
    return "nobody waits" if not found.waiting else "the cause is not known"


def _text_of(seen: Inspection, number: int, cause: Cause) -> list[str]:
    said = seen.ranks.get(cause.rank)
    who = Who(seen).title(cause.guilty)
    if said is not None and said.worker:
        node = named(said.node, seen.hosts)
        who += f" ({node})" if cause.together else f" ({said.worker} on {node})"
    lines = [f"cause {number}: {cause.kind}: {who}"]
    lines += [f"  it is    {cause.where}"]
    lines += [f"  because  {sentence}" for sentence in cause.evidence]
    lines.append(f"  delayed  {Who(seen).listed(cause.delayed)}")
    thread = said.training if said is not None else None
    return lines + (_stack(thread) if thread is not None else [])


def _stack(thread: Thread) -> list[str]:
    if not thread.frames:
        return [f"  kernel   {thread.kernel}"] if thread.kernel else []
    more = len(thread.frames) - _MOST_FRAMES
    head = f"  stack    {thread.frames[0]}"
    return [head, *(f"           {frame}" for frame in thread.frames[1:_MOST_FRAMES])] + (
        [f"           and {more} calls further out"] if more > 0 else []
    )


def chain(seen: Inspection, found: Diagnosis) -> list[str]:
    """Return a table of who waits for whom; ranks that wait in the same operation for the same ranks are one row."""
    who = Who(seen)
    alike: dict[tuple[str, str, tuple[int, ...]], set[int]] = defaultdict(set)
    for wait in found.waiting:
        alike[who.operation(wait.operation), wait.why, wait.on].update(wait.ranks)
    rows = [
        (who.listed(ranks), operation, who.listed(on), why)
        for (operation, why, on), ranks in sorted(alike.items(), key=lambda item: min(item[1]))
    ]
    return table(("ranks", "wait in", "for", "which"), rows).splitlines()
