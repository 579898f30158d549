"""Pretrain a GPT with megatron-core: ``torchrun --nproc-per-node 4 pretrain_gpt.py <Megatron-LM's flags>``."""

import os
import sys

from ft.base.errors import UserError
from megatron.ft_trainer.arguments import Options, help_text, may_have_gpu, may_have_te, parse, refusals
from megatron.ft_trainer.launcher import launch_from
from megatron.ft_trainer.logging.quiet import quieten


def main(argv: list[str]) -> int:
    """Parses the command line and trains; returns the exit code.

    0 finished or ended by a signal after saving, 1 failed, 2 the input cannot work.
    """
    if "-h" in argv or "--help" in argv:
        print(help_text())
        return 0
    try:
        options = parse(argv)
    except UserError as error:
        return refuse(argv, error)
    quieten(options.logging.logging_level)
    return run(options)


def refuse(argv: list[str], error: UserError) -> int:
    """Says all that is wrong with the command line, of which ``error`` is a part; returns the exit code."""
    try:
        place = launch_from(os.environ)
        _, problems = refusals(argv, place.world_size, has_te=may_have_te(), has_gpu=may_have_gpu())
        error = UserError.of(problems)
    except UserError as torn:
        place, error = None, UserError.of([*error.problems, *torn.problems])
    if place is None or place.rank == 0:  # every rank has the same command line: one of them speaks
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def run(options: Options) -> int:
    """Trains on this rank; errors are reported once for the whole job."""
    from megatron import patches

    patches.apply()  # before any module of megatron.core is imported
    from megatron.ft_trainer.launch import launch

    return launch(options)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(exit_code)
