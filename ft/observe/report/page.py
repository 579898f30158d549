"""Build ``report.html``, a self-contained page about one run, from panels.

A panel is a section of the page. Each is a function of the run's record; it returns None where the run has nothing to
show in it. The key figures and the tables are those of the terminal.
"""

import base64
import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from markupsafe import Markup

from ft.base import events
from ft.base.errors import UserError
from ft.base.events import Event
from ft.faults.hang.causes import over_time
from ft.observe.diagnose.hang import as_text
from ft.observe.diagnose.hang_picture import png
from ft.observe.report import ranks, text
from ft.observe.report.record import Record, Replica
from ft.observe.report.status import health, lost_nodes, lost_sentence
from ft.record import inspections, metrics
from ft.record.block import describe, what_differs
from ft.record.recoveries import Recovery
from ft.record.run import EVENTS
from ft.show.html import html, joined
from ft.show.text import percent, seconds, shortened

_MOST_EVENTS, _MOST_HANGS, _MOST_ROWS, _MOST_BLOCKS = 5000, 5, 1000, 200


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
    panels = [*_tables(record), _hangs(record), _timeline(timeline, record), _goodput(record), _rank_times(record)]
    panels += [_run(record), _events(record)]
    name = record.folder.resolve().name
    figures = [*text.facts(record), *(("", problem) for problem in text.problems(record) if record.has_quorum)]
    shown = [panel for panel in panels if panel is not None]
    return html("document", name, _subtitle(record), html("facts", figures), shown)


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


def _tables(record: Record) -> Iterator[Panel]:
    """Yield a panel for each table of the report; each recovery has its block of the terminal besides."""
    if not record.has_quorum and not record.recoveries:
        yield Panel("Recoveries", html("p", "Nothing interrupted this run."))
    for one in text.tables(record):
        parts = [html("wide", html("table", one.head, one.rows[:_MOST_ROWS]))]
        left = len(one.rows) - _MOST_ROWS
        parts += [html("p", f"{left} more are in events.jsonl.")] if left > 0 else []
        parts += [html("small", one.note)] if one.note else []
        if one.title == text.RECOVERIES:
            blocks = (_recovery(record, *found) for found in record.recoveries[-_MOST_BLOCKS:])
            parts += [html("details", "each recovery", joined(*blocks))]
        yield Panel(one.title, joined(*parts))


def _recovery(record: Record, replica: int, recovery: Recovery) -> Markup:
    injected = ", ".join(_injected(event) for event in recovery.injected)
    told = [f"replica {replica}"] if record.has_quorum else []
    told += [f"injected: {injected}"] if injected else []
    told += [differs] if (differs := what_differs(recovery)) else []
    return joined(html("pre", describe(recovery)), *(html("p", one) for one in told))


def _injected(event: Event) -> str:
    where = event.detail.get("where") or event.detail.get("phase")
    inside = f" ({where})" if where else ""
    return f"{event.detail.get('kind', 'fault')}{inside}"


def _hangs(record: Record) -> Panel | None:
    """Return the newest stack dumps in which a rank was at fault, with a picture of who waits for whom.

    Of a run of replicas, those of the same moment are one.
    """
    parts: list[Markup] = []
    hosts = events.hosts(events.read(record.folder / EVENTS))
    for number, read in reversed(inspections.stored(record.folder).items()):
        if len(parts) == _MOST_HANGS:
            break
        try:
            seen = replace(read(), hosts=hosts)
        except UserError as error:
            parts.append(html("p", error))
            continue
        found = over_time([seen])
        if found.causes:
            drawn = _picture(png(seen, found), "who waits for whom, back to the ranks at fault")
            parts.append(joined(drawn, html("details", f"inspection {number}", html("pre", as_text(seen, found)))))
    return Panel("Hangs", joined(*parts)) if parts else None


def _picture(content: bytes, alt: str) -> Markup:
    return html("picture", base64.b64encode(content).decode(), alt)


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


def _rank_times(record: Record) -> Panel | None:
    """Return the parts of the steps of each rank, None where no worker has reported them."""
    parts: list[Markup] = []
    for number, replica in record.replicas.items():
        if spans := metrics.read(replica.folder):
            slow = ranks.slow_rows(replica.events)
            named = html("p", "No rank was persistently slower than others.")
            parts += [html("strong", f"Replica {number}")] if record.has_quorum else []
            parts += [html("table", ranks.SLOW_HEAD, slow) if slow else named, ranks.panel(spans)]
    return Panel("Ranks: own work and waiting", joined(*parts)) if parts else None


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
