"""Build ``report.html`` of an FT-HSDP run, in which several replicas (full copies of the model) train together."""

import json
import time

from ft import faults
from ft.observe.hsdp import colours, text
from ft.observe.hsdp.effective import (
    PAPER_BETWEEN_S,
    PAPER_REPAIR_S,
    PAPER_REPLICAS,
    PAPER_STALL_S,
    asynchronous,
    synchronous,
)
from ft.observe.hsdp.stalls import FAILURE, REJOIN
from ft.observe.hsdp.story import Story
from ft.observe.report import hangs
from ft.observe.report.loss_curve import Mark, curve
from ft.show.html import cards, document, header, picture, safe, section, table
from ft.show.text import percent, seconds, shortened

_MOST_EVENTS = 5000


def page(story: Story, timeline: bytes) -> str:
    """Return the report as HTML text.

    Args:
        story: the run's record and everything that is computed from it.
        timeline: the picture of ``ft.observe.hsdp.timeline`` as PNG.
    """
    name, hung = story.record.folder.resolve().name, hangs.panel(story.record.folder)
    sections = [
        header(name, _subtitle(story)),
        cards(_headlines(story)),
        section("Samples", _samples(story)),
        section("Timeline", picture(timeline, "replicas over time, time of steps, loss")),
        section("Replicas", _wide(table(text.REPLICA_HEAD, text.replica_rows(story)))),
        section("Failures and rejoins", _incidents(story)),
        *([section("Hangs", hung)] if hung else []),
        section("Effective training time", _effective(story)),
        section("Loss", _loss(story)),
        section("Steps that did not survive", _superseded(story)),
        section("Events", _events(story)),
    ]
    return document(name, sections)


def _subtitle(story: Story) -> str:
    parts = [story.record.state, f"{story.record.count} replicas"]
    if story.zero:
        parts.append(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(story.zero)))
    return ", ".join(parts)


def _headlines(story: Story) -> list[tuple[str, str, str]]:
    found, failures, rejoins = story.audit, story.of_kind(FAILURE), story.of_kind(REJOIN)
    rebuilt = sum(len(one.away_s) for one in rejoins)
    return [
        (
            "samples trained twice or lost",
            str(found.duplicates + found.gaps + found.unaccounted),
            f"of {found.trained}",
        ),
        ("effective", percent(story.effective.measured), f"{len(story.steps)} steps"),
        ("failures", str(len(failures)), f"{rebuilt} replicas rejoined"),
        ("stall per failure", _mean([one.stall_s for one in failures]), "mean, of the others"),
        ("stall per rejoin", _mean([one.stall_s for one in rejoins]), "mean, of the others"),
    ]


def _mean(values: list[float]) -> str:
    return seconds(sum(values) / len(values)) if values else "-"


def _samples(story: Story) -> str:
    wrong = "".join(f"<li>{safe(each)}</li>" for each in text.problems(story))
    verdict = f"<p><b>{safe(text.audit_line(story))}</b></p>"
    how = (
        "<p><small>The audit compares the samples that healthy replicas read in the surviving steps with the samples "
        "before the last positions. A duplicate was trained twice. A gap counts as consumed but was never "
        "trained.</small></p>"
    )
    return verdict + how + (f"<ul>{wrong}</ul>" if wrong else "")


def _wide(content: str) -> str:
    return f'<div class="wide">{content}</div>'


def _incidents(story: Story) -> str:
    missed = faults.missed(story.record.folder)
    planned = f"<p>{safe(missed)}</p>" if missed else ""
    if not story.incidents:
        return f"<p>All replicas were in every step.</p>{planned}"
    note = (
        "<p><small>Stall: duration of the steps of the incident in excess of the median of normal steps around it. "
        "Away: time from the replica's last step before the incident to the beginning of its first step after "
        "it.</small></p>"
    )
    return _wide(table(text.INCIDENT_HEAD, text.incident_rows(story))) + note + planned


def _effective(story: Story) -> str:
    found, replicas = story.effective, story.record.count
    rows = [
        (
            "measured: normal time of the steps x share of healthy replicas, divided by the total time",
            percent(found.measured),
        )
    ]
    if found.formula is not None:
        means = f"stall {seconds(found.stall_s)}, away {seconds(found.repair_s)}, {replicas} replicas"
        rows += [
            (f"formula, {means}, a failure every {seconds(found.between_s)} as measured", percent(found.formula)),
            (f"formula, {means}, a failure every 18 min", percent(found.paper_rate)),
            ("all wait for the repair, a failure every 18 min", percent(found.waiting)),
        ]
    papers = asynchronous(PAPER_BETWEEN_S, PAPER_REPAIR_S, PAPER_STALL_S, PAPER_REPLICAS)
    rows += [
        ("the paper: stall 3 min, away 10 min, 12 replicas, a failure every 18 min", percent(papers)),
        ("the paper: all wait for the repair", percent(synchronous(PAPER_BETWEEN_S, PAPER_REPAIR_S))),
    ]
    return table(("", "effective"), rows)


def _loss(story: Story) -> str:
    if not story.losses.points:
        return "<p>The run has recorded no losses.</p>"
    marks = [
        Mark(story.losses.at[one.first], colours.INCIDENT[FAILURE], f"step {one.first}: {one.reason or 'a failure'}")
        for one in story.of_kind(FAILURE)
        if one.first in story.losses.at
    ]
    return curve(story.losses.points, story.losses.over, marks)


def _superseded(story: Story) -> str:
    lines = "".join(f"<li>{safe(line)}</li>" for line in text.superseded(story))
    return f"<ul>{lines}</ul>" if lines else "<p>Every committed step is in the surviving state.</p>"


def _events(story: Story) -> str:
    history = story.record.history
    if not history:
        return "<p>No events.</p>"
    rows = []
    for replica, event in history[:_MOST_EVENTS]:
        about = "quorum server" if replica is None else f"replica {replica}"
        names = ("node", "worker", "rank", "epoch", "step")
        places = ", ".join(f"{n} {v}" for n in names if (v := getattr(event, n)) is not None)
        detail = shortened(json.dumps(event.detail, ensure_ascii=False), 400) if event.detail else ""
        rows.append((f"{event.wall - story.zero:+.3f} s", about, event.name, places, detail))
    left = len(history) - len(rows)
    note = f"<p>{left} more events are in the files events.jsonl.</p>" if left else ""
    shown = table(("since the beginning", "by", "event", "about", "detail"), rows)
    return f'<details><summary>{len(history)} events</summary><div class="wide events">{shown}</div>{note}</details>'
