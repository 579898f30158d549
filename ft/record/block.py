"""Format the block of text that ``ft run`` prints when a recovery from a failure is over.

The cause of a hang follows from what the run has recorded of all ranks shortly before.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ft.base import events
from ft.base.errors import UserError
from ft.base.events import Event, named
from ft.faults.hang.causes import BUSY, over_time
from ft.faults.hang.format import Who
from ft.faults.verdict import NODE_LOST
from ft.record import inspections
from ft.record import recoveries as found
from ft.record.recoveries import PHASES, Recovery
from ft.show.text import count, seconds, shortened, spans

_BEFORE_S = 6.0
"""Seconds before a fault was detected within which the inspection of it was taken; it is made once in 5 s at most."""


class ToldCause(NamedTuple):
    """The cause of a hang, for people.

    Attributes:
        why: how that is known, or where the rank is.
        more: the command that says everything.
    """

    what: str
    why: str
    more: str


def cause_of_hang(run: Path, history: Sequence[events.Event], recovery: Recovery) -> ToldCause | None:
    """Return the cause of a hang; None if the run has made no inspection, or nobody was at fault in it."""
    number = _inspection_of(history, recovery)
    if number is None:
        return None
    try:
        seen = replace(inspections.read(run, number), hosts=events.hosts(history))
    except (UserError, OSError):  # what the run tells of itself must not depend on a file that cannot be read
        return None
    found = over_time([seen])
    if not found.causes:
        return None
    first = found.causes[0]
    who = Who(seen).title(first.guilty)
    more = f" and {len(found.causes) - 1} more" if len(found.causes) > 1 else ""
    why = first.where if first.kind == BUSY else first.evidence[0]
    return ToldCause(f"{first.kind}: {who}{more}", why, f"ft diagnose hang {run} --inspection {number}")


def _inspection_of(history: Sequence[events.Event], recovery: Recovery) -> int | None:
    """Return the number of the last inspection shortly before the fault was detected; None if there is none."""
    taken = [
        event
        for event in history
        if event.name == events.INSPECTED
        and event.epoch == recovery.closed
        and 0 <= recovery.detected_at - event.wall < _BEFORE_S
    ]
    return int(taken[-1].detail["number"]) if taken else None


_WIDTH, _BAR = 100, 31
_PHASE_WORDS = {
    "detect": "from the fault until its detection",
    "release": "until the last survivor had left the epoch",
    "assemble": "until the replacement workers had arrived",
    "rebuild": "until the process groups were rebuilt",
    "restore": "until every worker had restored its state",
    "resume": "until the next step had begun",
}


def recovery_block(history: Sequence[Event], run: Path | None = None) -> str:
    """Return 8 to 15 lines about the last recovery in ``history``, "" if there is none; with the folder of the run,
    those about a hang have its cause.
    """
    all_of_them = found.recoveries(history)
    if not all_of_them:
        return ""
    recovery = all_of_them[-1]
    return describe(recovery, cause_of_hang(run, history, recovery) if run is not None else None)


def describe(recovery: Recovery, cause: ToldCause | None = None) -> str:
    """Return one recovery as text: what failed, the verdict and why, who took over, and how long each phase took."""
    title = f"-- recovery {recovery.number}: {_headline(recovery)} "
    lines = [
        title.ljust(_WIDTH, "-"),
        *_row("fault", what_failed(recovery)),
        *_row("verdict", _verdict(recovery)),
        *(_cause(cause) if cause is not None else ()),
        *_row("seats", seat_changes(recovery)),
        *_row("state", _state(recovery)),
        *_row("stages", ", ".join(map(_stage, recovery.stages))),
    ]
    lines += _phase_lines(recovery)
    lines.append("-" * _WIDTH)
    return "\n".join(lines)


def _headline(recovery: Recovery) -> str:
    total = seconds(recovery.total)
    return {
        found.REPLACED: f"replaced in {total}",
        found.IN_PLACE: f"in place in {total}",
        found.RESTART: f"warm restart in {total}",
        found.STOPPED: "the run stopped",
        found.UNDER_WAY: "under way",
    }[recovery.outcome]


def what_failed(recovery: Recovery) -> str:
    """Return which workers failed and how that was noticed, the gravest fault first: "worker n0.w3 (logical rank 3,
    node n0): SIGKILL", "node n1 (gpu0137) is lost, with logical ranks 2-3".
    """
    if not recovery.detected:
        return recovery.reason or "unknown"
    parts = list(dict.fromkeys(_failed(recovery, event) for event in recovery.faults))
    more = f" and {len(parts) - 2} more" if len(parts) > 2 else ""
    return "; ".join(parts[:2]) + more


def _failed(recovery: Recovery, event: Event) -> str:
    node = f"node {named(event.node, recovery.hosts)}"
    signal = event.detail.get("signal")
    if signal == NODE_LOST:
        lost = (each for each in recovery.detected if (each.node, each.detail.get("signal")) == (event.node, signal))
        held = sorted({each.rank for each in lost if each.rank is not None})
        return f"{node} is lost" + (f", with logical rank{'s' * (len(held) > 1)} {spans(held)}" if held else "")
    where = [f"logical rank {event.rank}"] if event.rank is not None else []
    where += [node] if event.node is not None else []
    who = f"worker {event.worker}" if event.worker is not None else "no particular worker"
    who += f" ({', '.join(where)})" if where else ""
    return f"{who}: {signal or 'no signal on record'}"


def what_differs(recovery: Recovery) -> str:
    """Return text such as "step 5 differs from its first try, on 2 ranks: the norm of ...", or "" without any."""
    if not recovery.differing:
        return ""
    first = min(recovery.differing, key=lambda event: event.step)
    ranks = {event.rank for event in recovery.differing if event.step == first.step}
    what = "; ".join(map(str, first.detail.get("differences", ())))
    return f"step {first.step} differs from its first try, on {count(len(ranks), 'rank')}: {what}"


def seat_changes(recovery: Recovery) -> str:
    """Return which ranks changed workers, such as "rank 3: n0.w3 -> n0.w4", or "" where there is nothing to say."""
    if recovery.outcome == found.RESTART:
        return "every worker was restarted"
    changes = [f"rank {c.rank}: {c.before or '?'} -> {c.after}" for c in recovery.seats]
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return ", ".join(changes[:3]) + more or ("as they were" if recovery.outcome == found.IN_PLACE else "")


def _row(name: str, text: str) -> list[str]:
    return [f"   {name:<9} {shortened(text, _WIDTH - 13)}"] if text else []


def _cause(cause: ToldCause) -> list[str]:
    """Return the lines about the cause of a hang. The command stays in one line, so that it can be copied."""
    lines = [cause.what, *textwrap.wrap(cause.why, _WIDTH - 13, break_on_hyphens=False), cause.more]
    return [f"   {'' if number else 'cause':<9} {line}" for number, line in enumerate(lines)]


def _verdict(recovery: Recovery) -> str:
    judged = " -> ".join(part for part in (recovery.category, recovery.of_gravest("action")) if part)
    return f"{judged}: {recovery.reason}" if judged and recovery.reason else judged or recovery.reason


def _state(recovery: Recovery) -> str:
    parts = []
    if recovery.step is not None:
        parts.append(f"committed step {recovery.step}")
    if recovery.steps_redone is not None:
        parts.append(f"{count(recovery.steps_redone, 'step')} redone")
    if recovery.groups:
        late = f", {recovery.deferred} when first used" if recovery.deferred else ""
        parts.append(f"{recovery.rebuilt} of {recovery.groups} groups rebuilt{late}")
    if recovery.attempts > 1:
        parts.append(f"{recovery.attempts} epochs")
    return ", ".join(parts)


def _stage(rebuilt: Event) -> str:
    """Return text such as "stage 1 rebuilt from its neighbours: weighted, 40 % + 60 %"."""
    shares = " + ".join(f"{100 * share:.0f} %" for share in rebuilt.detail.get("weights", ()) if share)
    how = ", ".join(part for part in (str(rebuilt.detail.get("strategy", "")), shares) if part)
    return f"stage {rebuilt.detail.get('stage')} rebuilt from its neighbours: {how}"


def _phase_lines(recovery: Recovery) -> list[str]:
    """Return one line per phase, with a bar that shows its part of the whole recovery."""
    whole = sum(recovery.phases.values())
    lines, offset = [], 0.0
    for name in PHASES:
        if name not in recovery.phases:
            continue
        took = recovery.phases[name]
        bar = _bar(offset, took, whole)
        lines.append(f"   {name:<9} {seconds(took):>9}  |{bar}| {_PHASE_WORDS[name]}".rstrip())
        offset += took
    return lines


def _bar(offset: float, took: float, whole: float) -> str:
    if whole <= 0:
        return " " * _BAR
    start = min(_BAR - 1, round(_BAR * offset / whole))
    width = max(1, min(_BAR - start, round(_BAR * (offset + took) / whole) - start))
    return (" " * start + "#" * width).ljust(_BAR)
