"""Implement ``ft diagnose silent``: which machines and devices have computed wrongly in several runs."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ft.platform import suspects

if TYPE_CHECKING:
    from ft.observe.diagnose.silent import Device, Silent

_DESCRIPTION = """\
Read what double execution (--ft-dmr) has recorded in the events of runs, and list the devices that computed wrongly:
how often, in which operators, and what followed. A device is to be pulled if it was wrong in several steps or was
evicted; one mismatch may be a cosmic ray. An operator that differs on several devices is not reproducible, and no
device is at fault. With --out the devices are added to a file, and ft run --suspects FILE uses none that is to be
pulled."""

_EPILOG = "exit code: 0 nothing was wrong, 1 there were mismatches, 2 a run cannot be read"
_HEAD = ("advice", "host", "device", "runs", "steps", "mismatches", "operators", "then")


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "silent",
        help="list the machines and devices that computed wrongly in runs with double execution",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="folder that was given to ft run as --run-dir"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="add the devices to this file for ft run --suspects")
    parser.add_argument("--json", action="store_true", help="print JSON with every step instead of tables")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Print which devices computed wrongly.

    Returns:
        0 if none did, 1 otherwise.

    Raises:
        UserError: a folder contains no run, or cannot be read, or the file of suspects cannot be read or written.
    """
    from ft.observe.diagnose.silent import as_values, read, silent, suspects_of

    found = silent(read(given.runs))
    every = None if given.out is None else suspects.add(given.out, suspects_of(found))
    print(json.dumps(as_values(found)) if given.json else as_text(found))
    if every is not None and not given.json:
        pulled = sum(one.advice == suspects.PULL for one in every)
        print(f"\n{given.out} has {len(every)} device(s) now, {pulled} of them to pull")
    return 1 if found.devices else 0


def as_text(found: "Silent") -> str:
    """Return the result as text: a line about the runs, the devices, the operators, and what to do."""
    from ft.observe.diagnose.silent import PULL
    from ft.show.text import count, table

    lines = [count(len(found.histories), "run")]
    shares = [(*one.coverage, one.name) for one in found.histories if one.coverage is not None]
    if shares:
        share, step, name = min(shares)
        lines.append(f"least coverage: {share:.2%} of the operators, in step {step} of {name}")
    if not found.devices:
        return "\n".join([*lines, "no mismatch is on record"])
    lines += ["", table(_HEAD, [_row(one) for one in found.devices], right=(3, 4, 5))]
    for name, places in found.operators.items():
        lines.append(f"\n{name} differed on {len(places)} devices: it is not reproducible there; leave it out, see")
        lines.append("  ft dmr selftest")
    hosts = sorted({one.host for one in found.devices if one.advice == PULL})
    return "\n".join([*lines, *(["", f"pull: {', '.join(hosts)}"] if hosts else [])])


def _row(one: "Device") -> tuple[str, ...]:
    most = one.operators.most_common(3)
    operators = ", ".join(f"{name} ({times})" for name, times in most)
    more = len(one.operators) - len(most)
    counted = ((one.corrected, "corrected"), (one.evicted, "evicted"), (one.ended, "ended the run"))
    then = ", ".join(f"{number} {what}" for number, what in counted if number)
    numbers = (len(one.runs), len(one.steps), one.mismatches)
    return (one.advice, one.host, one.device, *map(str, numbers), operators + (f", {more} more" if more else ""), then)
