"""Implement ``ft diagnose compare``: compare the checkpoints of several runs of the same training bit for bit.

The command reports the first step, parameter and logical rank (position in the parallel grid) that differ, and which
run deviates from the majority. It locates silent data corruption.
"""

import argparse
import json
from pathlib import Path

_DESCRIPTION = """\
Compare the checkpoints of several runs of one training with --deterministic-mode, step by step and bit for bit (NaN
equals NaN), up to the first step at which they differ. The output says which parameters, optimizer states and random
generators differ, by how much, and which logical ranks wrote them. With three or more runs, the majority shows which
run is the outlier (FT-HSDP, section 2.2: the same training on several hosts finds the host that corrupts data)."""

_EPILOG = """\
exit code: 0 all steps are equal, 1 they differ, 2 the runs cannot be compared

With --save-interval 1 the faulty step is known exactly; a step or two later everything differs. With the distributed
optimizer, --no-dist-ckpt-optim-fully-reshardable stores the shard of every rank separately, so that its rank is
known."""

_SHOWN = 20


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "compare",
        help="find the first step, parameter and rank at which equal runs differ, and the run that deviates",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="folder that was given to a run as --save; give two or more"
    )
    parser.add_argument(
        "--step", type=int, action="append", help="compare only this step; may be repeated (default: all steps)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="treat files as equal if their sizes and CRC-32 in the manifests are equal; then only the first "
        "differing step is read",
    )
    parser.add_argument(
        "--show", type=int, default=_SHOWN, metavar="N", help=f"number of lines of the table (default: {_SHOWN})"
    )
    parser.add_argument("--json", action="store_true", help="print JSON with everything that differs instead of tables")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Compare the runs and print the result.

    Returns:
        0 if they are equal, 1 if they differ.

    Raises:
        UserError: a folder, a checkpoint or their combination cannot be compared.
    """
    # Import these modules here, so that showing the help does not wait for the import of torch.
    from ft.observe.diagnose.compare import compare
    from ft.observe.diagnose.runs import open_runs
    from ft.observe.diagnose.text import as_text, as_values

    found = compare(open_runs(given.runs), given.step, quick=given.quick)
    print(json.dumps(as_values(found)) if given.json else as_text(found, given.show))
    return 1 if found.findings else 0
