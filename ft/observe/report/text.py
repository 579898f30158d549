"""Build the text that ``ft report`` prints about a run; the HTML page has its key figures and tables, too."""

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ft import faults
from ft.base import events
from ft.observe.report import protections
from ft.observe.report.lineage import FAILURE, REJOIN, RESTART, Incident, Step, has_stacks, stacks_line, wipe_outs_line
from ft.observe.report.record import STATES, Effective, Record
from ft.observe.report.status import saves
from ft.record import run as records
from ft.record.block import what_differs, what_failed
from ft.record.recoveries import Recovery
from ft.show.text import count, percent, seconds, shortened, spans, table

_MOST_PROBLEMS, _WIDTH = 12, 70
_STALL_NOTE = (
    "Stall: duration of the steps of the incident in excess of the median of normal steps around it. Away: time from "
    "the replica's last step before the incident to the beginning of its first step after it."
)

Facts = list[tuple[str, str]]


RECOVERIES = "Recoveries"


class ReportTable(NamedTuple):
    """A table of the report: of the terminal, which shows ``most`` rows, and of the page; ``right``: the columns whose
    cells are aligned there.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()
    note: str = ""
    most: int = 10_000


def summary(record: Record, files: Sequence[Path]) -> str:
    """Return the report's text: key figures, tables, and the paths of written files."""
    lines = [f"{name:<10} {value}" for name, value in facts(record)]
    lines += [f"{'':<10} {text}" for text in problems(record)] if record.has_quorum else []
    for one in tables(record):
        rows = [[shortened(cell, _WIDTH) for cell in row] for row in one.rows[: one.most]]
        left = len(one.rows) - one.most
        lines += ["", one.title, table(one.head, rows, one.right)]
        lines += [f"and {left} more, in report.html"] if left > 0 else []
    lines += [f"after recovery {r.number}, {what_differs(r)}" for _, r in record.recoveries if r.differing]
    lines += ["", *(f"{'wrote':<10} {path}" for path in files)]
    return "\n".join(lines)


def tables(record: Record) -> list[ReportTable]:
    """Return the tables of replicas, of their failures and rejoins, of recoveries, of DMR mismatches (operators whose
    two executions differed), of actions of user-defined protections, of pipeline stages that CheckFree rebuilt, and of
    steps that are not in the surviving state; only those with rows.
    """
    found = []
    if record.has_quorum:
        right = range(2, len(REPLICA_HEAD))
        found.append(ReportTable("Replicas", REPLICA_HEAD, replica_rows(record), right))
        found.append(
            ReportTable("Failures and rejoins", INCIDENT_HEAD, incident_rows(record), (2, 3, 4, 5), _STALL_NOTE)
        )
    found.append(_recovery_table(record))
    for number, replica in record.replicas.items():
        of = f" of replica {number}" if record.has_quorum else ""
        wrong = () if replica.corruption is None else replica.corruption.rows
        found.append(
            ReportTable(f"Operators whose two executions differed (DMR){of}", protections.HEAD, wrong, (5,), most=8)
        )
        acted, made = protections.action_rows(replica), protections.rebuild_rows(replica)
        found.append(ReportTable(f"Other protections{of}", protections.ACTION_HEAD, acted, (0,)))
        title = f"Stages rebuilt from their neighbours (CheckFree){of}"
        found.append(ReportTable(title, protections.REBUILD_HEAD, made, (0, 1, 3, 4, 5, 6)))
    found.append(ReportTable("Steps that did not survive", SUPERSEDED_HEAD, superseded_rows(record)))
    return [one for one in found if one.rows]


def facts(record: Record) -> Facts:
    """Return the key figures as (name, value)."""
    found = _quorum_facts(record) if record.has_quorum else _facts_of_one(record)
    for number, checked in record.corruptions:
        of = f"replica {number}: " if record.has_quorum else ""
        found.append(("DMR", of + protections.summary_of(checked)))
    found += [("saved", text) for text in saves([event for _, event in record.history])]
    missed = faults.missed(record.folder)
    found += [("faults", missed)] if missed else []
    return found + ([] if record.has_quorum else [("records", text) for text in records.lacking(record.only)])


def _facts_of_one(record: Record) -> Facts:
    times = record.only.goodput
    took = f"recoveries took {seconds(times.recovering)}"
    return [
        ("run", f"{record.folder} ({record.state})"),
        ("steps", f"{times.steps}, {seconds(times.step)} each (median)"),
        ("recovered", _recovered(record)),
        ("goodput", f"{percent(times.share)} of {seconds(times.wall)}, {took}"),
        ("effective", effective_line(record.effective)),
    ]


def _recovered(record: Record) -> str:
    """Return how many interruptions the run has recovered from, how each ended, how long it took, and what it cost."""
    found = [recovery for _, recovery in record.recoveries]
    parts = [f"{sum(r.is_over for r in found)} of {count(len(found), 'interruption')}"]
    parts[0] += " inside replicas" if record.has_quorum else ""
    parts += [f"{times} {outcome}" for outcome, times in Counter(r.outcome for r in found).items()]
    totals = [r.total for r in found if r.is_over and r.total is not None]
    parts += [f"median {seconds(statistics.median(totals))} from the fault to the next step"] if totals else []
    redone = [r.steps_redone for r in found if r.steps_redone is not None]
    parts += [f"{count(sum(redone), 'step')} redone"] if redone else []
    injected = sum(event.name == events.FAULT_INJECTED for _, event in record.history)
    return ", ".join(parts + ([f"{count(injected, 'fault')} injected"] if injected else []))


def _quorum_facts(record: Record) -> Facts:
    step_s = record.pace.normal[-1] if record.steps else None
    found = [("run", f"{record.folder} ({record.state}), {count(record.count, 'replica')}")]
    if has_stacks(record.steps):
        found.append(("stacks", stacks_line(record.steps)))
        wiped = wipe_outs_line(record.steps)
        found += [("wipe-outs", wiped)] if wiped else []
    found += [("steps", f"{steps_line(record)}, {seconds(step_s)} each"), ("samples", audit_line(record))]
    compared = [step for step in record.steps if len(step.digests) > 1]
    if compared:
        equal = sum(len(set(step.digests.values())) == 1 for step in compared)
        found.append(("replicas", f"equal bit for bit after {equal} of {len(compared)} steps compared"))
    found += [(name, stall_line(record.of_kind(kind))) for name, kind in (("failures", FAILURE), ("rejoins", REJOIN))]
    restarts = record.of_kind(RESTART)
    if restarts:
        took = seconds(sum(one.stall_s for one in restarts))
        found.append(("restarts", f"{len(restarts)} of all replicas, {took} in all"))
    found.append(("effective", effective_line(record.effective)))
    return found + ([("recovered", _recovered(record))] if record.recoveries else [])


def _recovery_table(record: Record) -> ReportTable:
    head, right = ("#", "outcome", "step", "redone", "total", "what happened"), (0, 2, 3, 4)
    rows = [_recovery_row(r) for _, r in record.recoveries]
    if record.has_quorum:
        head, right = ("replica", *head), (1, 3, 4, 5)
        rows = [(str(number), *row) for (number, _), row in zip(record.recoveries, rows, strict=True)]
    return ReportTable(RECOVERIES, head, rows, right)


def _recovery_row(recovery: Recovery) -> tuple[str, ...]:
    step, redone = recovery.step, recovery.steps_redone
    return (
        str(recovery.number),
        recovery.outcome,
        "-" if step is None else str(step),
        "-" if redone is None else str(redone),
        seconds(recovery.total),
        what_failed(recovery),
    )


def steps_line(record: Record) -> str:
    """Return the numbers of surviving, superseded and missing steps as one line."""
    found = record.lineage
    parts = [f"{len(found.steps)} surviving"]
    if found.steps:
        parts[0] += f" ({found.steps[0].number} to {found.steps[-1].number})"
    if found.superseded:
        parts.append(f"{len(found.superseded)} superseded")
    if found.missing:
        parts.append(f"{sum(last - first + 1 for first, last in found.missing)} without a record")
    return ", ".join(parts)


def audit_line(record: Record) -> str:
    """Return the audit as one line that begins with its verdict."""
    found = record.audit
    parts = [f"{found.trained} trained", f"{found.duplicates} duplicates", f"{found.gaps} gaps"]
    parts += [f"{found.unaccounted} trained that the state does not count"] if found.unaccounted else []
    parts += [f"{found.unproven} in steps without a record"] if found.unproven else []
    parts += [f"{found.earlier} before step {record.steps[0].number}"] if found.earlier else []
    parts += [f"{found.waiting} still to be trained by replicas that were absent"] if found.waiting else []
    return ("each sample trained once: " if found.is_clean else "AUDIT NOT CLEAN: ") + ", ".join(parts)


def problems(record: Record) -> list[str]:
    """Return sentences about samples that were lost or trained twice, and about contradictions in the record."""
    found = [*record.audit.examples, *record.audit.problems]
    more = [f"and {len(found) - _MOST_PROBLEMS} more"] if len(found) > _MOST_PROBLEMS else []
    absent = sorted(set(range(record.count)) - set(record.replicas))
    names = [f"replica {number} has no folder here: its figures come from the other replicas" for number in absent]
    return [*found[:_MOST_PROBLEMS], *more, *names]


def stall_line(incidents: Sequence[Incident]) -> str:
    """Return the number of incidents and their stalls as one line."""
    if not incidents:
        return "0"
    stalls = [one.stall_s for one in incidents]
    longest = max(incidents, key=lambda one: one.longest_s / one.normal_s if one.normal_s else 0.0)
    longest_step = f", longest step {longest.longest_s / longest.normal_s:.2f} x normal" if longest.normal_s else ""
    return (
        f"{len(stalls)}, stall of the others {seconds(statistics.median(stalls))} (median), "
        f"{seconds(max(stalls))} at most, {seconds(sum(stalls))} in all{longest_step}"
    )


def effective_line(found: Effective) -> str:
    """Return the effective training time as one line."""
    if found.measured is None:
        return "-"
    parts = [f"{percent(found.measured)} of {seconds(found.wall_s)} measured"]
    if found.formula is not None:
        parts.append(f"{percent(found.formula)} by the paper's formula with a failure every {seconds(found.between_s)}")
        parts.append(f"{percent(found.paper_rate)} with one every 18 min")
    return ", ".join(parts)


REPLICA_HEAD = ("replica", "state", "samples", "position", "times offline", *STATES)


def replica_rows(record: Record) -> list[tuple[str, ...]]:
    """Return a row for each replica, with the columns of ``REPLICA_HEAD``."""
    positions = record.steps[-1].commit.positions if record.steps else {}
    rows = []
    for replica in range(record.count):
        own = record.replicas.get(replica)
        rows.append(
            (
                str(replica),
                own.state if own is not None else "no folder",
                str(record.audit.replicas.get(replica, 0)),
                str(positions.get(replica, "-")),
                str(record.times_offline(replica)),
                *(seconds(record.seconds_in(replica, state)) for state in STATES),
            )
        )
    return rows


INCIDENT_HEAD = ("what", "replicas", "steps", "stall", "longest step", "away", "why")


def incident_rows(record: Record) -> list[tuple[str, ...]]:
    """Return a row for each incident, with the columns of ``INCIDENT_HEAD``."""
    return [
        (
            one.kind if one.replicas else "step retried",
            ", ".join(map(str, one.replicas)) or "-",
            str(one.first) if one.first == one.last else f"{one.first}-{one.last}",
            seconds(one.stall_s),
            f"{one.longest_s / one.normal_s:.2f} x" if one.normal_s else "-",
            seconds(statistics.mean(one.away_s)) if one.away_s else "-",
            _why(one),
        )
        for one in record.incidents
    ]


SUPERSEDED_HEAD = ("steps", "committed in quorum", "by replicas")


def superseded_rows(record: Record) -> list[tuple[str, ...]]:
    """Return a row for each sequence of steps that was committed, but is not in the surviving state."""
    stretches: list[list[Step]] = []
    for step in record.lineage.superseded:
        last = stretches[-1][-1] if stretches else None
        if last is not None and step.number == last.number + 1 and set(step.by) == set(last.by):
            stretches[-1].append(step)
        else:
            stretches.append([step])
    return [
        (spans(step.number for step in steps), str(steps[-1].commit.quorum), ", ".join(map(str, sorted(steps[0].by))))
        for steps in stretches
    ]


def _why(one: Incident) -> str:
    if one.kind == FAILURE and one.retries:
        failed = f"{count(one.retries, 'quorum')} failed"
        return f"{one.reason} ({failed})" if one.reason else failed
    return one.reason
