"""The file ``step_times.jsonl`` of a run: where the time of its steps went, for each logical rank.

Each line is about a span of steps; later spans are longer, so that the file of a long run stays small. In a line,
``ranks`` are logical ranks, and every other list has one value for each of them, None where nothing was reported. All
times are milliseconds per step.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft.base import bounded_json, files

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
