"""The answer of ``ft plan buy``: the table of all protections, the row to buy and why, and what would change it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ft.base.errors import UserError
from ft.lab.plan.goodput.scenario import CHECKPOINTS, FEWER, Scenario
from ft.protection.table import DOUBLE, STACKS, STAGES, SWAPPED
from ft.show.text import count, percent, seconds

_ALIKE = 0.002
"""Rows whose paid hours differ by a smaller part are alike: the simpler one is recommended."""
_FACTORS = (0.1, 0.3, 3.0, 10.0)
_PRECISE = 0.03
"""The bisection for a turning point ends when its bounds differ by less than this fraction."""
VARIED = {"gpu_mtbf": "time between failures", "repair_time": "repair time", "restart_time": "restart time"}


@dataclass(frozen=True)
class Change:
    """What is best if one quantity differs.

    Attributes:
        key: the key that differs. ``factor``: its value, relative to the scenario's.
        paid: paid GPU hours per useful hour of the recommended row.
        winner: name of the cheapest row. ``least``: its paid hours.
        wins: whether this is another row than the recommended one, and not merely alike.
    """

    key: str
    factor: float
    paid: float
    winner: str
    least: float
    wins: bool


@dataclass(frozen=True)
class Turn:
    """A turning point: the value of one quantity beyond which another row is the cheapest.

    Attributes:
        key: the key. ``factor``: its value there, relative to the scenario's. ``value``: the same in seconds.
        winner: name of the row that is the cheapest beyond this value.
    """

    key: str
    factor: float
    value: float
    winner: str


@dataclass(frozen=True)
class Answer:
    """The table and what follows from it.

    Attributes:
        asked: the question.
        rows: all rows (:class:`ft.lab.plan.goodput.model.Row`), the cheapest first.
        recommended: the row to buy. ``reason``: why, in two sentences.
        changes: what would change the answer. ``turns``: the values at which it changes.
    """

    asked: Scenario
    rows: Sequence[Any]
    recommended: Any
    reason: str
    changes: Sequence[Change]
    turns: Sequence[Turn]


def answer(asked: Scenario, show: Any = None) -> Answer:
    """Return the table, the recommendation and what would change it."""
    from ft.lab.plan.goodput import model

    steps = len(model.combinations(asked)) + len(VARIED)
    rows = model.table(asked, lambda done, _, name: show(done, steps, name) if show else None)
    if not rows:
        raise UserError("no protection can train this model on so few GPUs", "give more --gpus, or fewer --params")
    best = recommended(rows)
    changes: list[Change] = []
    turns: list[Turn] = []
    for number, key in enumerate(VARIED):
        if show:
            show(steps - len(VARIED) + number, steps, f"other {VARIED[key]}")
        varied = Varied(asked, rows, best, key)
        changes += varied.changes()
        turns += varied.turns()
    if show:
        show(steps, steps, "")
    return Answer(asked, rows, best, _reason(asked, rows, best), changes, turns)


def is_ours(row: Any) -> bool:
    """Return whether a row is of this project, and without DMR, which protects against something else."""
    return FEWER not in row.protection.names and DOUBLE not in row.protection.names


def recommended(rows: Sequence[Any]) -> Any:
    """Return the row of this project with the fewest paid hours; of rows that are alike, the simplest."""
    ours = [row for row in rows if is_ours(row)]
    least = min(row.paid for row in ours)
    alike = [row for row in ours if row.paid <= least * (1.0 + _ALIKE)]
    return min(alike, key=lambda row: (len(row.protection.names), row.spares, row.paid))


def _reason(asked: Scenario, rows: Sequence[Any], best: Any) -> str:
    if not math.isfinite(best.paid):
        return (
            f"Nothing trains: with a failure every {seconds(asked.mtbf_s)}, no protection gets anything done in the "
            f"simulated time. {percent(best.shares['waiting for nodes'])} of it is a wait for repaired nodes."
        )
    standbys = f"{count(best.spares, 'standby node')} ({best.spares * asked.gpus_per_node:,} GPUs)"
    first = (
        f"Buy {best.protection.title} with {standbys if best.spares else 'no standby node'}: {best.paid:.3f} paid GPU "
        f"hours per useful hour, and {percent(best.effective)} of the time is useful."
    )
    alone = next((row for row in rows if row.protection.names == (CHECKPOINTS,)), None)
    if alone is None or alone is best:
        others = [row for row in rows if is_ours(row) and row is not best]
        if not others:
            return first
        return (
            f"{first} No other protection pays for itself: the next, {others[0].protection.title}, comes to "
            f"{others[0].paid:.3f}."
        )
    worst = max(alone.shares, key=lambda name: alone.shares[name])
    return (
        f"{first} Checkpoints alone come to {hours(alone.paid)}, above all because {percent(alone.shares[worst])} of "
        f"their time is {_LOST[worst]}."
    )


_LOST = {
    "stalled": "a stall",
    "recovering": "spent in restarts",
    "waiting for nodes": "a wait for repaired nodes",
    "saving": "spent in saves",
    "computed again": "computed again",
}


class Varied:
    """The table at other values of one quantity, each row with its own best interval and standbys."""

    def __init__(self, asked: Scenario, rows: Sequence[Any], best: Any, key: str) -> None:
        """Vary ``key`` of a question whose table has these rows, of which ``best`` is recommended."""
        from ft.lab.plan.goodput import model

        self._asked, self._best, self._key = asked, best, key
        self._now = asked.mtbf_s if key == "gpu_mtbf" else asked.values[key]
        self._protections = list(dict.fromkeys(row.protection for row in rows if is_ours(row)))
        self._search = 1500 if model.engine.player()[0] == "numba" else 300
        self._found: dict[float, list[Any]] = {}

    def _rows(self, factor: float, protections: Sequence[Any]) -> list[Any]:
        """Return the best rows of protections, and of the recommended one, at the quantity times ``factor``."""
        from ft.lab.plan.goodput import model

        by_rate = self._key == "gpu_mtbf"
        other = self._asked.but(**({"scale": 1.0 / factor} if by_rate else {self._key: self._now * factor}))
        if other.mtbf_s < other.step_time:
            return []
        return [model.best(other, [protection], self._search) for protection in protections]

    def _same(self, rows: Sequence[Any]) -> Any:
        return next(row for row in rows if row.protection == self._best.protection)

    def changes(self) -> list[Change]:
        """Return what is best at each of ``_FACTORS``."""
        found = []
        for factor in _FACTORS if self._now else ():
            rows = self._rows(factor, self._protections)
            if not rows:
                continue
            self._found[factor] = rows
            same, first = self._same(rows), recommended(rows)
            wins = first is not same and first.paid < same.paid * (1.0 - _ALIKE)
            first = first if wins else same
            found.append(Change(self._key, factor, same.paid, first.protection.title, first.paid, wins))
        return found

    def turns(self) -> list[Turn]:
        """Return the values nearest to the scenario's, below and above it, from which on another row wins.

        Each is found by bisection between a factor of :meth:`changes` at which another row wins and one at which none
        does, among the rows that win at the former.
        """
        found = []
        for side in (
            sorted((f for f in self._found if f < 1.0), reverse=True),
            sorted(f for f in self._found if f > 1),
        ):
            near = 1.0
            for far in side:
                if rivals := self._rivals(self._found[far]):
                    found.append(self._between(near, far, rivals))
                    break
                near = far
        return found

    def _rivals(self, rows: Sequence[Any]) -> list[Any]:
        """Return the rows that are cheaper than the recommended one, and not merely alike, the cheapest first."""
        least = self._same(rows).paid * (1.0 - _ALIKE)
        return sorted((row for row in rows if row.paid < least), key=lambda row: row.paid)

    def _between(self, near: float, far: float, rivals: Sequence[Any]) -> Turn:
        tried = [self._best.protection, *(row.protection for row in rivals)]
        while abs(math.log(far / near)) > _PRECISE:
            middle = math.sqrt(near * far)
            if there := self._rivals(self._rows(middle, tried)):
                far, rivals = middle, there
            else:
                near = middle
        return Turn(self._key, far, far * self._now, rivals[0].protection.title)


def hours(paid: float) -> str:
    """Return paid GPU hours per useful hour as text."""
    return f"{paid:.3f}" if math.isfinite(paid) else "never"


def spare_plan(found: Answer) -> list[dict[str, int]]:
    """Return the plan of a SPARe run, as :func:`ft.systems.spare.placement.read` takes it.

    Raises:
        UserError: the table has no row of SPARe.
    """
    best = next((row for row in found.rows if STACKS in row.protection.names and is_ours(row)), None)
    if best is None:
        raise UserError("the table has no row of SPARe", "give --replicas of 3 or more that divide the nodes")
    made = best.protection
    return [{"groups": made.units, "recommended": made.redundancy, "checkpoint_interval_steps": best.interval}]


def rests_on(row: Any) -> list[str]:
    """Return what a row's figures rest on beyond the values of the scenario."""
    notes = {
        STAGES: "CheckFree: 2 parameters fitted to 2 cells of its table 2; the others differ by up to 15 % "
        "(tools/experiments/papers.py), and there checkpoints at the best interval beat CheckFree at all its rates",
        SWAPPED: "CheckFree+: 5.6 % more steps, fitted to a cell of CheckFree's table 2",
        STACKS: "SPARe: stacks and patch computes by the trainer's own controller",
        FEWER: "fewer workers: ReCoVer (arXiv 2605.11215), with the stalls and recoveries of replicas; not in this "
        "project",
        DOUBLE: "DMR: the overhead is assumed within the 3 to 14 % of SpareTrain; ft dmr estimate has that of a model",
    }
    return [text for name, text in notes.items() if name in row.protection.names]


def row_values(asked: Scenario, row: Any) -> dict[str, Any]:
    """Return a row as JSON values: shares as fractions, times in seconds, sizes in bytes."""
    made, days, money = row.protection, row.days(asked), row.money(asked)
    return {
        "name": made.title,
        "protections": list(made.names),
        "replicas": made.units if made.units > 1 else None,
        "copies": made.copies,
        "redundancy": made.redundancy or None,
        "groups_return": made.returns if STACKS in made.names else None,
        "dmr_share": made.twice,
        "spares": row.spares,
        "interval_steps": row.interval,
        "effective": row.effective,
        "effective_low": row.low,
        "effective_high": row.high,
        "effective_error": row.error,
        "paid_per_useful": row.paid if math.isfinite(row.paid) else None,
        "days": days if math.isfinite(days) else None,
        "idle_gpus": row.idle_gpus,
        "host_memory_per_node": row.memory(asked),
        "network_per_node": row.network(asked),
        "money": money if money is not None and math.isfinite(money) else None,
        "hour_lost": row.hour_lost,
        "corruption_caught": made.twice,
        "shares": row.shares,
        "counts": row.totals,
        "levels": row.levels,
        "rests_on": rests_on(row),
    }


def corruptions(asked: Scenario) -> float:
    """Return the silent corruptions that are expected in a run without failures."""
    return asked.gpus * asked.days * 86400.0 / asked.sdc_mtbf
