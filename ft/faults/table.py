"""The table of all kinds of faults: what each one breaks, how it is detected, how it is classified, and its outcome.

``ft run --inject`` takes its kinds from this table, the tests iterate over its rows, ``ft faults`` prints it, and the
page ``docs/what_happens_when.md`` is generated from it.
"""

from ft.faults.distributions import parse_duration
from ft.faults.faults import Fault
from ft.faults.kinds import START, Row
from ft.faults.rows import outside_workers, workers

GROUPS: dict[str, tuple[Row, ...]] = {**workers.GROUPS, **outside_workers.GROUPS}
"""Heading -> rows."""

TABLE = tuple(row for rows in GROUPS.values() for row in rows)
NAMES = tuple(dict.fromkeys(row.kind for row in TABLE if row.where != START))
"""The kinds that ``--inject`` accepts."""


def rows_of(kind: str) -> list[Row]:
    """Return the rows of a kind, one for each variant."""
    return [row for row in TABLE if row.kind == kind]


def row_of(fault: Fault) -> Row:
    """Return the row of the variant that a planned fault belongs to.

    Raises:
        StopIteration: no row has its kind.
    """
    rows = sorted(rows_of(fault.kind), key=lambda row: not row.how)
    return next(row for row in rows if all(_has(fault, pair) for pair in filter(None, row.how.split(":"))))


def _has(fault: Fault, pair: str) -> bool:
    key, _, value = pair.partition("=")
    if key == "node":
        return fault.is_injected_by_agent
    if key == "mode":
        return fault.flip is not None and fault.flip.mode == value
    if key == "for":
        return fault.seconds is not None and fault.seconds >= parse_duration(value)
    return getattr(fault, key) == value
