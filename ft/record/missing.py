"""What the files of a run lack: lines that were damaged, and steps of which there is no line."""

from itertools import pairwise

from ft.base import events
from ft.record.run import METRICS, Run


def last_step(run: Run) -> int | None:
    """The last committed step that any file of the run tells of.

    Not the metrics alone: they may have found no room. A run that has not finished may have gone back behind a step
    that they have, and is where its control plane says.
    """
    finished, said = run.last(events.FINISHED), _whole(run.status.get("step"))
    if finished is None and said is not None:
        return said
    steps = [metric["step"] for metric in run.metrics[-1:]]
    steps += [event.step for event in ([finished] if finished else run.events) if event.step is not None]
    return max([*steps, *([] if said is None else [said])], default=None)


def lacking(run: Run, step: int = 0) -> list[str]:
    """One sentence for each file that lacks something.

    Args:
        step: committed at least, as far as the caller knows.
    """
    found = [f"{name} has {count} damaged line(s), left out" for name, count in run.damaged.items() if count]
    missing = missing_steps(run, step)
    if missing:
        count = sum(map(len, missing))
        where = ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in missing[:3])
        more = ", ..." if len(missing) > 3 else ""
        found.append(f"{METRICS} lacks {count} of {expected_step(run, step)} steps: {where}{more}")
    return found


def missing_steps(run: Run, step: int = 0) -> list[range]:
    """The committed steps without a line in the metrics, from the first step there is one of; of a run that goes on,
    those after the newest are not missing yet."""
    if not run.has_metrics:
        return []
    known = [metric["step"] for metric in run.metrics]
    ends = [known[0] - 1, *known] if known else [0]
    upper = expected_step(run, step)
    gaps = [range(before + 1, after) for before, after in pairwise(ends) if after > before + 1]
    return gaps + ([range(ends[-1] + 1, upper + 1)] if upper > ends[-1] else [])


def expected_step(run: Run, step: int = 0) -> int:
    """The last step that the metrics should have."""
    newest = run.metrics[-1]["step"] if run.metrics else 0
    ended = last_step(run) if run.state != "not ended" else None
    return max(newest, step, ended or 0)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
