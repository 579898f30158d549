"""Implement ``ft diagnose compare``: compare the checkpoints of several runs of the same training bit for bit.

The command reports the first step, parameter and logical rank (position in the parallel grid) that differ, and which
run deviates from the majority. It locates silent data corruption.
"""

import argparse
import json
from pathlib import Path

_DESCRIPTION = """\
Compares the checkpoints of several runs of one training with --deterministic-mode, step by step and bit for bit (NaN
is equal to itself), and stops at the first step at which they differ: which parameters, optimizer states and generators
do, by how much, and which logical ranks wrote them. With three runs or more the majority says which run is the outlier
(FT-HSDP, section 2.2: the same training on several hosts finds the one that corrupts data)."""

_EPILOG = """\
exit code: 0 all steps are equal, 1 they differ, 2 the runs cannot be compared

With --save-interval 1 the faulty step is told exactly; a step or two later everything differs. With the distributed
optimizer, --no-dist-ckpt-optim-fully-reshardable stores the shard of every rank as it is, so that its rank is known."""

_SHOWN = 20


def add_parser(questions) -> None:
    """Add the subcommand."""
    parser = questions.add_parser(
        "compare",
        help="the first step, parameter and rank that differ among runs that should be equal, and the outlier",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a --save folder; two or more")
    parser.add_argument("--step", type=int, action="append", help="only this step; may be repeated (default: all)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="take files for equal whose sizes and CRC-32 are, by the manifests: reads the first differing step only",
    )
    parser.add_argument("--show", type=int, default=_SHOWN, metavar="N", help=f"lines of the table (default: {_SHOWN})")
    parser.add_argument("--json", action="store_true", help="JSON, with everything that differs, instead of tables")
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
