"""Implement ``ft plan spares`` and ``ft plan interval``: views on the model behind ``ft plan buy``.

The modules with numerical libraries are imported when they are needed, so that wrong input is refused at once.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ft.lab.plan.goodput import scenario
from ft.lab.plan.goodput.answer import row_values
from ft.lab.plan.goodput.buy import DRAWN, LEFT_OUT, origins, read
from ft.lab.plan.goodput.scenario import Scenario
from ft.protection.table import HOT_SWAP, REPLICAS
from ft.show.text import percent, seconds, table

_FACTORS = (0.1, 0.2, 0.35, 0.6, 0.8, 1.0, 1.25, 1.7, 3.0, 5.0, 10.0)


def add_parser(subparsers) -> None:
    """Add the subcommands ``spares`` and ``interval``."""
    for name, main, about, more in (
        ("spares", run_spares, "how many standby nodes pay for themselves", "numbers of standby nodes"),
        ("interval", run_interval, "how often to save, beside the formulas of Young and Daly", "intervals"),
    ):
        description = (
            f"Show the useful time with different {more}, with checkpoints alone, with hot-swap and with replicas. The "
            "scenario is that of ft plan buy."
        )
        parser = subparsers.add_parser(name, help=about, description=description)
        scenario.add_flags(parser)
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")
        parser.add_argument("--plot", metavar="FILE", help=f"draw the curves: {', '.join(DRAWN)}")
        parser.set_defaults(main=main)


def _best(asked: Scenario) -> dict[str, Any]:
    """Return name -> the best row of checkpoints alone, hot-swap with one copy, and replicas."""
    from ft.lab.plan.goodput import model

    tried = {"checkpoints": [model.ProtectionChoice((model.CHECKPOINTS,))]}
    if asked.nodes > 1:
        tried["hot-swap"] = [model.ProtectionChoice((HOT_SWAP,), copies=1)]
    tried["replicas"] = model.candidates(asked, (REPLICAS,))
    return {name: model.best(asked, each) for name, each in tried.items() if each}


def run_spares(given: argparse.Namespace) -> int:
    """Print a table of the useful time and the paid hours for each number of standby nodes.

    Raises:
        UserError: the scenario is wrong, or the picture cannot be written.
    """
    asked = read(given)
    from ft.lab.plan.goodput import model  # with SciPy, which wrong input need not wait for

    tries = model.standbys_to_try(asked)
    simulated = asked.but(failures=asked.failures or 20_000)
    rows = {
        name: [model.final(simulated, replace(row, spares=n)) for n in tries]
        for name, row in _best(asked.but(spares=())).items()
    }
    lost = sum(cause.rate(asked.nodes) * cause.taken for cause in asked.causes)
    node = asked.nodes / lost if lost else math.inf
    waits = [percent(model.waiting(asked.nodes, n, node, asked.repair_time)) for n in tries]
    head = ["standbys", "waits", *(f"{name}: useful, paid" for name in rows)]
    best = {name: min(each, key=lambda row: row.paid) for name, each in rows.items()}
    lines = [
        [str(n), waits[i], *(f"{percent(r[i].effective)} {r[i].paid:8.4f} {_mark(r[i], best)}" for r in rows.values())]
        for i, n in enumerate(tries)
    ]
    values = {name: [row_values(asked, row) for row in each] for name, each in rows.items()}
    _show(given, asked, values, [table(head, lines, right=range(len(head))), _SPARES])
    _draw(given, asked, "standby nodes", {name: [(row.spares, row) for row in each] for name, each in rows.items()})
    return 0


_SPARES = """\
waits: share of the time in which fewer nodes than needed are whole, in the exact birth-and-death chain of independent
nodes. <: the fewest paid GPU hours per useful hour."""


def run_interval(given: argparse.Namespace) -> int:
    """Print a table of the useful time for different numbers of steps between checkpoints.

    Raises:
        UserError: the scenario is wrong, or the picture cannot be written.
    """
    asked = read(given)
    from ft.lab.plan.goodput import model  # with SciPy, which wrong input need not wait for

    chosen = _best(asked.but(interval=None))
    alone = chosen["checkpoints"].interval
    tries = sorted({max(1, round(alone * factor)) for factor in _FACTORS} | {asked.interval or alone})
    failures = asked.failures or 20_000
    rows = {
        name: [model.simulate(asked, row.protection, row.spares, n, failures) for n in tries]
        for name, row in chosen.items()
    }
    times = asked.save_time, asked.restart_time, asked.mtbf_s
    daly = [model.daly(n * asked.step_time, *times) for n in tries]
    young = model.young(asked.save_time, asked.mtbf_s) / asked.step_time
    best = {name: max(each, key=lambda row: row.effective) for name, each in rows.items()}
    head = ["steps", "every", *(f"{name}, {row.spares} standbys" for name, row in chosen.items()), "Daly's formula"]
    lines = [
        [f"{n:,}", seconds(n * asked.step_time)]
        + [f"{percent(each[i].effective)} {_mark(each[i], best)}" for each in rows.values()]
        + [percent(daly[i])]
        for i, n in enumerate(tries)
    ]
    said = f"{_DALY} Young's estimate is {young:,.0f} steps; each protection has an optimum of its own (<)."
    values = {name: [row_values(asked, row) for row in each] for name, each in rows.items()}
    values = {"rows": values, "daly": daly, "young_steps": young}
    _show(given, asked, values, [table(head, lines, right=range(len(head))), said])
    points = {name: [(row.interval, row) for row in each] for name, each in rows.items()}
    _draw(given, asked, "steps between checkpoints", points)
    return 0


_DALY = "Daly's formula: the exact useful time of checkpoints alone if a restart never waits for a node."


def _mark(row: Any, best: dict[str, Any]) -> str:
    return "<" if any(row is each for each in best.values()) else " "


def _show(given: argparse.Namespace, asked: Scenario, values: Any, parts: list[str]) -> None:
    print(json.dumps(values) if given.json else "\n\n".join([LEFT_OUT, *parts, origins(asked)]))


def _draw(given: argparse.Namespace, asked: Scenario, label: str, rows: dict[str, list[tuple[int, Any]]]) -> None:
    if given.plot:
        from ft.lab.plan.goodput.picture import curves

        lines = {name: [(at, row.effective) for at, row in each] for name, each in rows.items()}
        title = f"{asked.gpus:,} GPUs: useful time by {label}"
        curves(title, label, lines, Path(given.plot), log=label.startswith("steps"))
