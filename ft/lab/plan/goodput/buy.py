"""Implement ``ft plan buy``: every protection with its best settings in one table, and which of them to buy."""

import argparse
import csv
import io
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.base.scenario import ASSUMED, GIVEN, flag
from ft.lab.plan.goodput import scenario
from ft.lab.plan.goodput.answer import VARIED, Answer, answer, corruptions, hours, rests_on, row_values, spare_plan
from ft.lab.plan.goodput.scenario import Scenario, shown
from ft.show.text import left_out, percent, seconds, steer, table

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
    found = answer(read(given), progress())
    if given.spare_plan:
        Path(given.spare_plan).write_text(json.dumps(spare_plan(found)) + "\n")
    if given.plot:
        from ft.lab.plan.goodput.picture import pareto

        pareto(found, Path(given.plot))
    print(json.dumps(as_values(found)) if given.json else as_csv(found) if given.csv else as_text(found))
    return 0


def read(given: argparse.Namespace) -> Scenario:
    """Return the scenario of a command that can draw.

    Raises:
        UserError: the scenario or the ending of the picture is wrong.
    """
    if given.plot and Path(given.plot).suffix not in DRAWN:
        given.problems.append((f"--plot {given.plot}: this ending is unknown", f"end it in {', '.join(DRAWN)}"))
    return scenario.read(given)


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


def as_values(found: Answer) -> dict[str, Any]:
    """Return the answer as JSON values."""
    from ft.lab.plan.goodput.launch import lines

    asked = found.asked
    said = _said(asked)
    return {
        "rows": [row_values(asked, row) for row in found.rows],
        "recommended": row_values(asked, found.recommended) | {"reason": found.reason},
        "changes": [vars(change) for change in found.changes],
        "turns": [vars(turn) for turn in found.turns],
        "launch": lines(asked, found.recommended),
        "mtbf_s": asked.mtbf_s,
        "corruptions_expected": corruptions(asked),
        "assumed": {name: told for name, told in said.items() if asked.origin[name] == ASSUMED},
        "origin": {name: {"value": told, "from": asked.origin[name]} for name, told in said.items()},
    }


def _said(asked: Scenario) -> dict[str, str]:
    """Return the keys that have a value -> the value, as text."""
    return {name: shown(name, value) for name, value in asked.values.items() if value is not None}


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
    shown_rows = first_of_each(found.rows)
    rows = [_cells(asked, row, has_price) for row in shown_rows]
    head = (*_HEAD, *(("money",) if has_price else ()))
    notes = dict.fromkeys(note for row in found.rows for note in rests_on(row))
    parts = [
        LEFT_OUT,
        f"{asked.gpus:,} GPUs on {asked.nodes:,} nodes, a failure every {seconds(asked.mtbf_s)}; "
        f"{asked.days:g} days of training; {corruptions(asked):.1f} silent corruptions (SDC) expected",
        table(head, rows, right=range(1, len(head))) + (_LISTED if len(shown_rows) < len(found.rows) else ""),
        "\n".join(f"* {note}" for note in notes),
        found.reason,
        _changed(found),
        "\n".join(["To run it:", *(f"  {line}" for line in lines(asked, found.recommended).values())]),
        origins(asked),
    ]
    return "\n\n".join(part for part in parts if part)


_LISTED = "\neach row with the best of --spares; --json and --csv have a row for every number of standbys"


def first_of_each(rows: Sequence[Any]) -> list[Any]:
    """Return the first row of each protection that has several, one for each number of standbys."""
    found: dict[tuple, Any] = {}
    for row in rows:
        made = row.protection
        found.setdefault((made.names, made.returns, made.copies > 0, made.twice), row)
    return list(found.values())


def _cells(asked: Scenario, row: Any, has_price: bool) -> list[str]:
    money, memory = row.money(asked), row.memory(asked)
    marks = "*" * bool(rests_on(row))
    low, high = max(0.0, row.low), min(1.0, row.high)
    cells = [
        row.protection.title + marks,
        f"{row.spares:,}",
        f"{row.interval:,}" if row.interval < 10**9 else "never",
        f"{percent(row.effective)} ({100 * low:.1f}-{100 * high:.1f})",
        hours(row.paid),
        f"{row.days(asked):,.1f}" if math.isfinite(row.days(asked)) else "never",
        f"{row.idle_gpus:,.0f}",
        f"{memory / 1e9:,.0f} GB" if memory else "-",
        f"{row.network(asked) / 1e9:.2f} GB/s" if row.network(asked) else "-",
        percent(row.hour_lost),
        percent(row.protection.twice) if row.protection.twice else "-",
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
                hours(change.paid),
                f"{change.winner}: {hours(change.least)}" if change.wins else "the same",
            )
        )
    head = ("what would change the answer", "", "recommended row", "cheapest row")
    turns = [
        f"{turn.winner} is the cheapest if the {VARIED[turn.key]} is {'below' if turn.factor < 1 else 'above'} "
        f"{seconds(turn.value)} (x {turn.factor:.2g})."
        for turn in found.turns
    ]
    return "\n".join([table(head, rows, right=(2,)), *turns]) if rows else ""


def origins(asked: Scenario) -> str:
    """Return where each value is from, as text."""
    by_origin: dict[str, list[str]] = {}
    for name, told in _said(asked).items():
        by_origin.setdefault(asked.origin[name], []).append(f"{flag(name)} {told}")
    first = [GIVEN] if GIVEN in by_origin else []
    order = [*first, *(name for name in by_origin if name not in (GIVEN, ASSUMED, "searched", "chosen")), ASSUMED]
    return "\n".join(f"{name}: {', '.join(by_origin[name])}" for name in order if name in by_origin)
