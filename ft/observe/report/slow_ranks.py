"""What the events of a run say of stragglers: ranks whose own work took persistently longer than that of others."""

from collections.abc import Sequence
from typing import Any

from ft.base import events
from ft.base.events import Event, named
from ft.base.events import hosts as hosts_of
from ft.faults.verdict import STRAGGLER

HEAD = ("rank", "worker", "found after step", "own work in a step", "the others", "mostly", "then")


def rows(history: Sequence[Event]) -> list[tuple[str, ...]]:
    """Return the rows of a table with one row for each straggler that was found."""
    hosts = hosts_of(history)
    return [
        (
            str(event.rank),
            f"{event.worker} on {named(event.node, hosts)}",
            str(event.step),
            f"{_ms(event.detail.get('own_s'))} ({_times(event.detail.get('ratio'))})",
            _ms(event.detail.get("usual_s")),
            str(event.detail.get("cause")),
            _then(event, history[at + 1 :]),
        )
        for at, event in enumerate(history)
        if event.name == events.STRAGGLER_FOUND
    ]


def sentences(stored: Any) -> list[str]:
    """Return a sentence for each straggler in the status file of a run, by logical rank."""
    if not isinstance(stored, dict):
        return []
    known = [(rank, slow) for rank, slow in stored.items() if isinstance(slow, dict) and rank.isdecimal()]
    return [
        f"rank {rank} ({slow.get('worker')}): its own work takes {_times(slow.get('ratio'))} as long as that of the "
        f"others, mostly {slow.get('cause')}, after step {slow.get('step')}"
        for rank, slow in sorted(known, key=lambda item: int(item[0]))
    ]


def _times(ratio: Any) -> str:
    return f"{ratio:.2f} times" if isinstance(ratio, int | float) else "an unknown number of times"


def _then(found: Event, later: Sequence[Event]) -> str:
    for event in later:
        if event.worker != found.worker:
            continue
        if event.name == events.STRAGGLER_GONE:
            return f"as fast as the others again after step {event.step}"
        if event.name == events.FAULT_DETECTED and event.detail.get("category") == STRAGGLER:
            return f"replaced after step {event.step}"
        if event.name == events.WORKER_LOST:
            return "lost for another reason"
    return "it kept its place"


def _ms(seconds: Any) -> str:
    return f"{1e3 * seconds:.1f} ms" if isinstance(seconds, int | float) else "-"
