"""Implement ``ft plan snapshot``: compare cost and risk of keeping k copies of each rank's training state on peers."""

import argparse
import json

from ft.lab.plan.snapshot.answer import answer
from ft.lab.plan.snapshot.flags import add_flags, plan_of
from ft.lab.plan.snapshot.table import as_text, as_values

_DESCRIPTION = """\
Compute the cost and the remaining risk of snapshots with k peer copies of each state, for k = 1, 2, 3: host memory,
bytes sent in each step and whether the step hides them, and the probability that a failure loses state. Give the
trainer's flags after the name of its script, or the size of the model with --params.

  ft plan snapshot --nodes 64 --nodes-per-rack 4 --step-time 10s --params 70B pretrain_gpt.py \\
      --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --use-distributed-optimizer"""


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "snapshot",
        help="compute what peer copies cost in memory and bandwidth, and the remaining risk",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table or, with ``--json``, the values.

    Raises:
        UserError: the flags are invalid or contradict each other.
    """
    plan = plan_of(arguments)
    answers = [answer(plan.question, k) for k in plan.copies]
    print(json.dumps(as_values(plan, answers)) if arguments.json else as_text(plan, answers))
    return 0
