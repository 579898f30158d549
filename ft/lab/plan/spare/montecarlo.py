"""Implement ``ft plan spare montecarlo``: simulate random failures up to the wipe-out (SPARe, appendix C).

In SPARe each part (shard type) of a step's data is hosted by several groups of ranks. A wipe-out is the loss of all
hosts of a type. After each failure the controller computes the stack depth S, the number of types that each group has
to compute in a step; a patch compute is the additional computation of missing types in the interrupted step.
"""

import argparse
from typing import Any

from ft.base.quantities import argument, whole
from ft.lab.plan.spare.flags import add_sizes, as_json, sizes
from ft.lab.plan.spare.trials import Outcome, run_trials
from ft.lab.simulate.spare import theory
from ft.show.text import left_out, table
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import ruler

_DESCRIPTION = """\
Simulate random failures with the controller up to the first wipe-out, as in appendix C of the SPARe paper. The
output has the number of failures including the fatal one, the mean stack S before each failure, and the share of
failures that needed a patch compute. With numba (pip install 'megatron-ft[fast]') the same trials take a fiftieth of
the time."""

LEFT_OUT = left_out("time", "groups that return before the wipe-out", "failure domains")

_number = argument(whole(-(10**18), 10**18))


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "montecarlo",
        help="failures endured and stacks computed, from random trials of the controller",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_sizes(parser)
    parser.add_argument("--trials", type=_number, default=1000, metavar="T", help="default: 1000")
    parser.add_argument("--seed", type=_number, default=0, metavar="S", help="seed of the random failures (default: 0)")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Print the results of the trials.

    Raises:
        UserError: a size cannot be placed, or the number of trials or the seed is invalid.
    """
    placements = [Placement(groups, ruler(groups, redundancy)) for groups, redundancy in sizes(given)]
    outcomes = [run_trials(placement, given.trials, given.seed) for placement in placements]
    if given.json:
        print(as_json(given, [as_values(outcome) for outcome in outcomes]))
    else:
        print(f"{LEFT_OUT}\n\n{_as_text(sizes(given), outcomes)}")
    return 0


def as_values(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as JSON values; ``patch_rate`` and ``failures_sem`` are null where undefined."""
    return {
        "failures_mean": outcome.failures_mean,
        "failures_sem": outcome.failures_sem,
        "stack_mean": outcome.stack_mean,
        "patch_rate": outcome.patch_rate,
    }


def _as_text(asked: list[tuple[int, int]], outcomes: list[Outcome]) -> str:
    head = ["groups", "redundancy", "failures", "+-", "by (3)", "stack", "by (6)", "patch rate"]
    rows = [
        [
            *(str(groups), str(redundancy), f"{found.failures_mean:.1f}", _or_dash(found.failures_sem, 2)),
            *(f"{theory.mu(groups, redundancy):.1f}", f"{found.stack_mean:.3f}"),
            *(f"{theory.stack_lower_bound(groups, redundancy):.2f}", _or_dash(found.patch_rate, 3)),
        ]
        for (groups, redundancy), found in zip(asked, outcomes, strict=True)
    ]
    return table(head, rows, right=range(len(head)))


def _or_dash(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
