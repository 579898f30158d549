"""Implement ``ft plan policy``: show the rungs of the recovery ladder, and which one follows the loss of a stage.

The decisions shown are computed by the control plane's own code (:mod:`ft.job.control.recovery`). The subcommand
``ladder`` (:mod:`ft.lab.plan.policy.ladder`) answers for any set of losses.
"""

import argparse
import json
from typing import Any

from ft.base.errors import UserError
from ft.job.control import recovery
from ft.job.control.recovery import AGAINST, MIDDLE, PLUS, Decision, decide
from ft.lab.plan.policy import ladder
from ft.lab.plan.policy.failure import failure
from ft.show.text import left_out, table

_DESCRIPTION = """\
Show the rungs of the recovery ladder, and which one follows which loss of pipeline stages, as the control plane
decides. With --lost, show the decision for one failure. The subcommand "ladder" takes any layout, protections and
losses."""

OFF = "off"
LEFT_OUT = left_out("how often each case occurs, and how long its recovery takes", "further faults during the recovery")
_MOST_STAGES = 1024

_COLUMNS = ("rung", "flag", "needs", "loses")
_KINDS = {
    recovery.IN_PLACE: ("--ft-hot-swap", "every worker, with its own snapshot", "the step under way"),
    recovery.STANDBY: ("--standby", "ready standbys, and peer copies", "the step under way, seldom one more"),
    recovery.COPY: ("--ft-hot-swap", "room to start workers, and peer copies", "the same, and the time to start them"),
    recovery.REPLICA: ("--ft-hsdp-replicas", "another replica", "no step; a part of the batches comes later"),
    recovery.REORDER: ("--ft-spare-redundancy", "another replica", "no step, and no part of a batch"),
    recovery.CHECKFREE: (
        "--ft-checkfree[-plus]",
        "the neighbours of each lost stage",
        "no step; the stage is an estimate",
    ),
    recovery.CHECKPOINT: ("--save", "a persistent checkpoint, a warm restart", "the steps since it was written"),
    recovery.END: ("", "", "the run, until somebody starts it again"),
}


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "policy",
        help="show the order of the kinds of recovery, and which one follows which failure",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--pp", type=int, metavar="P", help="number of pipeline stages; default: those of --blocks, or 6"
    )
    parser.add_argument(
        "--blocks",
        metavar="N,N,...",
        help="number of transformer blocks of each stage, such as 4,4,4; default: all the same",
    )
    parser.add_argument("--lost", metavar="S,S,...", help="stages of whose state no rank holds a copy; '' for none")
    parser.add_argument("--checkfree", choices=(OFF, MIDDLE, PLUS), help=f"with --lost; default: {OFF}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(main=run)
    ladder.add_parser(parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND"))


def run(given: argparse.Namespace) -> int:
    """Print the kinds of recovery and what follows typical failures, or the decision for one failure.

    Raises:
        UserError: the stages are invalid.
    """
    blocks = _blocks(given)
    if given.lost is None:
        failures = _typical(blocks, given)
        print(json.dumps(_all_values(failures)) if given.json else f"{LEFT_OUT}\n\n{_all_text(failures)}")
        return 0
    found = decide(failure(blocks, _lost(given.lost, len(blocks)), _asked(given.checkfree)))
    print(json.dumps(_values(found)) if given.json else f"{LEFT_OUT}\n\n{found.rung}: {found.reason}")
    return 0


def _asked(checkfree: str | None) -> str:
    return "" if checkfree in (None, OFF) else checkfree


def _blocks(given: argparse.Namespace) -> tuple[int, ...]:
    if given.pp is not None and not 1 <= given.pp <= _MOST_STAGES:
        raise UserError(f"--pp {given.pp}", f"give 1 to {_MOST_STAGES} pipeline stages")
    alike = (1,) * (given.pp or 6)
    blocks = alike if given.blocks is None else _numbers(given.blocks)
    if len(blocks) != (given.pp or len(blocks)) or min(blocks, default=0) < 1:
        stages = "" if given.pp is None else f"--pp {given.pp}, and "
        raise UserError(f"{stages}--blocks {given.blocks}", "give each stage at least one block")
    return blocks


def _lost(text: str, stages: int) -> frozenset[int]:
    lost = frozenset(_numbers(text)) if text.strip() else frozenset()
    if any(not 0 <= stage < stages for stage in lost):
        raise UserError(f"--lost {text}: stages are 0 to {stages - 1}", "give stages that exist")
    return lost


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(
            f"{text!r} is not a list of whole numbers", "give whole numbers with commas between them, such as 4,4,4"
        ) from None


def _typical(blocks: tuple[int, ...], given: argparse.Namespace) -> list[tuple[str, str, Decision]]:
    """Return (description of the failure, CheckFree mode, decision) for typical failures."""
    last, middle = len(blocks) - 1, len(blocks) // 2
    losses = {"an operation fails, nobody dies": frozenset()}
    losses |= {f"stage {stage} lost everywhere": frozenset({stage}) for stage in (middle, 0, last)}
    if last > 0:
        losses[f"stages {middle - 1} and {middle} lost"] = frozenset({middle - 1, middle})
    modes = (OFF, MIDDLE, PLUS) if given.checkfree is None else (given.checkfree,)
    return [
        (name, mode, decide(failure(blocks, lost, _asked(mode)))) for name, lost in losses.items() for mode in modes
    ]


def _all_text(failures: list[tuple[str, str, Decision]]) -> str:
    kinds = [(str(number), name, *row) for number, (name, row) in enumerate(_KINDS.items(), 1)]
    rows = [(name, mode, found.rung, _why(found)) for name, mode, found in failures]
    return "\n\n".join(
        (
            table(("", *_COLUMNS), kinds),
            table(("what happened", "CheckFree", "rung", "because"), rows),
        )
    )


def _why(decision: Decision) -> str:
    """Return the reason of a decision; for a restart, why the rungs before it cannot be used."""
    _, found, against = decision.reason.partition(f"{AGAINST}: ")
    return against.split(";")[0] if found else decision.reason


def _all_values(failures: list[tuple[str, str, Decision]]) -> dict[str, Any]:
    kinds = [dict(zip(_COLUMNS, (name, *row), strict=True)) for name, row in _KINDS.items()]
    cases = [{"what": name, "checkfree": mode, **_values(found)} for name, mode, found in failures]
    return {"rungs": kinds, "cases": cases}


def _values(decision: Decision) -> dict[str, Any]:
    rebuilt = {} if decision.plan is None else decision.plan.rebuilt
    beside = {str(rank): neighbours.there for rank, neighbours in rebuilt.items()}
    return {"rung": decision.rung, "reason": decision.reason, "rebuilt": beside}
