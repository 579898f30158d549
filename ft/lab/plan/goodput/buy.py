"""Implement ``ft plan buy``: every protection with its best settings in one table, and which of them to buy."""

import argparse
import csv
import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.lab.plan.goodput import scenario
from ft.lab.plan.goodput.scenario import ASSUMED, GIVEN, KEYS, Scenario, flag, shown
from ft.protection.table import DOUBLE, STACKS, STAGES, SWAPPED
from ft.show.text import count, left_out, percent, seconds, steer, table

LEFT_OUT = left_out(
    "slow nodes", "several causes that depend on each other", "queues of the scheduler", "storage space"
)
DRAWN = (".png", ".svg", ".pdf")
_DESCRIPTION = """\
Compare every combination of protections, each with its best interval between checkpoints, number of standby nodes and
number of peer copies, and recommend the one with the fewest paid GPU hours per useful hour. Failures strike at any
moment, repairs take time, and a run without whole nodes waits. Times have a unit, such as 10s, 5m or 24h. The scenario
is a file (ft plan buy --init writes a commented one), flags, or both.

  ft plan buy --gpus 4096 --gpu-mtbf 50000h --step-time 10s --save-time 60s --restart-time 10m --repair-time 24h"""
_ALIKE = 0.002
"""Rows whose paid hours differ by a smaller part are alike: the simpler one is recommended."""
_FACTORS = (0.1, 0.3, 3.0, 10.0)
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
class Answer:
    """The table and what follows from it.

    Attributes:
        asked: the question.
        rows: all rows (:class:`ft.lab.plan.goodput.model.Row`), the cheapest first.
        recommended: the row to buy. ``reason``: why, in two sentences.
        changes: what would change the answer.
    """

    asked: Scenario
    rows: Sequence[Any]
    recommended: Any
    reason: str
    changes: Sequence[Change]


def add_parser(subparsers) -> None:
    """Add the subcommand ``buy``."""
    parser = subparsers.add_parser(
        "buy",
        help="what to buy: every protection with its best settings in one table, and a recommendation",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    scenario.add_flags(parser)
    parser.add_argument("--init", action="store_true", help="write a commented scenario file, and do nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--csv", action="store_true", help="print the table as CSV instead of text")
    parser.add_argument(
        "--plot", metavar="FILE", help=f"draw cost, risk and what would change them: {', '.join(DRAWN)}"
    )
    parser.add_argument("--spare-plan", metavar="FILE", help="write the best row of SPARe for ft run --ft-spare-plan")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Print the answer.

    Raises:
        UserError: the scenario is wrong, or a file cannot be written.
    """
    if given.init:
        return _init(Path(given.scenario or "scenario.toml"))
    if given.plot and Path(given.plot).suffix not in DRAWN:
        given.problems.append((f"--plot {given.plot}: this ending is unknown", f"end it in {', '.join(DRAWN)}"))
    found = answer(scenario.read(given), progress())
    if given.spare_plan:
        Path(given.spare_plan).write_text(json.dumps(spare_plan(found)) + "\n")
    if given.plot:
        from ft.lab.plan.goodput.picture import pareto

        pareto(found, Path(given.plot))
    print(json.dumps(as_values(found)) if given.json else as_csv(found) if given.csv else as_text(found))
    return 0


def _init(path: Path) -> int:
    if path.exists():
        raise UserError(f"{path} is there already", "name another file: ft plan buy FILE --init")
    path.write_text(scenario.template())
    print(f"wrote {path}; then: ft plan buy {path}")
    return 0


def progress() -> Any:
    """Return a function (finished, all, name) that shows a bar on a terminal's standard error; None elsewhere."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, every: int, name: str) -> None:
        bar = "#" * round(30 * done / every)
        steer(sys.stderr, f"\r\x1b[K[{bar:<30}] {name[:60]}" if done < every else "\r\x1b[K")

    return show


def answer(asked: Scenario, show: Any = None) -> Answer:
    """Return the table, the recommendation and what would change it."""
    from ft.lab.plan.goodput import model

    steps = len(model.combinations(asked)) + len(VARIED)
    rows = model.table(asked, lambda done, _, name: show(done, steps, name) if show else None)
    if not rows:
        raise UserError("no protection can train this model on so few GPUs", "give more --gpus, or fewer --params")
    best = recommended(rows)
    changes: list[Change] = []
    for number, key in enumerate(VARIED):
        if show:
            show(steps - len(VARIED) + number, steps, f"other {VARIED[key]}")
        changes += _changes(asked, rows, best, key)
    if show:
        show(steps, steps, "")
    return Answer(asked, rows, best, _reason(asked, rows, best), changes)


def is_ours(row: Any) -> bool:
    """Return whether a row is of this project, and without DMR, which protects against something else."""
    from ft.lab.plan.goodput.model import FEWER

    return FEWER not in row.protection.names and DOUBLE not in row.protection.names


def recommended(rows: Sequence[Any]) -> Any:
    """Return the row of this project with the fewest paid hours; of rows that are alike, the simplest."""
    ours = [row for row in rows if is_ours(row)]
    least = min(row.paid for row in ours)
    alike = [row for row in ours if row.paid <= least * (1.0 + _ALIKE)]
    return min(alike, key=lambda row: (len(row.protection.names), row.spares, row.paid))


def _reason(asked: Scenario, rows: Sequence[Any], best: Any) -> str:
    from ft.lab.plan.goodput.model import CHECKPOINTS

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
        f"{first} Checkpoints alone come to {_number(alone.paid)}, above all because {percent(alone.shares[worst])} of "
        f"their time is {_LOST[worst]}."
    )


_LOST = {
    "stalled": "a stall",
    "recovering": "spent in restarts",
    "waiting for nodes": "a wait for repaired nodes",
    "saving": "spent in saves",
    "computed again": "computed again",
}


def _changes(asked: Scenario, rows: Sequence[Any], best: Any, key: str) -> list[Change]:
    """Return what is best with other values of a key, each row with its own best interval and standbys."""
    from ft.lab.plan.goodput import model

    found = []
    search = 1500 if model.engine.player()[0] == "numba" else 300
    for factor in _FACTORS:
        if key == "gpu_mtbf":
            other = asked.but(scale=1.0 / factor)
        elif asked.values[key]:
            other = asked.but(**{key: asked.values[key] * factor})
        else:
            continue
        if other.mtbf_s < other.step_time:
            continue
        ours = [model.best(other, [row.protection], search) for row in rows if is_ours(row)]
        same = next(row for row in ours if row.protection == best.protection)
        first = recommended(ours)
        wins = first is not same and first.paid < same.paid * (1.0 - _ALIKE)
        first = first if wins else same
        found.append(Change(key, factor, same.paid, first.protection.title, first.paid, wins))
    return found


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
        STAGES: "CheckFree: 2 parameters fitted to 2 cells of its table 2; the others differ by up to 15 % (ft plan "
        "paper checkfree), and there checkpoints at the best interval beat CheckFree at all its rates",
        SWAPPED: "CheckFree+: 5.6 % more steps, fitted to a cell of CheckFree's table 2",
        STACKS: "SPARe: stacks and patch computes by the trainer's own controller",
        DOUBLE: "DMR: the overhead is assumed within the 3 to 14 % of SpareTrain; ft dmr estimate has that of a model",
    }
    found = [text for name, text in notes.items() if name in row.protection.names]
    return [_RIVAL] if _is_rival(row) else found


_RIVAL = "fewer workers: ReCoVer (arXiv 2605.11215), with the stalls and recoveries of replicas; not in this project"


def _is_rival(row: Any) -> bool:
    from ft.lab.plan.goodput.model import FEWER

    return FEWER in row.protection.names


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
        "corruption_caught": row.caught(),
        "shares": row.shares,
        "counts": row.totals,
        "rungs": row.rungs,
        "rests_on": rests_on(row),
    }


def as_values(found: Answer) -> dict[str, Any]:
    """Return the answer as JSON values."""
    from ft.lab.plan.goodput.launch import lines

    asked = found.asked
    said = _said(asked)
    return {
        "rows": [row_values(asked, row) for row in found.rows],
        "recommended": row_values(asked, found.recommended) | {"reason": found.reason},
        "changes": [vars(change) for change in found.changes],
        "launch": lines(asked, found.recommended),
        "mtbf_s": asked.mtbf_s,
        "corruptions_expected": corruptions(asked),
        "assumed": {name: told for name, told in said.items() if asked.origin[name] == ASSUMED},
        "origin": {name: {"value": told, "from": asked.origin[name]} for name, told in said.items()},
    }


def corruptions(asked: Scenario) -> float:
    """Return the silent corruptions that are expected in a run without failures."""
    return asked.gpus * asked.days * 86400.0 / asked.sdc_mtbf


def _said(asked: Scenario) -> dict[str, str]:
    """Return the keys that have a value -> the value, as text."""
    return {name: shown(value, KEYS[name]) for name, value in asked.values.items() if value is not None}


def as_csv(found: Answer) -> str:
    """Return the table as CSV, with the names of the JSON values as columns."""
    rows = [row_values(found.asked, row) for row in found.rows]
    names = [name for name, value in rows[0].items() if not isinstance(value, dict | list)]
    out = io.StringIO()
    writer = csv.DictWriter(out, ["protections", *names], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row | {"protections": "+".join(row["protections"])})
    return out.getvalue().rstrip("\n")


_HEAD = ("protection", "standbys", "checkpoint every", "effective (95 %)", "paid/useful", "days", "idle GPUs")
_HEAD += ("memory/node", "network/node", "> 1 h lost", "SDC caught")


def as_text(found: Answer) -> str:
    """Return the table, the recommendation, what would change it, the launch lines and the origin of every value."""
    from ft.lab.plan.goodput.launch import lines

    asked = found.asked
    has_price = asked.price_per_gpu_hour is not None
    rows = [_cells(asked, row, has_price) for row in found.rows]
    head = (*_HEAD, *(("money",) if has_price else ()))
    notes = dict.fromkeys(note for row in found.rows for note in rests_on(row))
    parts = [
        LEFT_OUT,
        f"{asked.gpus:,} GPUs on {asked.nodes:,} nodes, a failure every {seconds(asked.mtbf_s)}; "
        f"{asked.days:g} days of training; {corruptions(asked):.1f} silent corruptions (SDC) expected",
        table(head, rows, right=range(1, len(head))),
        "\n".join(f"* {note}" for note in notes),
        found.reason,
        _changed(found),
        "\n".join(["To run it:", *(f"  {line}" for line in lines(asked, found.recommended).values())]),
        origins(asked),
    ]
    return "\n\n".join(part for part in parts if part)


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "never"


def _cells(asked: Scenario, row: Any, has_price: bool) -> list[str]:
    money, memory = row.money(asked), row.memory(asked)
    marks = "*" * bool(rests_on(row))
    low, high = max(0.0, row.low), min(1.0, row.high)
    cells = [
        row.protection.title + marks,
        f"{row.spares:,}",
        f"{row.interval:,}" if row.interval < 10**9 else "never",
        f"{percent(row.effective)} ({100 * low:.1f}-{100 * high:.1f})",
        _number(row.paid),
        f"{row.days(asked):,.1f}" if math.isfinite(row.days(asked)) else "never",
        f"{row.idle_gpus:,.0f}",
        f"{memory / 1e9:,.0f} GB" if memory else "-",
        f"{row.network(asked) / 1e9:.2f} GB/s" if row.network(asked) else "-",
        percent(row.hour_lost),
        percent(row.caught()) if row.caught() else "-",
    ]
    return [*cells, f"{money:,.0f}"] if has_price and money is not None else cells


def _changed(found: Answer) -> str:
    """Return what would change the answer, as a table."""
    asked, rows = found.asked, []
    for change in found.changes:
        now = asked.mtbf_s if change.key == "gpu_mtbf" else asked.values[change.key]
        rows.append(
            (
                VARIED[change.key],
                f"x {change.factor:g}: {seconds(now * change.factor)}",
                _number(change.paid),
                f"{change.winner}: {_number(change.least)}" if change.wins else "the same",
            )
        )
    head = ("what would change the answer", "", "recommended row", "cheapest row")
    return table(head, rows, right=(2,)) if rows else ""


def origins(asked: Scenario) -> str:
    """Return where each value is from, as text."""
    by_origin: dict[str, list[str]] = {}
    for name, told in _said(asked).items():
        by_origin.setdefault(asked.origin[name], []).append(f"{flag(name)} {told}")
    first = [GIVEN] if GIVEN in by_origin else []
    order = [*first, *(name for name in by_origin if name not in (GIVEN, ASSUMED, "searched", "chosen")), ASSUMED]
    return "\n".join(f"{name}: {', '.join(by_origin[name])}" for name in order if name in by_origin)
