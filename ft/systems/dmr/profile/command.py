"""Implement the command ``ft dmr profile``: run a training command for a few iterations and write a profile.

The profile lists the operators of an iteration, their durations, idle times and memory use. ``ft dmr plan`` reads it to
plan DMR (dual modular redundancy, SpareTrain), which executes every operator twice.
"""

import argparse
import subprocess
from pathlib import Path

from ft.base.errors import UserError
from ft.systems.dmr.plan.file import read_trace
from ft.systems.dmr.plan.text import gigabytes
from ft.systems.dmr.plan.trace import Trace

_DESCRIPTION = """\
Run a training command for a few iterations, and record which operators each pipeline stage executes, how long they
take, where the stage waits for others, and how much memory it uses. ft dmr plan reads the result. The command must
be that of the run, torchrun ... pretrain_gpt.py ... or ft run ..., with as many ranks: a plan for another model,
layout or batch is rejected. The profiling run saves no checkpoint and writes no metrics."""
_FLAG = "--ft-dmr-profile"


def add_parser(subparsers) -> None:
    """Add the subcommand ``profile`` to ``subparsers``, the argparse subparsers of ``ft dmr``."""
    parser = subparsers.add_parser(
        "profile",
        help="record the operators of a run, how long they take, and where the run waits",
        usage="ft dmr profile --out FILE -- COMMAND ...",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="FILE", required=True, help="write the profile to this file")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the run's command")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Run the training command, print a summary of its profile, and return the exit code of the command.

    Raises:
        UserError: no command is given, the folder of the profile does not exist, or the command cannot be started or
            has written no profile.
    """
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        raise UserError("ft dmr profile is given no command to run", "ft dmr profile --out FILE -- torchrun ...")
    path = Path(given.out).absolute()
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", "choose another path for --out")
    before = _stamp(path)
    try:
        code = subprocess.run([*command, _FLAG, str(path)], check=False).returncode
    except OSError as error:
        raise UserError(
            f"{command[0]} cannot be started: {error.strerror}", "give the run's command after --"
        ) from error
    if code:
        return code
    if _stamp(path) == before:
        problem = "the command has ended with code 0, but has written no profile"
        raise UserError(problem, f"the last argument goes to pretrain_gpt.py, which understands {_FLAG} FILE")
    print(_summary(read_trace(path), path))
    return 0


def _stamp(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _summary(trace: Trace, path: Path) -> str:
    pipeline = trace.pipeline
    end = max((op.end_us for op in trace.ops), default=0.0)
    shape = f"{pipeline.stages} stages, {pipeline.microbatches} microbatches, {end / 1e3:.1f} ms"
    lines = [f"profile of one iteration: {shape}; {gigabytes(path.stat().st_size)} in {path}"]
    for stage in trace.stages:
        ops = [op for op in trace.ops if op.stage == stage]
        busy = sum(op.t_us for op in ops) / 1e3
        idle = sum(window.dur_us for window in trace.windows if window.stage == stage) / 1e3
        count = sum(window.stage == stage for window in trace.windows)
        peak = gigabytes(trace.memory.peak(stage))
        lines.append(f"  stage {stage}: {len(ops)} operators {busy:.1f} ms, {count} windows {idle:.1f} ms, peak {peak}")
    return "\n".join([*lines, f"next: ft dmr plan {path} --memory-budget SIZE --out plan.json"])
