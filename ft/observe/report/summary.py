"""Build the summary of a run that ``ft report`` prints on the terminal."""

from collections.abc import Sequence
from pathlib import Path

from ft import faults
from ft.observe.report import rebuilds
from ft.observe.report.actions import actions
from ft.observe.report.actions import text_table as text_table_of_actions
from ft.observe.report.corruption import corruption
from ft.observe.report.corruption_panel import summary_of, text_table
from ft.observe.report.goodput import Goodput
from ft.observe.report.status import saves
from ft.record import missing as records
from ft.record.block import what_differs, what_failed
from ft.record.recoveries import Recovery
from ft.record.run import Run
from ft.show.text import percent, seconds, shortened, table


def summary(run: Run, found: Sequence[Recovery], times: Goodput, files: Sequence[Path]) -> str:
    """Return the summary as text.

    The summary has key figures, tables of recoveries, of DMR mismatches (operators whose two executions differed), of
    actions of user-defined protections and of pipeline stages rebuilt by CheckFree, and the paths of written files.

    Args:
        run: the run's folder as read.
        found: the recoveries of the run.
        times: where the run's time went.
        files: paths of the files that the report has written.
    """
    facts = [
        ("run", f"{run.folder} ({run.state})"),
        ("steps", f"{times.steps}, {seconds(times.step)} each (median)"),
        ("recovered", f"{sum(r.is_over for r in found)} of {len(found)} interruptions"),
        ("goodput", f"{percent(times.share)} of {seconds(times.wall)}, recoveries took {seconds(times.recovering)}"),
    ]
    checked = corruption(run.events)
    facts += [] if checked is None else [("DMR", summary_of(checked))]
    facts += [("saved", text) for text in saves(run.events)]
    missed = faults.missed(run.folder)
    facts += [("faults", missed)] if missed else []
    facts += [("records", text) for text in records.lacking(run)]
    lines = [f"{name:<10} {value}" for name, value in facts]
    if found:
        rows = [_row(r) for r in found]
        lines += ["", table(("#", "outcome", "step", "redone", "total", "what happened"), rows, right=(0, 2, 3, 4))]
    lines += [f"after recovery {r.number}, {what_differs(r)}" for r in found if r.differing]
    wrong = "" if checked is None else text_table(checked)
    lines += ["", wrong] if wrong else []
    acted = text_table_of_actions(actions(run))
    lines += ["", acted] if acted else []
    made = rebuilds.rebuilds(run)
    if made:
        lines += ["", "stages rebuilt from their neighbours (CheckFree)"]
        lines += [table(rebuilds.HEAD, rebuilds.rows(made), right=(0, 1, 3, 4, 5, 6))]
    lines += ["", *(f"{'wrote':<10} {path}" for path in files)]
    return "\n".join(lines)


def _row(recovery: Recovery) -> tuple[str, ...]:
    step, redone = recovery.step, recovery.steps_redone
    return (
        str(recovery.number),
        recovery.outcome,
        "-" if step is None else str(step),
        "-" if redone is None else str(redone),
        seconds(recovery.total),
        shortened(what_failed(recovery), 70),
    )
