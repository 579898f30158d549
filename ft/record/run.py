"""Read the folder of a run: events, metrics, status, and the journal in which the control plane logs its decisions.

The run may still be in progress, or may have died in the middle of writing a line; incomplete lines are skipped. What
is missing is known: damaged lines, and committed steps without a line in ``metrics.jsonl``.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ft.base import bounded_json, events, files
from ft.base.errors import UserError
from ft.base.events import Event

EVENTS, METRICS, STATUS, JOURNAL = "events.jsonl", "metrics.jsonl", "status.json", "journal.jsonl"
FINISHED, ENDED_EARLY, NOT_SAVED, NOT_ENDED = "finished", "ended early", ", not saved", "not ended"
AGENT_LOG = ".agent.log"
"""End of the name of a file in the folder ``logs``, with the exception that has ended the agent of a node."""
_REPLICA = re.compile(r"replica-(\d+)")
_FIX = "give the folder that was given to ft run as --run-dir"


@dataclass(frozen=True)
class Run:
    """The record of a run, as read from its folder.

    Attributes:
        events: all events in order of time.
        metrics: one mapping per committed step, in order of steps.
        status: content of ``status.json``, empty where there is none.
        decisions: number of lines in the journal of the control plane's decisions.
        damaged: file name -> number of damaged lines.
        has_metrics: whether the metrics file exists.
    """

    folder: Path
    events: list[Event] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    decisions: int = 0
    damaged: dict[str, int] = field(default_factory=dict)
    has_metrics: bool = False

    def first(self, name: str) -> Event | None:
        """Return the first event called ``name``, or None."""
        return next((event for event in self.events if event.name == name), None)

    def last(self, name: str) -> Event | None:
        """Return the last event called ``name``, or None."""
        return next((event for event in reversed(self.events) if event.name == name), None)

    @property
    def state(self) -> str:
        """Return how the run has ended: "finished" or "ended early (SIGTERM) at 219 of 300", either perhaps with
        ", not saved" added, or "stopped with code N" or "not ended".
        """
        stopped, finished = self.last(events.STOPPED), self.last(events.FINISHED)
        if finished is not None:
            return _planned_end(finished)
        return f"stopped with code {stopped.detail.get('code')}" if stopped is not None else NOT_ENDED


def is_planned_end(state: str) -> bool:
    """Return whether the ``state`` of a run or replica says that it has ended as planned, and has not failed."""
    return state.startswith((FINISHED, ENDED_EARLY))


def _planned_end(event: Event) -> str:
    early, steps = event.detail.get("early"), event.detail.get("steps")
    where = f" at {event.step} of {steps}" if steps else ""
    state = f"{ENDED_EARLY} ({early}){where}" if early else FINISHED
    return state + (NOT_SAVED if event.detail.get("unsaved") else "")


def load(folder: str | Path) -> Run:
    """Read a run's folder.

    Damaged lines are skipped and counted. If a step was executed more than once, the metrics of its last execution are
    kept.

    Raises:
        UserError: there is no such folder, it contains no run, or it cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder", _FIX)
    if not any((folder / name).is_file() for name in (EVENTS, METRICS, STATUS)):
        raise UserError(f"{folder} contains no run: neither {EVENTS} nor {METRICS} nor {STATUS}", _FIX)
    try:
        found = sorted(events.read(folder / EVENTS), key=lambda event: event.wall)
        metrics, journal = _json_lines(folder / METRICS), _json_lines(folder / JOURNAL)
        damaged = {METRICS: metrics[1], EVENTS: _json_lines(folder / EVENTS)[1], JOURNAL: journal[1]}
        steps = {m["step"]: m for m in metrics[0] if isinstance(m.get("step"), int)}
        if not (found or steps or any((folder / name).is_file() for name in (EVENTS, STATUS))):
            raise UserError(f"{folder} contains no run: {METRICS} has no step", _FIX)
        ordered, has_metrics = [steps[step] for step in sorted(steps)], (folder / METRICS).exists()
        return Run(folder, found, ordered, read_status(folder), len(journal[0]), damaged, has_metrics)
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error}", _FIX) from error


def replicas(run: Path) -> dict[int, Path]:
    """Return the folder of each replica of a run, by the replica's number.

    The result is empty for a run without replicas, and if ``run`` is itself the folder of one replica.
    """
    matches = ((_REPLICA.fullmatch(one.name), one) for one in run.iterdir() if one.is_dir())
    return dict(sorted((int(match[1]), one) for match, one in matches if match is not None))


def parts(run: Path) -> list[Path]:
    """Return the folders of the replicas that have events, or the run's own folder if there are none."""
    found = replicas(run).values() if run.is_dir() else ()
    return [each for each in found if (each / EVENTS).is_file()] or [run]


def read_status(folder: Path) -> dict[str, Any]:
    """Return the content of ``status.json``, empty where the file is missing or is no JSON object."""
    try:
        values = bounded_json.loads(files.read(folder / STATUS), non_finite=True)
    except (FileNotFoundError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def number(metric: dict[str, Any], key: str) -> float | None:
    """Return the value of ``key`` in the metrics of a step if it is a finite number, else None."""
    value = metric.get(key)
    is_finite = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
    return float(value) if is_finite else None


def _json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return (the JSON objects in a file's lines, number of damaged lines)."""
    try:
        lines = files.read(path, files.UNLIMITED).splitlines()
    except FileNotFoundError:
        return [], 0
    found, damaged = [], 0
    for line in lines:
        try:
            values = bounded_json.loads(line, non_finite=True)
        except ValueError:
            values = None
        if isinstance(values, dict):
            found.append(values)
        else:
            damaged += bool(line.strip())
    return found, damaged


def entries(path: Path, marks: Sequence[str] = ("",)) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in those lines of a file that contain one of the marks, without reading all of it into
    memory. Damaged lines are skipped; a file that cannot be read has none.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if any(mark in line for mark in marks):
                    with contextlib.suppress(ValueError):
                        entry = bounded_json.loads(line, non_finite=True)
                        if isinstance(entry, dict):
                            yield entry
    except OSError:
        return


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
