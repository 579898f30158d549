"""Implement ``ft plan policy ladder``: which rung of the recovery ladder follows a fault, why, and what it loses.

The decisions are computed by the function that the control plane uses (:mod:`ft.job.control.recovery`).
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ft.job.control.recovery import LADDER, Decision, decide
from ft.job.control.timeouts import Timeouts
from ft.job.quorum.limits import Limits
from ft.lab.plan.policy.losses import situations
from ft.lab.plan.policy.scenario import FLAGS, HOT_SWAP, REPEATED, Scenario, read
from ft.protection import table as protections
from ft.show.text import count, left_out, percent, seconds, table

_DESCRIPTION = """\
Show which kind of recovery follows a fault, why, what it loses, and how long it can wait at most, for any layout, any
protections and any losses. Each damaged replica is decided on by itself, as its control plane does. Logical ranks are
numbered tensor parallel first, then data parallel, then the pipeline stages. Limits of waits are the defaults; some
grow by a few step times."""

LEFT_OUT = left_out(
    "how often this occurs", "how long the recovery takes (waits are limits)", "further faults during the recovery"
)
_REPLICA_ENTRIES = (protections.REPLICAS, protections.STACKS)


def add_parser(kinds) -> None:
    """Add the subcommand."""
    parser = kinds.add_parser(
        "ladder",
        help="show which recovery follows any set of losses, why, and what is lost",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--file", metavar="FILE", help="JSON object with the flags' names as keys, such as min_replicas"
    )
    defaults = Scenario()
    for key, (metavar, about) in FLAGS.items():
        default = getattr(defaults, key)
        shown = ",".join(default) if isinstance(default, tuple) else default
        more = "" if "default" in about or key in REPEATED or default is None else f"; default: {shown}"
        action = "append" if key in REPEATED else "store"
        parser.add_argument(f"--{key.replace('_', '-')}", metavar=metavar, action=action, help=about + more)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Print the decision for each damaged replica.

    Raises:
        UserError: the scenario is invalid; the message names every problem.
    """
    scenario = read({key: getattr(given, key) for key in FLAGS}, given.file)
    found = {replica: decide(situation) for replica, situation in situations(scenario).items()}
    notes = list(_notes(scenario))
    if given.json:
        values = [_values(replica, scenario, decision) for replica, decision in found.items()]
        print(json.dumps({"replicas": values, "notes": notes}))
    else:
        parts = [_text(replica, scenario, decision) for replica, decision in found.items()]
        print("\n\n".join([LEFT_OUT, *parts, *notes]))
    return 0


def _notes(scenario: Scenario) -> Iterable[str]:
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


def _text(replica: int, scenario: Scenario, decision: Decision) -> str:
    lost = ", ".join(map(str, sorted(scenario.lost.get(replica, ()))))
    what = f"logical rank(s) {lost} lost" if lost else "no worker lost"
    rows = [(str(at), rung, why.splitlines()[0]) for at, rung, why in _rungs(decision)]
    waits = _waits(decision)
    named = ", ".join(f"{name} {seconds(limit)}" for name, limit in waits)
    limit = f"at most {seconds(sum(limit for _, limit in waits))} ({named})" if waits else "for nothing"
    return "\n".join(
        (
            f"replica {replica}, {what}: {decision.rung}",
            f"  loses  {_loses(decision)}",
            f"  waits  {limit}",
            "",
            table(("", "rung", "why it is taken, or not"), rows),
        )
    )


def _rungs(decision: Decision) -> Iterable[tuple[int, str, str]]:
    """Yield (number, rung, why) down to the rung that is taken; rungs that had nothing to say are left out."""
    for number, rung in enumerate(LADDER, 1):
        if rung == decision.rung:
            yield number, rung, decision.reason
            return
        if rung in decision.refused:
            yield number, rung, decision.refused[rung]


def _loses(decision: Decision) -> str:
    lost = decision.lost
    steps = "an unknown number of steps" if lost.steps is None else count(lost.steps, "committed step")
    words = ["the run" if lost.ended else f"{steps}", f"{count(lost.samples, 'sample')}"]
    if lost.late:
        words.append(f"{percent(lost.late)} of each batch comes later")
    if lost.starts_anew and not lost.ended:
        words.append("all workers start anew")
    return f"{', '.join(words)}; {f'a new run repeats {steps}' if lost.ended else f'continues {lost.exactness}'}"


def _values(replica: int, scenario: Scenario, decision: Decision) -> dict[str, Any]:
    plan = decision.plan
    return {
        "replica": replica,
        "lost": sorted(scenario.lost.get(replica, ())),
        "rung": decision.rung,
        "reason": decision.reason,
        "refused": dict(decision.refused),
        "step": None if plan is None else plan.step,
        "loses": asdict(decision.lost),
        "waits": [{"limit": name, "seconds": limit} for name, limit in _waits(decision)],
        "sources": {} if plan is None else {str(r): asdict(source) for r, source in sorted(plan.sources.items())},
        "fetched": {str(rank): other for rank, other in sorted(decision.fetched.items())},
        "rebuilt": {} if plan is None else {str(rank): beside.there for rank, beside in sorted(plan.rebuilt.items())},
    }
