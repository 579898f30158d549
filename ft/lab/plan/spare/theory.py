"""Implement ``ft plan spare theory``: evaluate the closed-form results of the SPARe paper for given sizes.

In SPARe each part (shard type) of a step's data is hosted by r of N groups of ranks (r is the redundancy). A wipe-out
is the loss of all hosts of a type. The stack depth is the number of types that each group computes in a step. A patch
compute is the additional computation of missing types in a step that a failure has interrupted.
"""

import argparse
from typing import Any

from ft.base.quantities import argument, whole
from ft.lab.plan.spare.flags import add_sizes, as_json, sizes
from ft.lab.simulate.spare import theory
from ft.show.text import left_out, table

_DESCRIPTION = """\
Evaluate the closed forms of the SPARe paper: failures up to the first wipe-out (3), stacks per step by (5) and by its
lower bound (6), the probability rho that a failure after k others needs a patch compute, and the rule of thumb r*
(8)."""

LEFT_OUT = left_out("groups that return before a wipe-out", "bursts of failures", "failures during restarts", "jitter")

_number = argument(whole(-(10**18), 10**18))


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "theory",
        help="failures endured and stacks per step, by the formulas of the paper",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_sizes(parser)
    parser.add_argument("--failures", type=_number, metavar="K", help="number of earlier failures, for rho")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Print the results.

    Raises:
        UserError: a size or the number of failures is invalid.
    """
    answers = [answer(groups, redundancy, given.failures) for groups, redundancy in sizes(given)]
    print(as_json(given, answers) if given.json else f"{LEFT_OUT}\n\n{_as_text(given, answers)}")
    return 0


def answer(groups: int, redundancy: int, failures: int | None = None) -> dict[str, Any]:
    """Return name -> value of the closed forms for one pair of sizes.

    The result contains ``rho``, the probability that a further failure needs a patch compute, only if ``failures``, the
    number of earlier failures, is given.

    Raises:
        UserError: as in :mod:`ft.lab.simulate.spare.theory`.
    """
    found: dict[str, Any] = {
        "mu": theory.mu(groups, redundancy),
        "stack_lower_bound": theory.stack_lower_bound(groups, redundancy),
        "stack_mean": theory.stack_mean(groups, redundancy),
        "r_star": theory.r_star(groups),
    }
    if failures is not None:
        found["rho"] = theory.rho(groups, failures)
    return found


def _as_text(given: argparse.Namespace, answers: list[dict[str, Any]]) -> str:
    head = ["groups", "redundancy", "failures (3)", "stack bound (6)", "stacks per step (5)", "r* (8)"]
    rows = [
        [
            *(str(size), str(redundancy), f"{found['mu']:.1f}", f"{found['stack_lower_bound']:.2f}"),
            *(f"{found['stack_mean']:.2f}", str(found["r_star"])),
        ]
        for (size, redundancy), found in zip(sizes(given), answers, strict=True)
    ]
    if given.failures is not None:
        head.append(f"rho after {given.failures}")
        for row, found in zip(rows, answers, strict=True):
            row.append(f"{found['rho']:.3f}")
    return table(head, rows, right=range(len(head)))
