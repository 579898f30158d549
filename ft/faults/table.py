"""Every kind of fault, once: what breaks, what gives it away, what it is taken for, what comes of it.

``ft run --inject`` takes its kinds from here, the tests go through the rows, ``ft faults`` prints them, and the page
``docs/what_happens_when.md`` is made of them.
"""

from ft.faults.distributions import parse_duration
from ft.faults.faults import Fault
from ft.faults.kinds import START, Row
from ft.faults.rows import around, workers

GROUPS: dict[str, tuple[Row, ...]] = {**workers.GROUPS, **around.GROUPS}
"""Heading -> rows."""

TABLE = tuple(row for rows in GROUPS.values() for row in rows)
NAMES = tuple(dict.fromkeys(row.kind for row in TABLE if row.where != START))
"""The kinds that ``--inject`` knows."""


def rows_of(kind: str) -> list[Row]:
    """The ways of a kind."""
    return [row for row in TABLE if row.kind == kind]


def row_of(fault: Fault) -> Row:
    """The way of its kind that a planned fault is.

    Raises:
        StopIteration: there is none of its kind.
    """
    rows = sorted(rows_of(fault.kind), key=lambda row: not row.how)
    return next(row for row in rows if all(_has(fault, pair) for pair in filter(None, row.how.split(":"))))


def _has(fault: Fault, pair: str) -> bool:
    key, _, value = pair.partition("=")
    if key == "node":
        return fault.is_agents
    if key == "mode":
        return fault.flip is not None and fault.flip.mode == value
    if key == "for":
        return fault.seconds is not None and fault.seconds >= parse_duration(value)
    return getattr(fault, key) == value
