"""Build the text that ``ft report`` prints about an FT-HSDP run; the HTML page reuses parts of it.

Surviving steps are the committed steps that are part of the current training state; superseded steps were committed by
some replicas only, or were rolled back. The audit checks that every sample was trained exactly once. A stall is the
time that a failure or rejoin of a replica costs the other replicas.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from ft import faults
from ft.observe.hsdp.effective import Effective
from ft.observe.hsdp.lanes import STATES
from ft.observe.hsdp.stacks import has_stacks, stacks_line, wipe_outs_line
from ft.observe.hsdp.stalls import FAILURE, REJOIN, RESTART, Incident
from ft.observe.hsdp.story import Story
from ft.observe.report.status import saves
from ft.show.text import count, percent, seconds, shortened, table

_MOST_PROBLEMS = 12


def summary(story: Story, files: Sequence[Path]) -> str:
    """Return key figures, a table of replicas, a table of failures and rejoins, and the paths of the files written."""
    lines = [f"{name:<10} {value}" for name, value in facts(story)]
    lines += [f"{'':<10} {text}" for text in problems(story)]
    lines += ["", table(REPLICA_HEAD, replica_rows(story), right=range(2, len(REPLICA_HEAD)))]
    if story.incidents:
        rows = [(*row[:-1], shortened(row[-1], 60)) for row in incident_rows(story)]
        lines += ["", table(INCIDENT_HEAD, rows, right=(2, 3, 4, 5))]
    if story.lineage.superseded:
        lines += ["", *superseded(story)]
    lines += ["", *(f"{'wrote':<10} {path}" for path in files)]
    return "\n".join(lines)


def facts(story: Story) -> list[tuple[str, str]]:
    """Return the key figures as (name, value)."""
    step_s = story.pace.normal[-1] if story.steps else None
    restarts = story.of_kind(RESTART)
    found = [
        ("run", f"{story.record.folder} ({story.record.state}), {count(story.record.count, 'replica')}"),
        ("steps", f"{steps_line(story)}, {seconds(step_s)} each"),
        ("samples", audit_line(story)),
        ("failures", stall_line(story.of_kind(FAILURE))),
        ("rejoins", stall_line(story.of_kind(REJOIN))),
        ("effective", effective_line(story.effective)),
    ]
    if has_stacks(story.steps):
        found.insert(1, ("stacks", stacks_line(story.steps)))
        if line := wipe_outs_line(story.steps):
            found.insert(2, ("wipe-outs", line))
    compared = [step for step in story.steps if len(step.digests) > 1]
    if compared:
        equal = sum(len(set(step.digests.values())) == 1 for step in compared)
        found.insert(-3, ("replicas", f"equal bit for bit after {equal} of {len(compared)} steps compared"))
    if restarts:
        found.insert(
            -1, ("restarts", f"{len(restarts)} of all replicas, {seconds(sum(one.stall_s for one in restarts))} in all")
        )
    missed = faults.missed(story.record.folder)
    found += [("saved", text) for text in saves([event for _, event in story.record.history])]
    return found + ([("faults", missed)] if missed else [])


def steps_line(story: Story) -> str:
    """Return the numbers of surviving, superseded and missing steps as one line."""
    found = story.lineage
    parts = [f"{len(found.steps)} surviving"]
    if found.steps:
        parts[0] += f" ({found.steps[0].number} to {found.steps[-1].number})"
    if found.superseded:
        parts.append(f"{len(found.superseded)} superseded")
    if found.missing:
        parts.append(f"{sum(last - first + 1 for first, last in found.missing)} without a record")
    return ", ".join(parts)


def audit_line(story: Story) -> str:
    """Return the audit as one line that begins with its verdict."""
    found = story.audit
    parts = [f"{found.trained} trained", f"{found.duplicates} duplicates", f"{found.gaps} gaps"]
    parts += [f"{found.unaccounted} trained that the state does not count"] if found.unaccounted else []
    parts += [f"{found.unproven} in steps without a record"] if found.unproven else []
    parts += [f"{found.earlier} before step {story.steps[0].number}"] if found.earlier else []
    parts += [f"{found.waiting} still to be trained by replicas that were absent"] if found.waiting else []
    return ("each sample trained once: " if found.is_clean else "AUDIT NOT CLEAN: ") + ", ".join(parts)


def problems(story: Story) -> list[str]:
    """Return sentences about samples that were lost or trained twice, and about contradictions in the record."""
    found = [*story.audit.examples, *story.audit.problems]
    more = [f"and {len(found) - _MOST_PROBLEMS} more"] if len(found) > _MOST_PROBLEMS else []
    unread = [f"loader_state: {story.record.problem}"] if story.record.problem else []
    absent = sorted(set(range(story.record.count)) - set(story.record.replicas))
    names = [f"replica {number} has no folder here: its figures come from the other replicas" for number in absent]
    return [*found[:_MOST_PROBLEMS], *more, *unread, *names]


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


def replica_rows(story: Story) -> list[tuple[str, ...]]:
    """Return a row for each replica, with the columns of ``REPLICA_HEAD``."""
    positions = story.steps[-1].commit.positions if story.steps else {}
    rows = []
    for replica in range(story.record.count):
        own = story.record.replicas.get(replica)
        rows.append(
            (
                str(replica),
                own.state if own is not None else "no folder",
                str(story.audit.replicas.get(replica, 0)),
                str(positions.get(replica, "-")),
                str(story.times_offline(replica)),
                *(seconds(story.seconds_in(replica, state)) for state in STATES),
            )
        )
    return rows


INCIDENT_HEAD = ("what", "replicas", "steps", "stall", "longest step", "away", "why")


def incident_rows(story: Story) -> list[tuple[str, ...]]:
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
        for one in story.incidents
    ]


def superseded(story: Story) -> list[str]:
    """Return a line for each sequence of steps that was committed but is not in the surviving state."""
    stretches: list[list] = []
    for step in story.lineage.superseded:
        last = stretches[-1][-1] if stretches else None
        if last is not None and step.number == last.number + 1 and set(step.by) == set(last.by):
            stretches[-1].append(step)
        else:
            stretches.append([step])
    return [_superseded(steps) for steps in stretches]


def _superseded(steps: Sequence) -> str:
    first, last, members = steps[0], steps[-1], ", ".join(map(str, sorted(steps[0].by)))
    which = f"step {first.number}" if len(steps) == 1 else f"steps {first.number} to {last.number}"
    return f"superseded: {which}, committed in quorum {last.commit.quorum} by replica {members} and repeated later"


def _why(one: Incident) -> str:
    if one.kind == FAILURE and one.retries:
        failed = f"{count(one.retries, 'quorum')} failed"
        return f"{one.reason} ({failed})" if one.reason else failed
    return one.reason
