"""Build ``report.html``, a self-contained page about one run: recoveries, goodput, loss, timeline, and all events."""

import json
import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from ft import faults
from ft.base import events
from ft.base.events import Event
from ft.observe.report import actions, hangs, heat_map, rebuilds, slow_ranks
from ft.observe.report.corruption import Corruption, corruption
from ft.observe.report.corruption_panel import card, panel
from ft.observe.report.goodput import Goodput
from ft.observe.report.lanes import origin
from ft.observe.report.loss_curve import loss_svg
from ft.observe.report.status import health, lost_nodes, lost_sentence, saves
from ft.record import step_times
from ft.record.block import seat_changes, what_differs, what_failed
from ft.record.recoveries import PHASES, Recovery
from ft.record.run import Run
from ft.show import palette
from ft.show.html import cards, document, header, picture, safe, section, table
from ft.show.text import percent, seconds, shortened

_MOST_EVENTS = 5000


def page(run: Run, found: Sequence[Recovery], times: Goodput, timeline: bytes) -> str:
    """Return the report as HTML text.

    Args:
        run: the run's folder as read.
        found: the recoveries of the run.
        times: where the run's time went.
        timeline: the picture of ``ft.observe.report.timeline`` as PNG.
    """
    name, checked, acted = run.folder.resolve().name, corruption(run.events), actions.actions(run)
    hung = hangs.panel(run.folder)
    sections = [
        header(name, _subtitle(run)),
        _headlines(run, found, times, checked),
        section("Recoveries", _recoveries(found, times)),
        *([] if checked is None else [section("Operators executed twice (DMR)", panel(checked))]),
        *([section("Other protections", table(actions.HEAD, actions.rows(acted)))] if acted else []),
        *([section("Hangs", hung)] if hung else []),
        section("Loss", loss_svg(run.metrics, found) + _rebuilds(run)),
        section(
            "Timeline", picture(timeline, "which worker held which logical rank when, phases of the recoveries, loss")
        ),
        section("Where the time went", _time_table(times)),
        *_step_times(run),
        section("Run", _run_table(run)),
        section("Events", _events(run.events)),
    ]
    return document(name, sections)


def _subtitle(run: Run) -> str:
    parts = [run.state]
    if run.events:
        parts.append(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.events[0].wall)))
        parts.append(f"{seconds(run.events[-1].wall - run.events[0].wall)} from the first event to the last")
    return ", ".join(parts)


def _headlines(run: Run, found: Sequence[Recovery], times: Goodput, checked: Corruption | None) -> str:
    totals = [r.total for r in found if r.is_over and r.total is not None]
    redone = [r.steps_redone for r in found if r.steps_redone is not None]
    injected = sum(event.name == events.FAULT_INJECTED for event in run.events)
    figures = [
        ("interruptions", str(len(found)), f"{injected} faults injected"),
        ("recovered", str(sum(r.is_over for r in found)), _outcomes(found)),
        ("goodput", percent(times.share), f"{times.steps} steps, {seconds(times.step)} each"),
        ("median recovery", seconds(statistics.median(totals)) if totals else "-", "from the fault to the next step"),
        ("steps redone", str(sum(redone)) if redone else "0", f"most at once: {max(redone, default=0)}"),
    ]
    return cards(figures if checked is None else [*figures, card(checked)])


def _outcomes(found: Sequence[Recovery]) -> str:
    names = dict.fromkeys(r.outcome for r in found)
    return ", ".join(f"{sum(r.outcome == name for r in found)} {name}" for name in names) or "nothing to recover from"


def _recoveries(found: Sequence[Recovery], times: Goodput) -> str:
    if not found:
        return "<p>Nothing interrupted this run.</p>"
    longest = max((sum(r.phases.values()) for r in found), default=0.0)
    used = [name for name in PHASES if any(name in r.phases for r in found)]
    key = "".join(f'<span><i style="background:{palette.PHASE[name]}"></i>{name}</span>' for name in used)
    rows = "".join(_recovery_row(r, longest) for r in found)
    columns = ("#", "what happened", "outcome", "step", "groups", "phases", "total")
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in columns)}</tr>"
    table = f'<div class="wide"><table class="recoveries"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    lost = f"<p>Lost to recoveries: {seconds(times.recovering)} of {seconds(times.wall)}.</p>"
    return f'<p class="key">{key}</p>{table}{lost}'


def _recovery_row(recovery: Recovery, longest: float) -> str:
    injected = "; ".join(_injected(event) for event in recovery.injected)
    story = [f"<b>{safe(what_failed(recovery))}</b>"]
    if injected:
        story.append(f"injected: {safe(injected)}")
    verdict = " - ".join(part for part in (recovery.category, recovery.reason) if part)
    story += [safe(text) for text in (verdict, seat_changes(recovery), what_differs(recovery)) if text]
    redone = "" if recovery.steps_redone is None else f"<br><small>{recovery.steps_redone} redone</small>"
    groups = "-" if recovery.groups is None else f"{recovery.rebuilt} of {recovery.groups}"
    attempts = f"<br><small>{recovery.attempts} epochs</small>" if recovery.attempts > 1 else ""
    colour = palette.OUTCOME[recovery.outcome]
    return (
        f"<tr><td>{recovery.number}</td><td>{'<br>'.join(story)}</td>"
        f'<td><span class="tag" style="background:{colour}">{safe(recovery.outcome)}</span>{attempts}</td>'
        f"<td>{'-' if recovery.step is None else recovery.step}{redone}</td><td>{safe(groups)}</td>"
        f"<td>{_phase_bar(recovery, longest)}</td><td>{safe(seconds(recovery.total))}</td></tr>"
    )


def _injected(event: Event) -> str:
    where = event.detail.get("where") or event.detail.get("phase")
    inside = f" ({where})" if where else ""
    return f"{event.detail.get('kind', 'fault')}{inside}"


def _phase_bar(recovery: Recovery, longest: float) -> str:
    """Return a bar whose length is relative to the longest recovery, and the phases as text."""
    if not recovery.phases or longest <= 0:
        return "-"
    parts = "".join(_phase_part(name, took, took / longest) for name, took in recovery.phases.items())
    words = ", ".join(f"{name} {seconds(took)}" for name, took in recovery.phases.items())
    return f'<div class="bar">{parts}</div><small>{safe(words)}</small>'


def _phase_part(name: str, took: float, share: float) -> str:
    style = f"width:{100 * share:.3f}%;background:{palette.PHASE[name]}"
    return f'<i title="{name} {seconds(took)}" style="{style}"></i>'


def _rebuilds(run: Run) -> str:
    """Return the table of rebuilt stages, or "" where no stage was rebuilt."""
    made = rebuilds.rebuilds(run)
    if not made:
        return ""
    title = "<p>Pipeline stages that were rebuilt from their neighbours (CheckFree), and the effect on the loss:</p>"
    return title + table(rebuilds.HEAD, rebuilds.rows(made))


def _time_table(times: Goodput) -> str:
    rows = [
        ("steps that counted", times.productive),
        ("recoveries", times.recovering),
        ("the rest: repeated steps, evaluations, saves, waiting", times.other),
    ]
    whole = times.wall
    body = [(name, seconds(took), percent(min(1.0, took / whole)) if whole > 0 else "-") for name, took in rows]
    body.append(("from the first epoch to the end", seconds(times.wall), ""))
    body.append(("before that: processes, imports, assembly", seconds(times.startup), ""))
    return table(("", "time", "share"), body)


def _step_times(run: Run) -> list[str]:
    """Return the section about the parts of the steps, none where no worker has reported them."""
    spans, slow = step_times.read(run.folder), slow_ranks.rows(run.events)
    if not spans:
        return []
    named = table(slow_ranks.HEAD, slow) if slow else "<p>No rank was persistently slower than others.</p>"
    return [section("Ranks: own work and waiting", named + heat_map.panel(spans))]


def _run_table(run: Run) -> str:
    started = run.first(events.RUN_STARTED)
    rows = [("folder", str(run.folder)), ("state", run.state)]
    for key, value in (started.detail if started is not None else {}).items():
        if key == "command" and isinstance(value, list):
            value = shlex.join(str(word) for word in value)
        if isinstance(value, dict):
            rows += [(f"{key}: {name}", str(each)) for name, each in value.items()]
        else:
            rows.append((key.replace("_", " "), str(value)))
    rows.append(("decisions in the journal", str(run.decisions)))
    hosts = events.hosts(run.events)
    rows += [(f"node {node}", host) for node, host in hosts.items()]
    end = run.events[-1].wall if run.events else 0.0
    rows += [("lost", lost_sentence(replace(lost, age=None), hosts)) for lost in lost_nodes(run, end)]
    for event in run.events:
        if event.name == events.DEVICE_UNUSABLE:
            which, reason = event.detail.get("device", "?"), event.detail.get("reason", "unknown")
            rows.append((f"device {which} of {events.named(event.node, hosts)}", f"not used any more: {reason}"))
    rows += [("saved", text) for text in saves(run.events)]
    missed = faults.missed(run.folder)
    rows += [("faults", missed)] if missed else []
    rows += [("health", text) for text in health(run)]
    return (
        "<table>" + "".join(f"<tr><th>{safe(k)}</th><td><code>{safe(v)}</code></td></tr>" for k, v in rows) + "</table>"
    )


def _events(history: Sequence[Event]) -> str:
    if not history:
        return "<p>No events.</p>"
    zero, hosts = origin(history), events.hosts(history)
    shown = history[:_MOST_EVENTS]
    rows = []
    for event in shown:
        names = ("node", "worker", "rank", "epoch", "step")
        places = {name: value for name in names if (value := getattr(event, name)) is not None}
        if event.node is not None:
            places["node"] = events.named(event.node, hosts)
        about = ", ".join(f"{name} {value}" for name, value in places.items())
        detail = shortened(json.dumps(event.detail, ensure_ascii=False), 400) if event.detail else ""
        rows.append((f"{event.wall - zero:+.3f} s", event.name, about, detail))
    left = len(history) - len(shown)
    note = f"<p>{left} more events are in events.jsonl.</p>" if left else ""
    shown_rows = table(("since the first epoch", "event", "about", "detail"), rows)
    return (
        f'<details><summary>{len(history)} events</summary><div class="wide events">{shown_rows}</div>{note}</details>'
    )
