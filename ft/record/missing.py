"""Find gaps in the files of a run: damaged lines, and committed steps that have no line in ``metrics.jsonl``.

A step is committed when every rank has finished its optimizer update.
"""

from itertools import pairwise

from ft.base import events
from ft.record.run import METRICS, NOT_ENDED, Run


def last_step(run: Run) -> int | None:
    """Return the last committed step that any file of the run mentions, or None.

    For a run that has not finished, this is the step that the control plane wrote last, if there is one, because the
    run may have rolled back to a step before the newest one in the metrics. Otherwise it is the largest step in
    metrics, status and events (of the events of a finished run, only the event of its end counts). The metrics alone do
    not suffice, because a full disk may have truncated them.
    """
    finished, said = run.last(events.FINISHED), _whole(run.status.get("step"))
    if finished is None and said is not None:
        return said
    steps = [metric["step"] for metric in run.metrics[-1:]]
    steps += [event.step for event in ([finished] if finished else run.events) if event.step is not None]
    return max([*steps, *([] if said is None else [said])], default=None)


def lacking(run: Run, step: int = 0) -> list[str]:
    """Return one sentence for each file that lacks something.

    Args:
        run: the run's folder as read.
        step: a step that the caller knows to be committed.
    """
    found = [f"{name} has {count} damaged line(s), which are ignored" for name, count in run.damaged.items() if count]
    missing = missing_steps(run, step)
    if missing:
        count = sum(map(len, missing))
        where = ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in missing[:3])
        more = ", ..." if len(missing) > 3 else ""
        found.append(f"{METRICS} lacks {count} of {expected_step(run, step)} steps: {where}{more}")
    return found


def missing_steps(run: Run, step: int = 0) -> list[range]:
    """Return the committed steps that have no line in the metrics, from the first step that has one.

    Steps after the newest line do not count as missing while the run has not ended.
    """
    if not run.has_metrics:
        return []
    known = [metric["step"] for metric in run.metrics]
    ends = [known[0] - 1, *known] if known else [0]
    upper = expected_step(run, step)
    gaps = [range(before + 1, after) for before, after in pairwise(ends) if after > before + 1]
    return gaps + ([range(ends[-1] + 1, upper + 1)] if upper > ends[-1] else [])


def expected_step(run: Run, step: int = 0) -> int:
    """Return the last step that the metrics should contain."""
    newest = run.metrics[-1]["step"] if run.metrics else 0
    ended = last_step(run) if run.state != NOT_ENDED else None
    return max(newest, step, ended or 0)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
