"""Format the results of the SPARe simulation as text and as JSON values: one row per scheme and redundancy."""

import math
from collections.abc import Sequence
from typing import Any

from ft.lab.simulate.spare.run import PARTS
from ft.lab.simulate.spare.scenario import Scenario
from ft.lab.simulate.spare.study import MEASURES, Estimate, Row
from ft.show.text import count, left_out, percent, seconds, table

LEFT_OUT = left_out(
    "groups that return before a wipe-out",
    "runs that go on in one",
    "repairs and spares: a restart finds all groups",
)

_HEAD = ("scheme", "R", "time to train", "up", "available", "restarts", "stacks/step", "checkpoint every", "remark")
_NAMES = {"spare": "SPARe", "replication": "replication", "checkpoint": "checkpoints"}


def as_text(asked: Scenario, rows: Sequence[Row]) -> str:
    """Return the table with a header that states the scenario, and an explanation of the columns."""
    job = asked.job
    law = {"weibull": f"Weibull, shape {asked.shape:g}", "trace": f"trace {asked.trace}"}.get(asked.law, asked.law)
    failing = "no failures" if asked.law == "none" else f"a failure every {seconds(asked.mtbf_s)} ({law})"
    lines = [
        f"{job.groups} groups, {count(job.steps, 'step')} of {seconds(job.stack_s)} + {seconds(job.all_reduce_s)}, "
        f"{failing}",
        f"a restart takes {seconds(job.restart_s)} (clocks: {job.restart}), a checkpoint {seconds(job.save_s)}",
        "",
        table(_HEAD, [_cells(row) for row in rows], right=range(1, 8)),
        "",
        f"time to train: times {seconds(job.base_s)}, which it takes without failures, jitter and redundancy",
        "up: not in restarts and shrinking; available: in steps that were kept",
    ]
    if asked.seeds > 1:
        lines.append(f"+-: 95 % confidence of the mean over {asked.seeds} seeds")
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    found, runs = row.found, len(row.results)
    shares = [percent(found[name].mean) for name in ("up_fraction", "availability")]
    period = "-" if row.period_s is None else seconds(row.period_s)
    remark = f"{row.given_up} of {count(runs, 'run')} given up at {percent(row.progress)}" if row.given_up else ""
    restarts, stacks = f"{found['restarts'].mean:.1f}", f"{found['stacks_per_step'].mean:.3f}"
    return [
        _NAMES[row.scheme],
        str(row.redundancy),
        _with_confidence(found["ttt_norm"]),
        *shares,
        restarts,
        stacks,
        period,
        remark,
    ]


def _with_confidence(found: Estimate) -> str:
    if not math.isfinite(found.mean):
        return "never"
    return f"{found.mean:.3f}" if found.half_width is None else f"{found.mean:.3f} +- {found.half_width:.3f}"


def as_values(asked: Scenario, row: Row) -> dict[str, Any]:
    """Return the results of one case as JSON values: means over the seeds, times in seconds.

    ``ttt_norm``, the normalized time to train, is None if a run of the case has completed no step.
    """
    finite = {name: row.found[name].mean if math.isfinite(row.found[name].mean) else None for name in MEASURES}
    parts = {part: sum(getattr(result, part) for result in row.results) / len(row.results) for part in PARTS}
    return {
        "scheme": row.scheme,
        "groups": asked.job.groups,
        "redundancy": row.redundancy,
        **finite,
        "confidence": {name: row.found[name].half_width for name in MEASURES},
        "seeds": asked.seeds,
        "checkpoint_period_s": row.period_s,
        "given_up": row.given_up,
        "progress": row.progress,
        "parts_s": parts,
    }
