"""Implement ``ft dmr selftest``, which finds the operators that are not reproducible bit for bit on this machine.

DMR (dual modular redundancy) executes each operator twice and compares the results. It must not compare operators that
are not reproducible, and reads their names from a file that this command can write.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from ft.base.errors import UserError

_DESCRIPTION = """\
Trains small models of every kind for two steps on this machine's device, executes every operator again and again on the
inputs that it comes with, and lists those that do not come out the same bit for bit. About these DMR would raise false
alarms. Exit code 0: all are stable; 1: some are not; 2: the flags make no sense."""


def add_parser(questions) -> None:
    """Add the subcommand."""
    parser = questions.add_parser(
        "selftest",
        help="which operators here are not reproducible",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = "the model to train instead, as the trainer's flags say: on one rank, with made-up data"
    parser.add_argument("--flags", metavar="FLAGS", help=own)
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="(with --flags) at most N layers; 0: all")
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="second executions of a call; default: 10")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU; default: torch's")
    parser.add_argument("--deterministic", action="store_true", help="as training with --deterministic-mode does")
    parser.add_argument("--out", metavar="FILE", help="names of the unstable ones, for --ft-dmr-unstable")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the self-test and print its result.

    Returns:
        0 if all operators are stable, 1 if some are not.

    Raises:
        UserError: the flags are invalid, or the file cannot be written.
    """
    _refuse(arguments)
    # Import torch and megatron-core after the flags were checked, because importing them takes seconds.
    import torch

    from ft.lab.selftest.text import as_text, as_values
    from ft.systems.dmr.unstable import write_unstable
    from megatron import patches
    from megatron.patches.manifest import WITH_DMR
    from megatron.training.logging.quiet import quieten

    quieten()
    patches.apply(WITH_DMR)  # the patches of a run with DMR
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    outcome = test(arguments)
    if arguments.out:
        write_unstable(Path(arguments.out), outcome.names())
    print(json.dumps(as_values(outcome)) if arguments.json else as_text(outcome))
    return 1 if outcome.unstable else 0


def test(arguments: argparse.Namespace):
    """Run the self-test and return an ``ft.lab.selftest.text.Outcome``; call ``megatron.patches.apply`` before.

    Raises:
        UserError: the flags do not work.
    """
    import torch

    from ft.lab.selftest.cases import Case, cases
    from ft.lab.selftest.probe import Probe
    from ft.lab.selftest.steps import watch
    from ft.lab.selftest.text import Outcome
    from megatron import patches

    here = patches.platform()
    chosen = cases(here.name, deterministic=arguments.deterministic)
    if arguments.flags is not None:
        flags = f"{arguments.flags} --deterministic-mode" if arguments.deterministic else arguments.flags
        chosen = [Case("own", flags)]
    probe = Probe(arguments.runs)
    for number, case in enumerate(chosen, 1):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{number} of {len(chosen)}: {case.name}", end="", file=sys.stderr, flush=True)
        watch(case, probe, arguments.layers)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return Outcome(
        device=torch.cuda.get_device_name() if here.name == "cuda" else "cpu",
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        cases=chosen,
        findings=list(probe.findings.values()),
    )


def _refuse(arguments: argparse.Namespace) -> None:
    if arguments.runs < 1:
        raise UserError(f"--runs is {arguments.runs}", "give at least 1")
    if arguments.threads is not None and arguments.threads < 1:
        raise UserError(f"--threads is {arguments.threads}", "give at least 1")
    if arguments.layers < 0:
        raise UserError(f"--layers is {arguments.layers}", "give 0 or more")
    if arguments.layers and arguments.flags is None:
        raise UserError("--layers without --flags: the built-in models have 2", "drop it, or give --flags")
    if arguments.out and not Path(arguments.out).parent.is_dir():
        raise UserError(f"there is no folder {Path(arguments.out).parent}", "name a file in one that exists")
    try:
        shlex.split(arguments.flags or "")
    except ValueError as error:
        raise UserError(f"--flags cannot be read: {error}", "quote it as a shell would") from error
