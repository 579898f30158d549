"""Build ``report.html``, a self-contained page about one run, from panels.

A panel is a section of the page. Each is a function of the run's record; it returns None where the run has nothing to
show in it. Panels about one replica are repeated for each replica of a run of several.
"""

import base64
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from markupsafe import Markup

from ft.base import events
from ft.base.errors import UserError
from ft.base.events import Event
from ft.faults.hang.series import over_time
from ft.observe.diagnose.hang import as_text
from ft.observe.diagnose.hang_picture import png
from ft.observe.report import protections, ranks, text
from ft.observe.report.record import Record, Replica
from ft.observe.report.status import health, lost_nodes, lost_sentence
from ft.record import looks, metrics
from ft.record.block import seat_changes, what_differs, what_failed
from ft.record.recoveries import Recovery
from ft.record.run import EVENTS
from ft.show import palette
from ft.show.html import html, joined
from ft.show.text import count, percent, seconds, shortened

_MOST_EVENTS, _MOST_HANGS, _MOST_MISMATCHES = 5000, 5, 200


@dataclass(frozen=True)
class Panel:
    """A section of the page."""

    title: str
    content: Markup


def page(record: Record, timeline: bytes) -> str:
    """Return the report as HTML text.

    Args:
        timeline: the picture of ``ft.observe.report.timeline`` as PNG.
    """
    panels = [make(record) for make in (*_PANELS, partial(_timeline, timeline), *_PANELS_BELOW)]
    name = record.folder.resolve().name
    figures = [*text.facts(record), *(("", problem) for problem in text.problems(record) if record.has_quorum)]
    return html(
        "document", name, _subtitle(record), html("facts", figures), [panel for panel in panels if panel is not None]
    )


def _subtitle(record: Record) -> str:
    parts = [record.state, *([f"{record.count} replicas"] if record.has_quorum else [])]
    history = record.history
    if record.has_quorum and record.zero:
        parts.append(_date(record.zero))
    elif history:
        parts.append(_date(history[0][1].wall))
        parts.append(f"{seconds(history[-1][1].wall - history[0][1].wall)} from the first event to the last")
    return ", ".join(parts)


def _date(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))


def _recoveries(record: Record) -> Panel | None:
    if not record.recoveries:
        return None if record.has_quorum else Panel("Recoveries", html("p", "Nothing interrupted this run."))
    found = [recovery for _, recovery in record.recoveries]
    head = ("#", "what happened", "outcome", "step", "groups", "phases", "total")
    rows = [_recovery_row(r) for r in found]
    if record.has_quorum:
        head = ("replica", *head)
        rows = [(str(number), *row) for (number, _), row in zip(record.recoveries, rows, strict=True)]
    parts = [html("wide", html("table", head, rows, "recoveries"))]
    if not record.has_quorum:
        times = record.only.goodput
        parts.append(html("p", f"Lost to recoveries: {seconds(times.recovering)} of {seconds(times.wall)}."))
    return Panel("Recoveries", joined(*parts))


def _recovery_row(recovery: Recovery) -> Sequence[str]:
    injected = "; ".join(_injected(event) for event in recovery.injected)
    verdict = " - ".join(part for part in (recovery.category, recovery.reason) if part)
    story = [f"injected: {injected}" if injected else "", verdict, seat_changes(recovery), what_differs(recovery)]
    redone = "" if recovery.steps_redone is None else f"{recovery.steps_redone} redone"
    attempts = f"{recovery.attempts} epochs" if recovery.attempts > 1 else ""
    return (
        str(recovery.number),
        html("story", what_failed(recovery), [line for line in story if line]),
        html("tag", palette.OUTCOME[recovery.outcome], recovery.outcome, attempts),
        html("noted", "-" if recovery.step is None else recovery.step, redone),
        "-" if recovery.groups is None else f"{recovery.rebuilt} of {recovery.groups}",
        ", ".join(f"{name} {seconds(took)}" for name, took in recovery.phases.items()) or "-",
        seconds(recovery.total),
    )


def _injected(event: Event) -> str:
    where = event.detail.get("where") or event.detail.get("phase")
    inside = f" ({where})" if where else ""
    return f"{event.detail.get('kind', 'fault')}{inside}"


def _incidents(record: Record) -> Panel | None:
    if not record.has_quorum:
        return None
    note = (
        "Stall: duration of the steps of the incident in excess of the median of normal steps around it. Away: time "
        "from the replica's last step before the incident to the beginning of its first step after it."
    )
    parts = [html("p", "All replicas were in every step.")]
    if record.incidents:
        parts = [html("wide", html("table", text.INCIDENT_HEAD, text.incident_rows(record))), html("small", note)]
    return Panel("Failures and rejoins", joined(*parts))


def _replicas(record: Record) -> Panel | None:
    if not record.has_quorum:
        return None
    return Panel("Replicas", html("wide", html("table", text.REPLICA_HEAD, text.replica_rows(record))))


def _of_each(title: str, make: Callable[[Replica], Markup | None], record: Record) -> Panel | None:
    """Return a panel with a part for each replica for which ``make`` returns one; None if it returns none."""
    made = [(number, part) for number, one in record.replicas.items() if (part := make(one)) is not None]
    if record.has_quorum:
        made = [(number, joined(html("strong", f"Replica {number}"), part)) for number, part in made]
    return Panel(title, joined(*(part for _, part in made))) if made else None


def _corruption_of(replica: Replica) -> Markup | None:
    """Return how operators were verified, and a table of the first mismatches."""
    found = replica.corruption
    if found is None:
        return None
    of = f"operators of a step, {count(found.ranks, 'rank')} together"
    lines = [f"{found.strategy}; {of}: {protections.coverage(found)}."]
    if not found.covered:
        lines = ["How operators were verified is not on record."]
    lines += [f"The {protections.fall_text(fall)}." for fall in found.falls]
    if not found.mismatches:
        lines.append("Both executions of every operator gave the same result.")
        return joined(*(html("p", line) for line in lines))
    parts = [html("wide", html("table", protections.HEAD, found.rows[:_MOST_MISMATCHES]))]
    left = len(found.rows) - _MOST_MISMATCHES
    parts += [html("p", f"{left} more mismatches are in events.jsonl.")] if left > 0 else []
    return joined(*(html("p", line) for line in lines), *parts)


def _actions_of(replica: Replica) -> Markup | None:
    acted = protections.action_rows(replica)
    return html("table", protections.ACTION_HEAD, acted) if acted else None


def _hangs(record: Record) -> Panel | None:
    """Return the newest stack dumps in which a rank was at fault, with a picture of who waits for whom.

    Of a run of replicas, those of the same moment are one.
    """
    parts: list[Markup] = []
    hosts = events.hosts(events.read(record.folder / EVENTS))
    for number, read in reversed(looks.stored(record.folder).items()):
        if len(parts) == _MOST_HANGS:
            break
        try:
            look = replace(read(), hosts=hosts)
        except UserError as error:
            parts.append(html("p", error))
            continue
        found = over_time([look])
        if found.causes:
            drawn = _picture(png(look, found), "who waits for whom, back to the ranks at fault")
            parts.append(joined(drawn, html("details", f"look {number}", html("pre", as_text(look, found)))))
    return Panel("Hangs", joined(*parts)) if parts else None


def _picture(content: bytes, alt: str) -> Markup:
    return html("picture", base64.b64encode(content).decode(), alt)


def _rebuilds_of(replica: Replica) -> Markup | None:
    made = protections.rebuild_rows(replica)
    return html("table", protections.REBUILD_HEAD, made) if made else None


def _superseded(record: Record) -> Panel | None:
    if not record.has_quorum:
        return None
    lines = text.superseded(record)
    content = html("bullets", lines) if lines else html("p", "Every committed step is in the surviving state.")
    return Panel("Steps that did not survive", content)


def _timeline(content: bytes, record: Record) -> Panel:
    alt = "which worker held which logical rank when, phases of the recoveries, loss"
    return Panel("Timeline", _picture(content, "replicas over time, time of steps, loss" if record.has_quorum else alt))


def _goodput(record: Record) -> Panel | None:
    if record.has_quorum:
        return None
    times = record.only.goodput
    rows = [
        ("steps that counted", times.productive),
        ("recoveries", times.recovering),
        ("the rest: repeated steps, evaluations, saves, waiting", times.other),
    ]
    whole = times.wall
    body = [(name, seconds(took), percent(min(1.0, took / whole)) if whole > 0 else "-") for name, took in rows]
    body.append(("from the first epoch to the end", seconds(times.wall), ""))
    body.append(("before that: processes, imports, assembly", seconds(times.startup), ""))
    return Panel("Where the time went", html("table", ("", "time", "share"), body))


def _step_times_of(replica: Replica) -> Markup | None:
    """Return the parts of the steps of each rank, None where no worker has reported them."""
    spans, slow = metrics.read(replica.folder), ranks.slow_rows(replica.events)
    if not spans:
        return None
    named = html("p", "No rank was persistently slower than others.")
    return joined(html("table", ranks.SLOW_HEAD, slow) if slow else named, ranks.panel(spans))


def _run(record: Record) -> Panel:
    started = [event for _, event in record.history if event.name == events.RUN_STARTED]
    rows = [("folder", str(record.folder)), ("state", record.state)]
    for key, value in (started[0].detail if started else {}).items():
        if key == "command" and isinstance(value, list):
            value = shlex.join(str(word) for word in value)
        if isinstance(value, dict):
            rows += [(f"{key}: {name}", str(each)) for name, each in value.items()]
        else:
            rows.append((key.replace("_", " "), str(value)))
    for number, replica in record.replicas.items():
        of = f"replica {number}: " if record.has_quorum else ""
        rows += [(f"{of}{name}", value) for name, value in _run_facts(replica)]
    return Panel("Run", html("facts", rows))


def _run_facts(replica: Replica) -> Iterator[tuple[str, str]]:
    yield "decisions in the journal", str(replica.decisions)
    hosts = events.hosts(replica.events)
    yield from ((f"node {node}", host) for node, host in hosts.items())
    end = replica.events[-1].wall if replica.events else 0.0
    yield from (("lost", lost_sentence({**lost, "lost_s_ago": None}, hosts)) for lost in lost_nodes(replica, end))
    for event in replica.events:
        if event.name == events.DEVICE_UNUSABLE:
            which, reason = event.detail.get("device", "?"), event.detail.get("reason", "unknown")
            yield f"device {which} of {events.named(event.node, hosts)}", f"not used any more: {reason}"
    yield from (("health", said) for said in health(replica))


def _events(record: Record) -> Panel:
    history = record.history
    if not history:
        return Panel("Events", html("p", "No events."))
    hosts = {number: events.hosts(one.events) for number, one in record.replicas.items()}
    rows = []
    for replica, event in history[:_MOST_EVENTS]:
        names = ("node", "worker", "rank", "epoch", "step")
        places = {name: value for name in names if (value := getattr(event, name)) is not None}
        if event.node is not None:
            places["node"] = events.named(event.node, hosts.get(replica, {}))
        about = ", ".join(f"{name} {value}" for name, value in places.items())
        detail = shortened(json.dumps(event.detail, ensure_ascii=False), 400) if event.detail else ""
        by = ["quorum server" if replica is None else f"replica {replica}"] if record.has_quorum else []
        rows.append((f"{event.wall - record.zero:+.3f} s", *by, event.name, about, detail))
    since = ("since the beginning", "by") if record.has_quorum else ("since the first epoch",)
    content = html("wide", html("table", (*since, "event", "about", "detail"), rows), "events")
    left = len(history) - len(rows)
    files = "the files events.jsonl" if record.has_quorum else "events.jsonl"
    note = [html("p", f"{left} more events are in {files}.")] if left else []
    return Panel("Events", html("details", f"{len(history)} events", joined(content, *note)))


_PANELS: tuple[Callable[[Record], Panel | None], ...] = (
    _recoveries,
    _incidents,
    _replicas,
    partial(_of_each, "Operators executed twice (DMR)", _corruption_of),
    partial(_of_each, "Other protections", _actions_of),
    _hangs,
    partial(_of_each, "Stages rebuilt from their neighbours (CheckFree)", _rebuilds_of),
    _superseded,
)
_PANELS_BELOW: tuple[Callable[[Record], Panel | None], ...] = (
    _goodput,
    partial(_of_each, "Ranks: own work and waiting", _step_times_of),
    _run,
    _events,
)
