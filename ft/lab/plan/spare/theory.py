"""Closed forms of the SPARe paper (sections 2.2 and 4), and the command ``ft plan spare theory`` that shows them.

A number in parentheses is the number of the formula in the paper. N groups (replicas of the model) compute N shard
types (parts of a global batch), and each type is hosted by r groups (r is the redundancy). A group computes S types
(its stack) per step; k groups are lost so far. A wipe-out is the loss of all hosts of a type, which requires a global
restart from a checkpoint. A patch compute is the additional work of the survivors for types that a group has lost in
the current step.
"""

import argparse
import math
from typing import Any

from ft.base.errors import UserError
from ft.base.quantities import argument, whole
from ft.lab.plan.spare.flags import add_sizes, as_json, sizes
from ft.show.text import left_out, table
from ft.systems.spare.ruler import check_size

EULER_GAMMA = 0.57721566490153286

_DESCRIPTION = """\
Evaluate the closed forms of the SPARe paper: failures up to the first wipe-out (3), stacks per step by (5) and by its
lower bound (6), the probability rho that a failure after k others needs a patch compute, and the rule of thumb r*
(8)."""

LEFT_OUT = left_out("groups that return before a wipe-out", "bursts of failures", "failures during restarts", "jitter")

_number = argument(whole(-(10**18), 10**18))


def checkpoint_period(save: float, failure: float, restart: float) -> float:
    """Return the time between two checkpoints at which availability is highest (1).

    Args:
        save: T_s, duration of a checkpoint.
        failure: T_f, mean time between two global restarts.
        restart: T_r, duration of a global restart. All times have the same unit.
    """
    return save + math.sqrt(save**2 + 2 * save * (failure + restart))


def mu(groups: int, redundancy: int) -> float:
    """Return mu, the mean number of group failures up to the first wipe-out (3).

    Raises:
        UserError: there are fewer than 2 groups, or the redundancy is not in 2..groups.
    """
    check_size(groups, redundancy)
    return math.gamma(1 + 1 / redundancy) * groups ** (1 - 1 / redundancy)


def capacity(groups: int, failures: int) -> int:
    """Return c(k) = ceil(N / (N - k)), the smallest S with which N - k survivors can compute N types.

    Raises:
        UserError: ``failures`` is not in 0..groups - 1.
    """
    if not 0 <= failures < groups:
        raise UserError(f"{failures} failures among {groups} groups leave no group", f"give 0 to {groups - 1} failures")
    return -(-groups // (groups - failures))


def rho(groups: int, failures: int) -> float:
    """Return rho_k, the estimated probability that the next failure after ``failures`` needs a patch compute (5).

    It is the share of stack positions whose type no other group computes. The estimate is lower than measured values at
    high redundancy.

    Raises:
        UserError: as :func:`capacity`.
    """
    stack = capacity(groups, failures)
    return 2 * groups / ((groups - failures) * stack) - 1


def stack_mean(groups: int, redundancy: int) -> float:
    """Return the mean number of types per group and step up to the first wipe-out, with patch computes (5).

    Raises:
        UserError: as :func:`mu`.
    """
    mean = mu(groups, redundancy)
    return sum(capacity(groups, k) + rho(groups, k) for k in range(math.floor(mean))) / mean


def stack_lower_bound(groups: int, redundancy: int) -> float:
    """Return the mean number of types per group and step up to the first wipe-out, without patch computes (6).

    Raises:
        UserError: as :func:`mu`.
    """
    mean = mu(groups, redundancy)
    return sum(capacity(groups, k) for k in range(math.floor(mean))) / mean


def r_star(groups: int) -> int:
    """Return r*, the rule of thumb for the best redundancy, floor(log2 N + gamma / ln 2) (8).

    It is the r at which mu reaches N / 2, if r is large. It is not the r with the least time to train (7).

    Raises:
        UserError: there are fewer than 2 groups.
    """
    check_size(groups)
    return math.floor(math.log2(groups) + EULER_GAMMA / math.log(2))


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
        UserError: a size is invalid.
    """
    found: dict[str, Any] = {
        "mu": mu(groups, redundancy),
        "stack_lower_bound": stack_lower_bound(groups, redundancy),
        "stack_mean": stack_mean(groups, redundancy),
        "r_star": r_star(groups),
    }
    if failures is not None:
        found["rho"] = rho(groups, failures)
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
