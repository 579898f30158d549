"""Implement ``ft dmr selftest``, which finds the operators that are not reproducible bit for bit on this machine.

DMR must not compare operators that are not reproducible, and reads their names from a file that this command can write.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from ft.base.errors import UserError
from ft.show.text import steer

_DESCRIPTION = """\
Train small models of every kind for two steps on this machine's device, execute every operator repeatedly on its actual
inputs, and list the operators whose results are not equal bit for bit. DMR would raise false alarms about them.
Exit code 0: all operators are stable; 1: some are not; 2: the flags are invalid."""


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "selftest",
        help="find the operators that are not reproducible on this machine",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = "flags of the trainer for the model to train instead; it is trained on one rank with mock data"
    parser.add_argument("--flags", metavar="FLAGS", help=own)
    parser.add_argument(
        "--layers", type=int, default=0, metavar="N", help="(with --flags) train at most N layers; 0: all layers"
    )
    parser.add_argument(
        "--runs", type=int, default=10, metavar="N", help="number of repetitions of a call; default: 10"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="number of CPU threads; default: that of torch")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="use torch's deterministic algorithms, as training with --deterministic-mode does",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the names of the unstable operators to this file, for --ft-dmr-unstable"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the self-test, print its result, and return 0 if all operators are stable, 1 if some are not.

    Raises:
        UserError: the flags are invalid, or the file cannot be written.
    """
    _refuse(arguments)
    # Import torch and megatron-core after the flags were checked, because importing them takes seconds.
    import torch

    from ft.lab.reproducibility.probe import as_text, as_values
    from ft.systems.dmr.plan.file import write_unstable
    from megatron import patches
    from megatron.ft_trainer.logging.quiet import quieten
    from megatron.patches.manifest import WITH_DMR

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
    """Run the self-test; call ``megatron.patches.apply`` before.

    Returns:
        an ``ft.lab.reproducibility.probe.ProbeResult``.

    Raises:
        UserError: the flags do not work.
    """
    import torch

    from ft.lab.reproducibility.probe import Case, Probe, ProbeResult, cases
    from ft.lab.reproducibility.steps import watch
    from megatron import patches

    here = patches.platform()
    chosen = cases(here.name, deterministic=arguments.deterministic)
    if arguments.flags is not None:
        flags = f"{arguments.flags} --deterministic-mode" if arguments.deterministic else arguments.flags
        chosen = [Case("own", flags)]
    probe = Probe(arguments.runs)
    for number, case in enumerate(chosen, 1):
        if sys.stderr.isatty():
            steer(sys.stderr, "\r\x1b[K")
            print(f"{number} of {len(chosen)}: {case.name}", end="", file=sys.stderr, flush=True)
        watch(case, probe, arguments.layers)
    if sys.stderr.isatty():
        steer(sys.stderr, "\r\x1b[K")
    return ProbeResult(
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
        raise UserError("--layers without --flags: the built-in models have 2", "remove --layers, or give --flags")
    if arguments.out and not Path(arguments.out).parent.is_dir():
        raise UserError(f"there is no folder {Path(arguments.out).parent}", "give --out a file in an existing folder")
    try:
        shlex.split(arguments.flags or "")
    except ValueError as error:
        raise UserError(f"--flags cannot be read: {error}", "quote the value of --flags as for a shell") from error
