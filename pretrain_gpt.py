"""Pretrain a GPT with megatron-core: ``torchrun --nproc-per-node 4 pretrain_gpt.py <Megatron-LM's flags>``.

This runs NVIDIA's trainer where the installed megatron-core carries one (0.19, Python 3.12), otherwise, or with
``--reference-trainer``, the reference trainer of this project. The first line says which.
"""

import os
import sys

from ft.adapters.megatron_lm import start, tree
from ft.base.errors import UserError
from ft.commands import checkouts
from ft.job.agent import warm
from ft.job.agent.options import Script
from megatron.ft_trainer.arguments import Options, help_text, parse, refusals
from megatron.ft_trainer.arguments.needs import GPU, TE, is_here
from megatron.ft_trainer.launcher import launch_from
from megatron.ft_trainer.logging.quiet import quieten

HELP = {"-h", "--help"}


def main(argv: list[str]) -> int:
    """Parses the command line and trains; returns the exit code.

    0 finished or ended by a signal after saving, 1 failed, 2 the input cannot work.
    """
    try:
        is_nvidias, argv = tree.choose(argv, tree.installed_release())
        if is_nvidias:
            return run_nvidias(argv)
    except UserError as error:
        if is_first_rank():
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if HELP & set(argv):
        print(help_text() + tree.HELP)
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
        _, problems = refusals(argv, place.world_size, has_te=is_here(TE), has_gpu=is_here(GPU))
        error = UserError.of(problems)
    except UserError as torn:
        place, error = None, UserError.of([*error.problems, *torn.problems])
    if place is None or place.rank == 0:  # every rank has the same command line: one of them speaks
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def is_first_rank() -> bool:
    """Tells whether this process speaks for all ranks before they have met; a standby is no rank yet."""
    return os.environ.get("RANK", "0") == "0" and not os.environ.get("FT_STANDBY")


def run_nvidias(argv: list[str]) -> int:
    """Trains with NVIDIA's trainer on this rank, through the adapter if there are flags of this project.

    Raises:
        UserError: flags cannot work together, or a protection needs ``ft run`` and this process is no worker of it.
    """
    if HELP & set(argv):
        print(tree.HELP)
        return warm.run_script(str(tree.SCRIPT), False, argv)
    script = Script(str(tree.SCRIPT), False, argv)
    if not checkouts.has_own_flags(script):
        return warm.run_script(script.target, False, argv)
    place = launch_from(os.environ)
    options, problems = checkouts.examine(script, place.world_size, int(os.environ.get("FT_HSDP_REPLICAS", "0")))
    if options is None or problems:
        raise UserError.of(problems)
    if options.fault_tolerance.ft_hot_swap and "FT_RUN_DIR" not in os.environ:
        raise UserError("--ft-hot-swap has no effect under torchrun", "start with ft run, or drop it")
    return start.main(checkouts.adapted(script).args)


def run(options: Options) -> int:
    """Trains on this rank; errors are reported once for the whole job."""
    from megatron import patches

    if is_first_rank():
        print(tree.announcement(None), flush=True)

    patches.apply()  # before any module of megatron.core is imported
    from megatron.ft_trainer.launch import launch

    return launch(options)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(exit_code)
