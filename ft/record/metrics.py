"""Files of a run with a line for each step or span of steps: ``metrics.jsonl`` and ``step_times.jsonl``.

The metrics file (--metrics-file) has one JSON object per step, in the order of the steps. The other says where the time
of the steps went, for each logical rank. Each of its lines is about a span of steps; later spans are longer, so that
the file of a long run stays small. In a line, ``ranks`` are logical ranks, and every other list has one value for each
of them, None where nothing was reported. All times are milliseconds per step.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft.base import bounded_json, files
from ft.base.errors import UserError
from ft.base.lines import Lines


class MetricsFile:
    """Appends lines to the metrics file.

    An existing file first loses the lines of steps after ``first_step``, and an incomplete line that a crash has left.
    A full disk does not stop training: lines that cannot be written wait in memory until there is space
    (``ft.base.lines``).

    Args:
        first_step: number of steps that the run has done before this process started.
        tell: function that prints messages about waiting lines; None: print them to standard error.

    Raises:
        UserError: the file cannot be created.
    """

    def __init__(self, path: Path, first_step: int, tell: Callable[[str], None] | None = None):
        self._path = path
        self._undone_after: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._cut(first_step)
            self._lines = Lines(path, tell=tell, is_link_followed=True)
        except OSError as error:
            raise UserError(f"--metrics-file {path} cannot be written: {error}", "give a writable path") from error

    def write(self, figures: dict[str, Any]) -> None:
        """Append a step's line. ``figures`` maps names to JSON values, and contains "step"."""
        self._drop_undone()
        self._lines.write((json.dumps(figures) + "\n").encode())

    def rewind(self, step: int) -> None:
        """Mark the lines of steps after ``step`` as undone. They are removed when the next line is written
        or the file is closed.

        They are not removed at once, because another failure may lead to a restart from a checkpoint of one of these
        steps.
        """
        self._undone_after = step

    def close(self) -> None:
        self._drop_undone()
        self._lines.close()

    def _drop_undone(self) -> None:
        step, self._undone_after = self._undone_after, None
        if step is not None:
            self._lines.replace(lambda: self._cut(step), lambda line: _is_kept(line, step))

    def _cut(self, step: int) -> None:
        """Remove the lines of steps after ``step``, atomically by a new file or, if the disk is full, by truncation."""
        kept = [line for line in self._path.read_bytes().splitlines(keepends=True) if _is_kept(line, step)]
        try:
            files.replace(self._path, b"".join(kept))
        except OSError:
            os.truncate(self._path, sum(map(len, kept)))  # steps are in order, so the kept lines come first


def _is_kept(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and bounded_json.loads(line, non_finite=True)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


STEP_TIMES = "step_times.jsonl"

Times = list[float | None]


@dataclass(frozen=True)
class Span:
    """One line of the file.

    Attributes:
        wall: time at which the span ended, in seconds since 1970.
        roles: role of each rank; ranks with the same role have the same work.
        steps: number of steps that each rank has reported.
        step_ms: duration of a step.
        own_ms: time in a step in which the rank did not wait for others.
        parts: kind of own work -> its time.
        waits: name of a process group or the like -> time for which the rank has waited there.
    """

    wall: float
    epoch: int
    first: int
    last: int
    ranks: list[int]
    roles: list[str]
    steps: list[int]
    step_ms: Times
    own_ms: Times
    parts: dict[str, Times] = field(default_factory=dict)
    waits: dict[str, Times] = field(default_factory=dict)


def as_line(span: Span) -> bytes:
    """Return the line of a span, with its newline."""
    return json.dumps(vars(span), separators=(",", ":")).encode() + b"\n"


def read(folder: Path) -> list[Span]:
    """Return the spans of a run in the order in which they were written; damaged lines are skipped."""
    try:
        lines = files.read(folder / STEP_TIMES, files.UNLIMITED).splitlines()
    except FileNotFoundError:
        return []
    return [span for line in lines if (span := _parse(line)) is not None]


def _parse(line: bytes) -> Span | None:
    try:
        span = Span(**bounded_json.loads(line))
        lists: list[list[Any]] = [span.roles, span.steps, span.step_ms, span.own_ms]
        lists += [*span.parts.values(), *span.waits.values()]
        return span if all(len(each) == len(span.ranks) for each in lists) else None
    except (ValueError, TypeError, AttributeError):
        return None
