"""Implement ``ft plan spare optimize``: recommend the redundancy with which SPARe trains fastest.

In SPARe each part (shard type) of a step's data is hosted by several groups of ranks; the redundancy R is their number.
A number in parentheses in a text of this command is the number of a formula in the SPARe paper.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.lab.plan.spare.optimum import WITHOUT, Choice, Optimum, choice, optimum
from ft.lab.plan.spare.simulate import add_flags, asked_for
from ft.lab.simulate.spare import theory
from ft.lab.simulate.spare.scenario import Scenario
from ft.lab.simulate.spare.study import row
from ft.lab.simulate.spare.table import LEFT_OUT
from ft.show.text import count, percent, seconds, table
from ft.systems.spare.ruler import largest_redundancy, ruler

_DESCRIPTION = """\
Recommend the redundancy with which training is fastest: by the rule of thumb (8), by the minimum of formula (7), and by
the minimum of simulated runs, which include what the formulas neglect (bursts of failures, failures during restarts,
jitter). The numbers are those of the formulas in the SPARe paper. Checkpoints alone are compared, too, and recommended
if no redundancy pays off. Times are in seconds, or have a unit, such as 5m. The output of --json is a plan for
ft run --ft-spare-plan; for this give --stack and --all-reduce as they are in that run."""

_FLAGS = (
    *("groups", "mtbf", "restart", "save", "redundancy", "steps", "stack", "all-reduce", "law", "shape", "trace"),
    *("clocks", "shrink", "controller", "jitter", "jitter-per", "seeds", "seed", "limit"),
)


def add_parser(subparsers) -> None:
    """Add the subcommand ``optimize``."""
    parser = subparsers.add_parser(
        "optimize",
        help="recommend a redundancy and its checkpoint period",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, _FLAGS)
    parser.add_argument("--no-simulation", action="store_true", help="formulas only")
    parser.add_argument("--plot", metavar="FILE", help="a picture of it, PNG")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: an object, or a list of objects for several --groups"
    )
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison and the recommendation, and draw a picture if the flags ask for one.

    Raises:
        UserError: the flags are inconsistent, a redundancy cannot be placed, or the picture cannot be written.
    """
    arguments.scheme = None
    several = asked_for(arguments, _FLAGS)
    if math.isinf(several[0].mtbf_s):
        raise UserError("without failures there is nothing to optimize", "choose another --law, and give --mtbf")
    if arguments.plot is not None and len(several) > 1:
        raise UserError(
            "a picture shows a single number of groups, and there are several", "give one --groups, or remove --plot"
        )
    found = [(asked, _answer(asked, not arguments.no_simulation)) for asked in several]
    if arguments.json:
        values = [as_values(*each) for each in found]
        print(json.dumps(values[0] if len(values) == 1 else values))
    else:
        print("\n\n".join([LEFT_OUT, *(as_text(*each) for each in found)]))
    if arguments.plot is not None:
        # Import the picture module here: importing matplotlib takes longer than everything else in this command.
        from ft.lab.plan.spare.picture import draw

        try:
            draw(*found[0], Path(arguments.plot))
        except (OSError, ValueError) as error:
            raise UserError(f"the picture cannot be written: {error}", "give --plot a path ending in .png") from error
    return 0


def _answer(asked: Scenario, simulated: bool) -> Optimum:
    groups = asked.job.groups
    candidates = asked.redundancy
    if not candidates:
        candidates = range(2, min(largest_redundancy(groups), 2 * theory.r_star(groups) + 2) + 1)
    if not candidates:
        raise UserError(f"{groups} groups are too few for a redundancy of 2", "give more --groups")
    for redundancy in candidates:
        ruler(groups, redundancy)
    law = asked.failures()
    choices = [choice(asked, each, row(asked, law, "spare", each) if simulated else None) for each in candidates]
    alone = row(asked, law, "checkpoint", 1) if simulated else None
    return optimum(asked, choices, choice(asked, WITHOUT, alone))


def as_values(asked: Scenario, found: Optimum) -> dict[str, Any]:
    """Return the comparison as JSON values, with times in seconds."""
    return {
        "groups": asked.job.groups,
        "r_star": found.r_star,
        "argmin_theory": found.argmin_theory,
        "argmin_simulated": found.argmin_simulated,
        "recommended": found.recommended,
        "reason": found.reason,
        "checkpoint_period_s": found.period_s,
        "checkpoint_interval_steps": found.interval,
        "choices": [_values(one) for one in found.choices],
        "checkpoints_alone": _values(found.without),
    }


def _values(one: Choice) -> dict[str, Any]:
    values = {
        "redundancy": one.redundancy,
        "ttt_norm": one.ttt_norm,
        "availability": one.availability,
        "checkpoint_period_s": one.period_s,
        "checkpoint_interval_steps": one.interval,
    }
    if one.simulated is not None:
        for name, each in one.simulated.found.items():
            values[f"simulated_{name}"] = each.mean if math.isfinite(each.mean) else None
        values["simulated_ttt_norm_confidence"] = one.simulated.found["ttt_norm"].half_width
        values["given_up"] = one.simulated.given_up
    return values


def as_text(asked: Scenario, found: Optimum) -> str:
    """Return the comparison as a table, and the recommendation with its reason."""
    head = ("R", "time to train (7)", "available (2)", "simulated", "available", "up", "restarts", "checkpoint every")
    rows = [_cells(one) for one in (found.without, *found.choices)]
    simulated = "-" if found.argmin_simulated is None else str(found.argmin_simulated)
    return "\n".join(
        [
            f"{asked.job.groups} groups, a failure every {seconds(asked.mtbf_s)}, a restart takes "
            f"{seconds(asked.job.restart_s)}, a checkpoint {seconds(asked.job.save_s)}",
            "",
            table(head, rows, right=range(8)),
            "",
            f"rule of thumb (8): R = {found.r_star}; least of (7): R = {found.argmin_theory}; "
            f"least of the simulation: R = {simulated}",
            f"recommended: {_named(found)}, a checkpoint every {seconds(found.period_s)} "
            f"({count(found.interval, 'step')})",
            f"because {found.reason}",
        ]
    )


def _named(found: Optimum) -> str:
    return "checkpoints alone" if found.recommended == WITHOUT else f"R = {found.recommended}"


def _cells(one: Choice) -> list[str]:
    formulas = [
        "none" if one.redundancy == WITHOUT else str(one.redundancy),
        f"{one.ttt_norm:.3f}",
        percent(one.availability),
    ]
    if one.simulated is None:
        return [*formulas, "-", "-", "-", "-", seconds(one.period_s)]
    measured = one.simulated.found
    mean, half = measured["ttt_norm"].mean, measured["ttt_norm"].half_width
    text = "never" if math.isinf(mean) else f"{mean:.3f}" + ("" if half is None else f" +- {half:.3f}")
    shares = [percent(measured[name].mean) for name in ("availability", "up_fraction")]
    return [*formulas, text, *shares, f"{measured['restarts'].mean:.1f}", seconds(one.period_s)]
