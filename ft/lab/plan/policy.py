"""Implement ``ft plan policy``: the levels of the recovery ladder, what each costs, and which one follows which fault.

The decisions are computed by the function that the control plane uses (:mod:`ft.job.control.recovery`).
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from ft.job.control import recovery
from ft.job.control.recovery import AGAINST, LADDER, Decision, decide
from ft.job.control.timeouts import Timeouts
from ft.job.quorum.limits import Limits
from ft.lab.plan.goodput.scenario import KEYS as TIMES
from ft.lab.plan.situations import CHECKFREE, CHECKFREE_PLUS, HOT_SWAP, KEYS, JobAfterFault, read, situations
from ft.protection import table as protections
from ft.show.text import count, left_out, percent, seconds, table

_DESCRIPTION = """\
Show the kinds of recovery in the order in which they are tried, what each costs, and which one follows typical faults.
With a file, --lost or --unverified, show which one follows this fault, why, what it loses, and how long it can wait at
most, for any layout and any protections. Each damaged replica is decided on by itself, as its control plane does.
Logical ranks are numbered tensor parallel first, then data parallel, then the pipeline stages. Limits of waits are the
defaults; some grow by a few step times."""

LEFT_OUT = left_out(
    "how often this occurs", "how long the recovery takes (waits are limits)", "further faults during the recovery"
)
_REPLICA_ENTRIES = (protections.REPLICAS, protections.STACKS)
_COLUMNS = ("level", "flag", "needs", "loses", "takes")
_KINDS = {
    recovery.IN_PLACE: ("--ft-hot-swap", "every worker, with its own snapshot", "the step under way", "swap_time"),
    recovery.STANDBY: ("--standby", "ready standbys, peer copies", "the step under way, seldom one more", "swap_time"),
    recovery.COPY: ("--ft-hot-swap", "room to start workers, peer copies", "the step under way", "restart_time"),
    recovery.REPLICA: ("--ft-hsdp-replicas", "another replica", "no step; a part of the batches is late", "stall_time"),
    recovery.REORDER: ("--ft-spare-redundancy", "another replica", "no step, and no part of a batch", "shrink_time"),
    recovery.CHECKFREE: ("--ft-checkfree[-plus]", "the stages beside each lost one", "no step; an estimate",
                      "neighbour_time"),
    recovery.CHECKPOINT: ("--save", "a checkpoint, a warm restart", "the steps since it was written", "restart_time"),
    recovery.END: ("", "", "the run, until somebody starts it again", ""),
}  # fmt: skip
"""Level -> flag, what it needs, what it loses, and the key of the time that it takes (ft plan buy)."""
_MODES = {"off": (HOT_SWAP,), CHECKFREE: (HOT_SWAP, CHECKFREE), CHECKFREE_PLUS: (HOT_SWAP, CHECKFREE_PLUS)}


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "policy",
        help="show the kinds of recovery, what each costs, and which one follows which fault",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    KEYS.add_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Print the kinds of recovery and what follows typical faults, or the decision for each damaged replica.

    Raises:
        UserError: the scenario is invalid; the message names every problem.
    """
    scenario, has_fault = read(given)
    if not has_fault and given.scenario is None:
        cases = [(what, mode, decide(situations(case)[0])) for what, mode, case in _typical(scenario)]
        print(json.dumps(_overview(cases)) if given.json else f"{LEFT_OUT}\n\n{_overview_text(cases)}")
        return 0
    found = {replica: decide(situation) for replica, situation in situations(scenario).items()}
    notes = list(_notes(scenario))
    if given.json:
        values = [_values(replica, scenario, decision) for replica, decision in found.items()]
        print(json.dumps({"replicas": values, "notes": notes}))
    else:
        parts = [_text(replica, scenario, decision) for replica, decision in found.items()]
        print("\n\n".join([LEFT_OUT, *parts, *notes]))
    return 0


def _typical(asked: JobAfterFault) -> Iterator[tuple[str, str, JobAfterFault]]:
    """Yield (description, mode of CheckFree, job) for typical faults of a job with a rank on each stage."""
    last, middle = asked.pp - 1, asked.pp // 2
    losses = {"an operation fails, nobody dies": frozenset()}
    losses |= {f"stage {stage} lost everywhere": frozenset({stage}) for stage in (middle, 0, last)}
    if last > 0:
        losses[f"stages {middle - 1} and {middle} lost"] = frozenset({middle - 1, middle})
    for what, lost in losses.items():
        for mode, protect in _MODES.items():
            case = JobAfterFault(dp=1, pp=asked.pp, blocks=asked.blocks, peers=0, protect=protect, standbys=len(lost))
            yield what, mode, replace(case, lost={0: lost})


def _overview(cases: Iterable[tuple[str, str, Decision]]) -> dict[str, Any]:
    kinds = [dict(zip(_COLUMNS, (name, *row[:3], _takes(row[3])), strict=True)) for name, row in _KINDS.items()]
    told = [{"what": what, "checkfree": mode, "level": d.level, "reason": d.reason} for what, mode, d in cases]
    return {"levels": kinds, "cases": told}


def _overview_text(cases: Iterable[tuple[str, str, Decision]]) -> str:
    kinds = [(str(n), name, *row[:3], _takes(row[3])) for n, (name, row) in enumerate(_KINDS.items(), 1)]
    rows = [(what, mode, found.level, _why(found)) for what, mode, found in cases]
    heads = ("", *_COLUMNS), ("what happened", "CheckFree", "level", "because")
    return "\n\n".join((table(heads[0], kinds), table(heads[1], rows)))


def _takes(key: str) -> str:
    """Return the default of a time of ``ft plan buy``, with its source, or the flag that gives it."""
    if not key:
        return ""
    default, origin = TIMES.known[key].default, TIMES.known[key].origin.split(":")[0].rstrip(")")
    return f"--{key.replace('_', '-')}" if default is None else f"{seconds(default)}, {origin})"


def _why(decision: Decision) -> str:
    """Return the reason of a decision; for a restart, why the levels before it cannot be used."""
    _, found, against = decision.reason.partition(f"{AGAINST}: ")
    return against.split(";")[0] if found else decision.reason


def _notes(scenario: JobAfterFault) -> Iterable[str]:
    """Yield why protections of the scenario cannot run together, if they cannot."""
    asked = {protections.HOT_SWAP} if HOT_SWAP in scenario.protect else set()
    asked |= {protections.STAGES} if scenario.checkfree else set()
    asked |= set(_REPLICA_ENTRIES) if scenario.spare_redundancy else set()
    asked |= {protections.REPLICAS} if scenario.replicas > 1 else set()
    for conflict in protections.CONFLICTS:
        if conflict.one in asked and conflict.other in asked:
            yield f"note: ft run refuses {conflict.one} with {conflict.other}: {conflict.why}"


def _waits(decision: Decision) -> list[tuple[str, float]]:
    """Return (name, seconds) of the limits of all waits: the defaults, without the multiples of the step time."""
    tables: dict[str, Any] = {"control": Timeouts(), "quorum": Limits()}
    named = [(name, *name.split(".")) for name in decision.waits]
    return [(name, getattr(tables[where], field)) for name, where, field in named]


def _text(replica: int, scenario: JobAfterFault, decision: Decision) -> str:
    lost = ", ".join(map(str, sorted(scenario.lost.get(replica, ()))))
    what = f"logical rank(s) {lost} lost" if lost else "no worker lost"
    rows = [(str(at), level, why.splitlines()[0]) for at, level, why in _levels(decision)]
    waits = _waits(decision)
    named = ", ".join(f"{name} {seconds(limit)}" for name, limit in waits)
    limit = f"at most {seconds(sum(limit for _, limit in waits))} ({named})" if waits else "for nothing"
    return "\n".join(
        (
            f"replica {replica}, {what}: {decision.level}",
            f"  loses  {_loses(decision)}",
            f"  waits  {limit}",
            "",
            table(("", "level", "why it is taken, or not"), rows),
        )
    )


def _levels(decision: Decision) -> Iterable[tuple[int, str, str]]:
    """Yield (number, level, why) down to the level that is taken; levels that had nothing to say are left out."""
    for number, level in enumerate(LADDER, 1):
        if level == decision.level:
            yield number, level, decision.reason
            return
        if level in decision.refused:
            yield number, level, decision.refused[level]


def _loses(decision: Decision) -> str:
    lost = decision.lost
    steps = "an unknown number of steps" if lost.steps is None else count(lost.steps, "committed step")
    words = ["the run" if lost.ended else f"{steps}", f"{count(lost.samples, 'sample')}"]
    if lost.late:
        words.append(f"{percent(lost.late)} of each batch comes later")
    if lost.starts_anew and not lost.ended:
        words.append("all workers start anew")
    return f"{', '.join(words)}; {f'a new run repeats {steps}' if lost.ended else f'continues {lost.exactness}'}"


def _values(replica: int, scenario: JobAfterFault, decision: Decision) -> dict[str, Any]:
    plan = decision.plan
    return {
        "replica": replica,
        "lost": sorted(scenario.lost.get(replica, ())),
        "level": decision.level,
        "reason": decision.reason,
        "refused": dict(decision.refused),
        "step": None if plan is None else plan.step,
        "loses": asdict(decision.lost),
        "waits": [{"limit": name, "seconds": limit} for name, limit in _waits(decision)],
        "sources": {} if plan is None else {str(r): asdict(source) for r, source in sorted(plan.sources.items())},
        "position_of": None if plan is None else plan.position_of,
        "rebuilt": {} if plan is None else {str(rank): beside.there for rank, beside in sorted(plan.rebuilt.items())},
    }
