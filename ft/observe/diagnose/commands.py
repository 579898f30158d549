"""Implement ``ft diagnose``, which finds the causes of errors, in devices and in runs that crash or hang."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ft.base import events
from ft.base.errors import UserError
from ft.base.flags import add_group
from ft.platform import suspects
from ft.record.inspections import inspections_of
from ft.record.run import EVENTS, parts

if TYPE_CHECKING:
    from ft.observe.diagnose.silent import Silent, SilentDevice
    from ft.record.crash import Crash

_COMPARE = """\
Compare the checkpoints of several runs of one training with --deterministic-mode, step by step and bit for bit (NaN
equals NaN), up to the first step at which they differ. The output says which parameters, optimizer states and random
generators differ, by how much, and which logical ranks wrote them. With three or more runs, the majority shows which
run is the outlier (FT-HSDP, section 2.2: the same training on several hosts finds the host that corrupts data)."""

_COMPARE_CODES = """\
exit code: 0 all steps are equal, 1 they differ, 2 the runs cannot be compared

With --save-interval 1 the faulty step is known exactly; a step or two later everything differs. NVIDIA's trainer
stores each rank's shard of the distributed optimizer separately, so that its rank is known; the reference trainer does
with --no-dist-ckpt-optim-fully-reshardable."""

_SHOWN = 20
_RUN_DIR = "folder that was given to ft run as --run-dir"


def _add(subparsers, name: str, main: Callable[[argparse.Namespace], int], **about: str) -> argparse.ArgumentParser:
    """Add a subcommand that ``main`` runs; ``about``: ``help``, ``description`` and ``epilog``."""
    parser = subparsers.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **about)
    parser.set_defaults(main=main)
    return parser


def _add_compare(subparsers) -> None:
    about = "find the first step, parameter and rank at which equal runs differ, and the run that deviates"
    parser = _add(subparsers, "compare", run_compare, help=about, description=_COMPARE, epilog=_COMPARE_CODES)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="folder that was given to a run as --save; give two or more"
    )
    parser.add_argument(
        "--step", type=int, action="append", help="compare only this step; may be repeated (default: all steps)"
    )
    parser.add_argument(
        "--show", type=int, default=_SHOWN, metavar="N", help=f"number of lines of the table (default: {_SHOWN})"
    )
    parser.add_argument("--json", action="store_true", help="print JSON with everything that differs instead of tables")


def run_compare(given: argparse.Namespace) -> int:
    """Compare the runs and print the result; return 0 if they are equal, 1 if they differ."""
    from megatron.ft_trainer.logging.quiet import quieten

    # Import these modules here, so that showing the help does not wait for the import of torch; megatron-core warns
    # about missing optional packages at its import.
    quieten()
    from ft.observe.diagnose.compare import as_text, as_values, compare
    from ft.observe.diagnose.stored import open_runs

    found = compare(open_runs(given.runs), given.step)
    print(json.dumps(as_values(found)) if given.json else as_text(found, given.show))
    return 1 if found.findings else 0


_SILENT = """\
Read what double execution (--ft-dmr) has recorded in the events of runs, and list the devices that computed wrongly:
how often, in which operators, and what followed. A device is to be pulled if it was wrong in several steps or was
evicted; one mismatch may be a cosmic ray. An operator that differs on several devices is not reproducible, and no
device is at fault. With --out the devices are added to a file, and ft run --suspects FILE uses none that is to be
pulled."""

_SILENT_CODES = "exit code: 0 nothing was wrong, 1 there were mismatches, 2 a run cannot be read"
_HEAD = ("advice", "host", "device", "runs", "steps", "mismatches", "operators", "then")


def _add_silent(subparsers) -> None:
    about = "list the machines and devices that computed wrongly in runs with double execution"
    parser = _add(subparsers, "silent", run_silent, help=about, description=_SILENT, epilog=_SILENT_CODES)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=_RUN_DIR)
    parser.add_argument("--out", metavar="FILE", type=Path, help="add the devices to this file for ft run --suspects")
    parser.add_argument("--json", action="store_true", help="print JSON with every step instead of tables")


def run_silent(given: argparse.Namespace) -> int:
    """Print which devices computed wrongly; return 0 if none did, 1 otherwise."""
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


def _row(one: "SilentDevice") -> tuple[str, ...]:
    most = one.operators.most_common(3)
    operators = ", ".join(f"{name} ({times})" for name, times in most)
    more = len(one.operators) - len(most)
    counted = ((one.corrected, "corrected"), (one.evicted, "evicted"), (one.ended, "ended the run"))
    then = ", ".join(f"{number} {what}" for number, what in counted if number)
    numbers = (len(one.runs), len(one.steps), one.mismatches)
    return (one.advice, one.host, one.device, *map(str, numbers), operators + (f", {more} more" if more else ""), then)


_HANG = """\
Say why a run hangs: which logical rank the others wait for, in which operation, and where that rank is instead. The
answer follows from the wait-for graph over all process groups (FT-HSDP, section 2.3). A run makes an inspection of all
its workers by itself before a time limit passes; while a run is under way, this command asks for a new one. Of a run of
replicas, all replicas are asked, and the graph contains their waits for the quorum and for each other's gradients. With
--traces, the dumps of torch's flight recorder are read instead, which every run under torchrun can write."""

_HANG_CODES = "exit code: 0 nobody is at fault, 1 a cause was found, 2 there is nothing to read"


def _add_hang(subparsers) -> None:
    about = "say which rank a hanging run waits for, and where that rank is"
    parser = _add(subparsers, "hang", run_hang, help=about, description=_HANG, epilog=_HANG_CODES)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("run", metavar="RUN", nargs="?", type=Path, help=_RUN_DIR)
    source.add_argument("--traces", metavar="FOLDER", type=Path, help="folder with dumps of torch's flight recorder")
    parser.add_argument("--inspection", type=int, metavar="N", help="inspection to read (default: the newest)")
    parser.add_argument("--inspections", type=int, default=1, metavar="N", help="make N, to tell who slows a run down")
    parser.add_argument("--every", type=float, default=0.3, metavar="S", help="seconds between two (default: 0.3)")
    parser.add_argument("--stored", action="store_true", help="read the newest stored one, and ask for no new one")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw who waits for whom (.png, .svg or .pdf)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run_hang(given: argparse.Namespace) -> int:
    """Print the causes; return 0 if there is none, 1 otherwise."""
    from ft.faults.hang.causes import over_time
    from ft.observe.diagnose.hang import as_text, as_values

    if given.inspections < 1 or given.every <= 0:
        raise UserError("--inspections must be at least 1, and --every above 0", "leave them out for a single one")
    if given.traces is not None:
        from ft.observe.diagnose.flight_recorder import read

        taken = [read(given.traces)]
    else:
        asks = given.inspection is None and not given.stored
        hosts = events.hosts(events.read(given.run / EVENTS))
        taken = [
            replace(seen, hosts=hosts)
            for seen in inspections_of(given.run, given.inspection, given.inspections if asks else 0, given.every)
        ]
    seen, found = taken[-1], over_time(taken)
    if given.picture is not None:
        from ft.observe.diagnose.hang_picture import save

        try:
            save(given.picture, seen, found)
        except (OSError, ValueError) as error:
            raise UserError(f"{given.picture} cannot be written: {error}", "name a .png, .svg or .pdf file") from error
    print(json.dumps(as_values(seen, found)) if given.json else as_text(seen, found))
    return 1 if found.causes else 0


_CRASH = """\
Read the events, the journal and the logs of runs, and say of many ranks' errors which came first in the order of
causes: an exception of the program, too little memory or a device error before lost connections, waits that timed out
and processes that ft run itself has ended. Equal errors of many ranks count once; the stack is printed once; the other
errors are counted. Times decide only between errors of one class."""

_CRASH_CODES = "exit code: 0 no run has crashed, 1 there is a first cause, 2 a run cannot be read"


def _add_crash(subparsers) -> None:
    about = "say which of many ranks' errors was the first cause of a crash, with its stack"
    parser = _add(subparsers, "crash", run_crash, help=about, description=_CRASH, epilog=_CRASH_CODES)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=_RUN_DIR)
    parser.add_argument("--json", action="store_true", help="print JSON, one object for each run, instead of text")


def run_crash(given: argparse.Namespace) -> int:
    """Print the first cause of each run's crash; return 0 if no run has crashed, 1 otherwise."""
    from ft.record import crash

    found: dict[str, Crash] = {}
    for folder in given.runs:
        found |= {str(each): crash.read(each) for each in parts(folder)}
    if given.json:
        values = [{"run": name, "state": one.state, **_crash_values(one)} for name, one in found.items()]
        print(json.dumps(values))
    else:
        texts = [
            f"{name}: {one.state}\n{crash.as_text(one.found) if one.found else _nothing(name, one)}"
            for name, one in found.items()
        ]
        print("\n\n".join(texts))
    return 1 if any(one.found is not None or one.state.startswith("stopped") for one in found.values()) else 0


def _crash_values(one: "Crash") -> dict:
    from ft.record import crash

    told = {"message": one.message, "started": one.started}
    return told if one.found is None else {**told, **crash.as_values(one.found)}


def _nothing(name: str, one: "Crash") -> str:
    """Return what there is to say of a run without a first cause."""
    from ft.record.run import is_planned_end

    if one.state.startswith("stopped"):
        hint = "" if one.started else f"\nit never made a step: ft diagnose start {name}"
        return f"no worker had an error; the run said: {one.message}{hint}"
    if is_planned_end(one.state):
        recovered = len({error.attempt for error in one.errors if not error.by_us})
        return f"no crash; {recovered} fault(s) were recovered from" if recovered else "no crash, and no error"
    return "no error so far"


_START = """\
Read the folder of a run that never made its first step, and say why: which agents joined and which did not, what
differs between the nodes (versions, flags, paths of the command line), addresses that others cannot reach, clocks that
differ, workers that did not come up and their first error, another run in the folder. ft run itself refuses most of
this within 30 s; the command also tells of runs that have not ended or that were killed."""

_START_CODES = "exit code: 0 nothing kept the run from starting, 1 there is a reason, 2 the folder cannot be read"


def _add_start(subparsers) -> None:
    about = "say why a run has never made its first step"
    parser = _add(subparsers, "start", run_start, help=about, description=_START, epilog=_START_CODES)
    parser.add_argument("run", metavar="RUN", type=Path, help=_RUN_DIR)
    parser.add_argument(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        default="",
        help="try this address of the control plane from this machine, and name the process that holds its port here "
        "(default: the address in the folder)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run_start(given: argparse.Namespace) -> int:
    """Print why the run has not started; return 0 if nothing kept it from starting, 1 otherwise."""
    from ft.record import start as starts

    start = starts.look(starts.read(given.run), given.rdzv_endpoint)
    found = starts.findings(start, time.time())
    print(json.dumps(starts.as_values(start, found)) if given.json else starts.as_text(str(given.run), start, found))
    return 1 if any(one.is_cause for one in found) and not start.has_begun else 0


def add_parser(subparsers) -> None:
    """Add ``diagnose`` with its subcommands."""
    nested = add_group(
        subparsers,
        "diagnose",
        (),
        help="find why a run crashed, hangs or never starts, where runs differ, and which devices compute wrongly",
        description="Find why a run crashed, hangs or never starts, where runs differ, and which devices are wrong.",
    )
    for add in (_add_compare, _add_silent, _add_hang, _add_crash, _add_start):
        add(nested)
