"""Implement the commands ``ft dmr profile`` (run a training command for a few iterations and write a profile), ``ft dmr
plan`` (make a plan from a profile and a memory budget) and ``ft dmr explain`` (print how a plan file verifies
operators, what that costs, and why).
"""

import argparse
import json
import subprocess
from collections.abc import Collection
from pathlib import Path

from msgspec.structs import replace

from ft.base.errors import UserError
from ft.base.quantities import argument, size
from ft.show.text import table
from ft.systems.dmr.plan.file import read_plan, read_trace, read_unstable, write_plan
from ft.systems.dmr.plan.planner import PHASES, PlannerOptions, plan
from ft.systems.dmr.plan.text import as_text, as_values, gigabytes
from ft.systems.dmr.plan.trace import INTER, INTRA, Plan, Trace

_PROFILE_DESCRIPTION = """\
Run a training command for a few iterations, and record which operators each pipeline stage executes, how long they
take, where the stage waits for others, and how much memory it uses. ft dmr plan reads the result. The command must
be that of the run, torchrun ... pretrain_gpt.py ... or ft run ..., with as many ranks: a plan for another model,
layout or batch is rejected. The profiling run saves no checkpoint and writes no metrics."""
_FLAG = "--ft-dmr-profile"
_PLAN_DESCRIPTION = """\
Decide for every operator of a profile how it is verified, in three phases (SpareTrain): with the recomputation of
activation checkpointing; one segment of each block in windows between a stage's units; single operators in the
remaining time of windows. All other operators are verified at once. The plan exceeds neither the windows nor the
memory budget."""


def add_parser(subparsers) -> None:
    """Add ``profile``, ``plan`` and ``explain`` to ``subparsers``, the argparse subparsers of ``ft dmr``."""
    _add_profile(subparsers)
    _add_plan(subparsers)
    _add_explain(subparsers)


def _add_profile(subparsers) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="record the operators of a run, how long they take, and where the run waits",
        usage="ft dmr profile --out FILE -- COMMAND ...",
        description=_PROFILE_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="FILE", required=True, help="write the profile to this file")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the run's command")
    parser.set_defaults(main=run_profile)


def run_profile(given: argparse.Namespace) -> int:
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


def _add_plan(subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="plan from a profile when each operator is verified",
        description=_PLAN_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("profile", metavar="PROFILE", help="profile that ft dmr profile has written")
    parser.add_argument(
        "--memory-budget",
        type=argument(size),
        metavar="SIZE",
        help="memory budget of one device, such as 70GB, or bytes; default: that of the profile",
    )
    parser.add_argument("--out", metavar="FILE", help="write the plan to this file")
    parser.add_argument("--phases", type=int, default=PHASES, choices=range(PHASES + 1), help="phases; 0: naive alone")
    windows = INTER + INTRA
    parser.add_argument(
        "--no-windows", action="append", default=[], choices=windows, help="kind of windows that the plan must not use"
    )
    known = "earlier plan of this model: the new plan is not worse, if the earlier one can still be followed"
    parser.add_argument("--known", action="append", default=[], metavar="PLAN", help=known)
    unstable = "file of ft dmr selftest --out with operators that are not reproducible; they are not verified"
    parser.add_argument("--unstable", metavar="FILE", help=unstable)
    _add_answer_flags(parser)
    parser.set_defaults(main=run_plan)


def _add_answer_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--plot`` and ``--json``."""
    parser.add_argument(
        "--plot", metavar="FILE", help="draw windows and memory over time: a file ending in .png, .svg or .pdf"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run_plan(given: argparse.Namespace) -> int:
    """Make the plan, write it to the file that is given, print it, and return the exit code.

    Raises:
        UserError: the profile, the budget, a known plan or the file of unstable operators cannot be used, or a file
            cannot be written.
    """
    trace = read_trace(Path(given.profile))
    if given.unstable is not None:
        trace = without_checking(trace, read_unstable(Path(given.unstable)).operators)
    budget = given.memory_budget or trace.memory.budget
    if budget is None:
        raise UserError(f"{given.profile} has no memory budget, and none is given", "give --memory-budget, as 70GB")
    if given.known and given.phases < PHASES:
        raise UserError("an earlier plan has all phases, but fewer phases are requested", "remove --known or --phases")
    kinds = tuple(kind for kind in INTER + INTRA if kind not in given.no_windows)
    known = [read_plan(Path(each)) for each in given.known]
    found = plan(trace, budget, PlannerOptions(given.phases, kinds), known)
    if given.out is not None:
        write_plan(Path(given.out), found)
    _answer(found, given)
    return 0


def without_checking(trace: Trace, operators: Collection[str]) -> Trace:
    """Return the same trace with the operators of these names marked as not reproducible."""
    ops = (replace(op, deterministic=False) if op.name in operators else op for op in trace.ops)
    return replace(trace, ops=tuple(ops))


def _answer(found, given: argparse.Namespace) -> None:
    """Print a plan in the requested format, and draw it if requested.

    Raises:
        UserError: the picture cannot be written.
    """
    print(json.dumps(as_values(found)) if given.json else as_text(found))
    if given.plot is not None:
        # Imported here because Matplotlib takes longer to import than everything else here.
        from ft.systems.dmr.plan.picture import draw

        draw(found, Path(given.plot))


_MOST = 40
"""Maximum number of operators that are listed one by one, the longest first."""


def _add_explain(subparsers) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="explain how a plan verifies operators, what this costs, and why",
        description="Read a plan, check that it can be followed, and print how it verifies operators and what this "
        "costs.",
    )
    parser.add_argument("plan", metavar="PLAN", help="plan that ft dmr plan --out has written")
    parser.add_argument(
        "--operators", metavar="TEXT", help="list the operators whose name or id contains TEXT, the longest first"
    )
    _add_answer_flags(parser)
    parser.set_defaults(main=run_explain)


def run_explain(given: argparse.Namespace) -> int:
    """Print the explanation, and return the exit code.

    Raises:
        UserError: the plan cannot be read or followed, no operator matches, or the picture cannot be written.
    """
    found = read_plan(Path(given.plan))
    if given.operators is not None:
        print(listed(found, given.operators))
        return 0
    _answer(found, given)
    return 0


def listed(plan: Plan, text: str) -> str:
    """Return a table of the operators whose name or id contains ``text``, at most _MOST, the longest first.

    Raises:
        UserError: no operator matches.
    """
    ops = [op for op in plan.trace.ops if text in op.name or text in op.id]
    if not ops:
        raise UserError(f"the plan has no operator named like {text!r}", "remove --operators to list all operators")
    ops.sort(key=lambda op: (-op.t_us, op.start_us))
    rows = []
    for op in ops[:_MOST]:
        how = plan.assign[op.id]
        where = (str(op.stage), str(op.microbatch), str(op.layer), op.phase)
        rows.append((op.id, op.name, *where, f"{op.t_us:.1f}", how.set, how.agc_segment or how.window or "-"))
    head = ("operator", "name", "stage", "microbatch", "layer", "phase", "us", "set", "window or segment")
    more = [f"and {len(ops) - _MOST} more"] if len(ops) > _MOST else []
    return "\n".join([table(head, rows, (2, 3, 4, 6)), *more])
