"""``ft plan policy``."""

import argparse
import json
from typing import Any

from ft.control.rungs import CHECKFREE, CHECKPOINT, GIVE_UP, HOT_SWAP, MIDDLE, OFF, PLUS, RUNGS, Choice, Loss, choose
from ft.errors import UserError
from ft.report.text import table

_DESCRIPTION = """\
The rungs of recovery in their order, and which of them serves after which failure. The same function decides in a run.
With --lost, it answers for one failure."""

_RUNGS = {
    HOT_SWAP: ("--ft-hot-swap", "own snapshots and peer copies of one step", "at most one step"),
    CHECKFREE: ("--ft-checkfree[-plus]", "the neighbours of each lost stage", "no step; the stage is an estimate"),
    CHECKPOINT: ("--save", "a persistent checkpoint, a warm restart", "the steps since it was written"),
    GIVE_UP: ("-", "-", "the run ends with a message"),
}


def add_parser(questions) -> None:
    """Adds the subcommand."""
    parser = questions.add_parser(
        "policy",
        help="the order of recovery rungs, and which serves after which failure",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pp", type=int, metavar="P", help="pipeline stages; default: those of --blocks, or 6")
    parser.add_argument("--blocks", metavar="N,N,...", help="transformer blocks of each stage; default: all the same")
    parser.add_argument("--lost", metavar="S,S,...", help="stages whose state nobody holds; '' for none")
    parser.add_argument("--checkfree", choices=(OFF, MIDDLE, PLUS), help=f"with --lost; default: {OFF}")
    parser.add_argument("--no-common-step", action="store_true", help="the other stages hold no common step")
    parser.add_argument("--no-checkpoint", action="store_true", help="there is no persistent checkpoint")
    parser.add_argument("--no-restarts", action="store_true", help="warm restarts are used up")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Prints the rungs and what typical failures come to, or the answer for one failure.

    Raises:
        UserError: the stages make no sense.
    """
    blocks = _blocks(given)
    if given.lost is None:
        failures = _typical(blocks, given)
        print(json.dumps(_all_values(failures)) if given.json else _all_text(failures))
        return 0
    choice = choose(_loss(blocks, _lost(given.lost, len(blocks)), given), given.checkfree or OFF)
    print(json.dumps(_values(choice)) if given.json else _text(choice))
    return 0


def _blocks(given: argparse.Namespace) -> tuple[int, ...]:
    alike = (1,) * (6 if given.pp is None else given.pp)
    blocks = alike if given.blocks is None else _numbers(given.blocks)
    if len(blocks) != (given.pp or len(blocks)) or min(blocks, default=0) < 1:
        raise UserError(f"--pp {given.pp} and {len(blocks)} stages with blocks", "give each stage at least one block")
    return blocks


def _lost(text: str, stages: int) -> frozenset[int]:
    lost = frozenset(_numbers(text)) if text.strip() else frozenset()
    if any(not 0 <= stage < stages for stage in lost):
        raise UserError(f"--lost {text}: stages are 0 to {stages - 1}", "give stages that there are")
    return lost


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{text!r} are no whole numbers", "give them with commas between, as 4,4,4") from None


def _loss(blocks: tuple[int, ...], lost: frozenset[int], given: argparse.Namespace) -> Loss:
    step = None if given.no_common_step else 0
    return Loss(blocks, lost, step, not given.no_checkpoint, 0 if given.no_restarts else 1)


def _typical(blocks: tuple[int, ...], given: argparse.Namespace) -> list[tuple[str, str, Choice]]:
    """(what happened, CheckFree, the choice) for the failures one should have thought of."""
    last, middle = len(blocks) - 1, len(blocks) // 2
    losses = {"ranks die, peer copies exist": frozenset()}
    losses |= {f"stage {stage} lost everywhere": frozenset({stage}) for stage in (middle, 0, last)}
    if last > 0:
        losses[f"stages {middle - 1} and {middle} lost"] = frozenset({middle - 1, middle})
    modes = (OFF, MIDDLE, PLUS) if given.checkfree is None else (given.checkfree,)
    return [(name, mode, choose(_loss(blocks, lost, given), mode)) for name, lost in losses.items() for mode in modes]


def _all_text(failures: list[tuple[str, str, Choice]]) -> str:
    rungs = [(str(i), rung, *_RUNGS[rung]) for i, rung in enumerate(RUNGS, 1)]
    rows = [(name, mode, choice.rung, _why(choice)) for name, mode, choice in failures]
    return "\n\n".join(
        (
            table(("", "rung", "flag", "needs", "loses"), rungs),
            table(("what happened", "CheckFree", "rung", "because"), rows),
        )
    )


def _why(choice: Choice) -> str:
    """What decided: why a rung with conditions serves, or why the one above the others does not."""
    return choice.reason if choice.rung in (HOT_SWAP, CHECKFREE) else choice.passed[-1][1]


def _text(choice: Choice) -> str:
    lines = [f"not {rung}: {why}" for rung, why in choice.passed]
    return "\n".join([*lines, f"{choice.rung}: {choice.reason}"])


def _all_values(failures: list[tuple[str, str, Choice]]) -> dict[str, Any]:
    rungs = [dict(zip(("rung", "flag", "needs", "loses"), (rung, *_RUNGS[rung]), strict=True)) for rung in RUNGS]
    cases = [{"what": name, "checkfree": mode, **_values(choice)} for name, mode, choice in failures]
    return {"rungs": rungs, "cases": cases}


def _values(choice: Choice) -> dict[str, Any]:
    passed = [{"rung": rung, "why_not": why} for rung, why in choice.passed]
    return {"rung": choice.rung, "reason": choice.reason, "passed": passed}
