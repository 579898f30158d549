"""Formats the outcome of ``ft selftest`` as a table or as JSON values."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ft.lab.selftest.values import FAIL, PASS, SKIPPED, Check, Result, together
from ft.show.text import count, seconds, table

FORMAT = 1
"""Version of the JSON values."""
_HEAD = ("check", "result", "time", "found")


@dataclass(frozen=True)
class Row:
    """A check with its results.

    Attributes:
        check: the check.
        results: one result for each node.
    """

    check: Check
    results: Sequence[Result]

    @property
    def result(self) -> Result:
        return together(list(self.results))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a self-test.

    Attributes:
        rows: one row for each check, in order.
        nodes: names of the nodes.
        folder: folder with the logs.
        seconds: duration.
    """

    rows: Sequence[Row]
    nodes: Sequence[str]
    folder: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Return whether no check has failed."""
        return all(row.result.outcome != FAIL for row in self.rows)


def as_text(outcome: Outcome) -> str:
    """Return the table, what to do about each failure, and a summary."""
    cells = [
        (
            row.check.name,
            row.result.outcome,
            seconds(row.result.seconds) if row.result.seconds else "-",
            row.result.text,
        )
        for row in outcome.rows
    ]
    lines = [table(_HEAD, [tuple(" ".join(cell.split()) for cell in line) for line in cells], right=(2,)), ""]
    for row in outcome.rows:
        if row.result.outcome == FAIL:
            lines += [f"{row.check.name} shows: {row.check.shows}", f"  what to do: {row.result.fix}"]
    numbers = Counter(row.result.outcome for row in outcome.rows)
    said = ", ".join(
        f"{numbers[kind]} {word}" for kind, word in ((PASS, "passed"), (FAIL, "failed"), (SKIPPED, "skipped"))
    )
    where = count(len(outcome.nodes), "node")
    return "\n".join([*lines, f"{said}; {where}, {seconds(outcome.seconds)}; logs: {outcome.folder}"])


def as_values(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as JSON values; docs/selftest.md describes them."""
    return {
        "format": FORMAT,
        "passed": outcome.passed,
        "nodes": list(outcome.nodes),
        "seconds": round(outcome.seconds, 3),
        "folder": outcome.folder,
        "checks": [_values(row) for row in outcome.rows],
    }


def _values(row: Row) -> dict[str, Any]:
    values = {"name": row.check.name, "shows": row.check.shows, **asdict(row.result)}
    return {**values, "node": None, "fix": row.result.fix or None, "nodes": [asdict(one) for one in row.results]}
