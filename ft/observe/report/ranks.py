"""Stragglers in reports: ranks whose own work took persistently longer than that of others with the same work.

The parts are a table from the events of a run, a heat map of ranks and time, and a table of each rank's
parts of a step. A cell of the map compares the own work of one rank in one span of the run with that of the other ranks
with the same work. The time in which a rank waits for others is no work of its own, so a straggler's row is dark and
the rows of those that wait for it are not.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from ft.base import events
from ft.base.events import Event
from ft.base.step_clock import OWN
from ft.faults.verdict import STRAGGLER
from ft.observe.report.status import times
from ft.record.metrics import Span
from ft.show import palette
from ft.show.html import NOTHING, html, joined
from ft.show.text import percent

_WIDTH, _LEFT, _TOP, _BOTTOM = 1180, 70, 8, 34
_MOST_COLUMNS, _MOST_ROWS = 120, 64
_DARKEST = 1.5
"""Ratio of a rank's own work to that of the others from which on a cell has the darkest colour."""
_MARKED = 1.03
_WAIT_NAMES = 2
SLOW_HEAD = ("rank", "worker", "found after step", "own work in a step", "the others", "mostly", "then")


def slow_rows(history: Sequence[Event]) -> list[tuple[str, ...]]:
    """Return a row with the columns of ``SLOW_HEAD`` for each straggler that was found."""
    hosts = events.hosts(history)
    return [
        (
            str(event.rank),
            f"{event.worker} on {events.named(event.node, hosts)}",
            str(event.step),
            f"{_ms(event.detail.get('own_s'))} ({times(event.detail.get('ratio'))})",
            _ms(event.detail.get("usual_s")),
            str(event.detail.get("cause")),
            _then(event, history[at + 1 :]),
        )
        for at, event in enumerate(history)
        if event.name == events.STRAGGLER_FOUND
    ]


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


def panel(spans: Sequence[Span]) -> Markup:
    """Return the map and the table as HTML.

    Args:
        spans: the times of the run in order; at least one.
    """
    ratios = list(map(_ratios, spans))
    shown, left_out = _rows(ratios)
    legend = ((1.0, "as fast as the others"), (1.1, "1.1 times as long"), (1.5, "1.5 times or more"))
    return joined(
        html("p", "Own work of each rank in a step, compared with that of the ranks with the same work:"),
        html("key", [(_colour(ratio), text) for ratio, text in legend]),
        _map(spans, ratios, shown),
        html("p", f"{left_out} more ranks, none of them slower than those shown.") if left_out else NOTHING,
        html("p", "Time of a step on average over the run, in milliseconds:"),
        html("table", *_table(spans, shown)),
    )


def _ratios(span: Span) -> dict[int, float]:
    """Return logical rank -> time of its own work divided by the median time of the others."""
    found = {}
    times: dict[str, dict[int, float]] = defaultdict(dict)
    for rank, role, own in zip(span.ranks, span.roles, span.own_ms, strict=True):
        if own is not None:
            times[role][rank] = own
    for of_role in times.values():
        for rank, own in of_role.items():
            others = [other for each, other in of_role.items() if each != rank]
            usual = statistics.median(others) if others else own
            found[rank] = own / usual if usual > 0.0 else 1.0
    return found


def _rows(ratios: Sequence[dict[int, float]]) -> tuple[list[int], int]:
    """Return (the ranks to show, how many are left out). The slowest are shown."""
    slowest: dict[int, float] = defaultdict(float)
    for of_span in ratios:
        for rank, ratio in of_span.items():
            slowest[rank] = max(slowest[rank], ratio)
    shown = sorted(slowest, key=lambda rank: -slowest[rank])[:_MOST_ROWS]
    return sorted(shown), len(slowest) - len(shown)


def _map(spans: Sequence[Span], ratios: Sequence[dict[int, float]], ranks: Sequence[int]) -> Markup:
    """Return the map as SVG. Spans next to each other share a column if there are too many."""
    together = -(-len(spans) // _MOST_COLUMNS)
    groups = [range(at, min(at + together, len(spans))) for at in range(0, len(spans), together)]
    height = max(8, min(22, 420 // max(1, len(ranks))))
    width, bottom = (_WIDTH - _LEFT - 10) / len(groups), _TOP + height * len(ranks)
    cells, labels = [], []
    for row, rank in enumerate(ranks):
        y = _TOP + row * height
        if height >= 11 or row % 2 == 0:
            labels.append((_LEFT - 8, y + height / 2 + 4, f"rank {rank}", "end"))
        for column, group in enumerate(groups):
            known = [ratios[at][rank] for at in group if rank in ratios[at]]
            if known:
                title = _title(spans[group[0]], spans[group[-1]], rank, max(known))
                cells.append((_LEFT + column * width, y, width, height - 1, _colour(max(known)), title))
    for column in range(0, len(groups), max(1, len(groups) // 10)):
        labels.append((_LEFT + column * width, bottom + 16, str(spans[groups[column][0]].first), "start"))
    labels.append(((_LEFT + _WIDTH) / 2, bottom + 30, "step", "middle"))
    title = f"own work of {len(ranks)} ranks from step {spans[0].first} to {spans[-1].last}"
    return html("heat_map", _WIDTH, bottom + _BOTTOM, cells, labels, title, palette.QUIET)


def _title(first: Span, last: Span, rank: int, ratio: float) -> str:
    words = [f"rank {rank}, steps {first.first} to {last.last}: {ratio:.2f} times the others' work"]
    if rank in last.ranks:
        at = last.ranks.index(rank)
        words += [f"{part} {values[at]:.1f} ms" for part, values in last.parts.items() if values[at]]
        waited = sorted(((values[at] or 0.0, name) for name, values in last.waits.items()), reverse=True)
        words += [f"waits for {name} {ms:.1f} ms" for ms, name in waited[:_WAIT_NAMES] if ms]
    return "; ".join(words)


def _table(spans: Sequence[Span], ranks: Sequence[int]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return (names of the columns, a row for each rank)."""
    parts = [part for part in OWN if any(part in span.parts for span in spans)]
    rows = []
    for rank in ranks:
        sums: dict[str, float] = defaultdict(float)
        waits: dict[str, float] = defaultdict(float)
        steps = 0
        for span in spans:
            if rank in span.ranks:
                at = span.ranks.index(rank)
                count = span.steps[at]
                steps += count
                sums["step"] += count * (span.step_ms[at] or 0.0)
                for part in parts:
                    sums[part] += count * (span.parts.get(part, [None] * len(span.ranks))[at] or 0.0)
                for name, values in span.waits.items():
                    waits[name] += count * (values[at] or 0.0)
        longest = sorted(waits.items(), key=lambda item: -item[1])[:_WAIT_NAMES]
        in_groups = ", ".join(f"{name} {ms / steps:.1f}" for name, ms in longest if ms)
        share = sum(waits.values()) / sums["step"] if sums["step"] else 0.0
        means = [f"{sums[name] / steps:.1f}" for name in ("step", *parts)]
        rows.append((str(rank), *means, f"{sum(waits.values()) / steps:.1f} ({percent(share)})", in_groups))
    return ("rank", "step", *parts, "waits", "mostly for"), rows


def _colour(ratio: float) -> str:
    """Return white for a rank that is as fast as the others, and a darker red the slower it is."""
    if ratio < _MARKED:
        return palette.FAINT
    share = min(1.0, 0.15 + 0.85 * (ratio - _MARKED) / (_DARKEST - _MARKED))
    light, dark = (bytes.fromhex(colour.removeprefix("#")) for colour in (palette.PAPER, palette.FAULT))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(light, dark, strict=True))
