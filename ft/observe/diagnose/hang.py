"""Turn the diagnosis of a hang into text and JSON values, for ``ft diagnose hang``."""

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from ft.faults.hang.causes import Cause, Diagnosis
from ft.faults.hang.look import Look, Thread
from ft.show.text import spans, table

_MOST_FRAMES = 12


def as_values(look: Look, found: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as JSON values.

    Returns:
        ``causes``, the most certain first, each with ``rank`` (logical), ``worker``, ``node``, ``kind``, ``group``,
        ``operation``, ``sequence``, ``where``, ``evidence`` and ``delayed`` (the ranks that wait for it, directly or
        not); ``waiting``, each with ``rank``, ``on``, ``group``, ``operation``, ``sequence`` and ``why``; ``threads``:
        the stacks of the ranks at fault.
    """
    causes = [_cause(look, cause) for cause in found.causes]
    waiting = [
        {
            "rank": edge.rank,
            "on": edge.on,
            "group": edge.operation.group,
            "operation": edge.operation.name,
            "sequence": edge.operation.sequence,
            "why": edge.why,
        }
        for edge in found.waiting
    ]
    threads = {
        str(cause.rank): [
            {"name": thread.name, "frames": list(thread.frames), "kernel": thread.kernel} for thread in said.threads
        ]
        for cause in found.causes
        if (said := look.ranks.get(cause.rank)) is not None
    }
    return {"wall": look.wall, "why": look.why, "causes": causes, "waiting": waiting, "threads": threads}


def _cause(look: Look, cause: Cause) -> dict[str, Any]:
    said = look.ranks.get(cause.rank)
    return {
        "rank": cause.rank,
        "worker": said.worker if said is not None else "",
        "node": said.node if said is not None else "",
        "kind": cause.kind,
        "group": cause.group,
        "operation": cause.operation,
        "sequence": cause.sequence,
        "where": cause.where,
        "evidence": list(cause.evidence),
        "delayed": list(cause.delayed),
    }


def as_text(look: Look, found: Diagnosis) -> str:
    """Return the diagnosis as text: the causes with their evidence and stacks, then who waits for whom."""
    lines = []
    if look.wall:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(look.wall))
        lines.append(f"look at {len(look.ranks)} ranks, {at}{f': {look.why}' if look.why else ''}")
    if not found.causes:
        lines.append("no rank is at fault: " + ("nobody waits" if not found.waiting else "the cause is not known"))
    for number, cause in enumerate(found.causes, 1):
        lines += ["", *_text_of(look, number, cause)]
    if found.waiting:
        lines += ["", *chain(found)]
    return "\n".join(lines).lstrip("\n")


def _text_of(look: Look, number: int, cause: Cause) -> list[str]:
    said = look.ranks.get(cause.rank)
    who = f"rank {cause.rank}" + (f" ({said.worker} on {said.node})" if said is not None and said.worker else "")
    lines = [f"cause {number}: {cause.kind}: {who}"]
    lines += [f"  it is    {cause.where}"]
    lines += [f"  because  {sentence}" for sentence in cause.evidence]
    lines.append(f"  delayed  {shown(cause.delayed)}")
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


def chain(found: Diagnosis) -> list[str]:
    """Return a table of who waits for whom; ranks that wait in the same operation for the same ranks are one row."""
    grouped: dict[tuple, set[int]] = defaultdict(set)
    of: dict[tuple, set[int]] = defaultdict(set)
    for edge in found.waiting:
        of[(edge.rank, str(edge.operation), edge.why)].add(edge.on)
    for (rank, operation, why), on in of.items():
        grouped[(operation, why, tuple(sorted(on)))].add(rank)
    rows = [
        (shown(ranks), operation, shown(on), why)
        for (operation, why, on), ranks in sorted(grouped.items(), key=lambda item: min(item[1]))
    ]
    return table(("ranks", "wait in", "for", "which"), rows).splitlines()


def shown(ranks: Iterable[int]) -> str:
    """Return ranks as text, "nobody" if there are none."""
    return spans(ranks) or "nobody"
