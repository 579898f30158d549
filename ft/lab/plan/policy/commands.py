"""Implement ``ft plan policy``: show the kinds of recovery in order of preference, and which one follows a failure.

The kinds of recovery are: from copies of the lost state in peers' memory; by CheckFree, which rebuilds a lost pipeline
stage from its neighbours' parameters; and by a restart from a checkpoint. The decisions shown are computed by
the control plane's own code.
"""

import argparse
import json
from typing import Any

from ft.base.errors import UserError
from ft.job.control.recovery_plan import AGAINST, COPIES, MIDDLE, PLUS, REBUILD, RESTART, RecoveryPlan, decide
from ft.lab.plan.policy.failure import failure
from ft.show.text import table

_DESCRIPTION = """\
Show the kinds of recovery in order of preference, and which one follows which failure, as the control plane decides.
With --lost, show the decision for one failure."""

OFF = "off"
_MOST_STAGES = 1024

_COLUMNS = ("recovery", "flag", "needs", "loses")
_KINDS = {
    COPIES: ("--ft-hot-swap", "own snapshots and peer copies of one step", "at most one step"),
    REBUILD: ("--ft-checkfree[-plus]", "the neighbours of each lost stage", "no step; the stage is an estimate"),
    RESTART: ("--save", "a persistent checkpoint, a warm restart", "the steps since it was written"),
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


def run(given: argparse.Namespace) -> int:
    """Print the kinds of recovery and what follows typical failures, or the decision for one failure.

    Raises:
        UserError: the stages are invalid.
    """
    blocks = _blocks(given)
    if given.lost is None:
        failures = _typical(blocks, given)
        print(json.dumps(_all_values(failures)) if given.json else _all_text(failures))
        return 0
    plan = decide(*failure(blocks, _lost(given.lost, len(blocks)), _asked(given.checkfree)))
    print(json.dumps(_values(plan)) if given.json else f"{plan.name}: {plan.reason}")
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


def _typical(blocks: tuple[int, ...], given: argparse.Namespace) -> list[tuple[str, str, RecoveryPlan]]:
    """Return (description of the failure, CheckFree mode, decision) for typical failures."""
    last, middle = len(blocks) - 1, len(blocks) // 2
    losses = {"ranks die, peer copies exist": frozenset()}
    losses |= {f"stage {stage} lost everywhere": frozenset({stage}) for stage in (middle, 0, last)}
    if last > 0:
        losses[f"stages {middle - 1} and {middle} lost"] = frozenset({middle - 1, middle})
    modes = (OFF, MIDDLE, PLUS) if given.checkfree is None else (given.checkfree,)
    return [
        (name, mode, decide(*failure(blocks, lost, _asked(mode)))) for name, lost in losses.items() for mode in modes
    ]


def _all_text(failures: list[tuple[str, str, RecoveryPlan]]) -> str:
    kinds = [(str(number), name, *row) for number, (name, row) in enumerate(_KINDS.items(), 1)]
    rows = [(name, mode, plan.name, _why(plan)) for name, mode, plan in failures]
    return "\n\n".join(
        (
            table(("", *_COLUMNS), kinds),
            table(("what happened", "CheckFree", "recovery", "because"), rows),
        )
    )


def _why(plan: RecoveryPlan) -> str:
    """Return the reason of a decision; for a restart, why the preferred kinds of recovery cannot be used."""
    _, found, against = plan.reason.partition(f"{AGAINST}: ")
    return against.split(";")[0] if found else plan.reason


def _all_values(failures: list[tuple[str, str, RecoveryPlan]]) -> dict[str, Any]:
    kinds = [dict(zip(_COLUMNS, (name, *row), strict=True)) for name, row in _KINDS.items()]
    cases = [{"what": name, "checkfree": mode, **_values(plan)} for name, mode, plan in failures]
    return {"recoveries": kinds, "cases": cases}


def _values(plan: RecoveryPlan) -> dict[str, Any]:
    rebuilt = {str(rank): beside.there for rank, beside in plan.rebuilt.items()}
    return {"recovery": plan.name, "reason": plan.reason, "rebuilt": rebuilt}
