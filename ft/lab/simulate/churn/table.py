"""Format the results of ``ft simulate churn`` as text and as JSON values: one row per failure rate and strategy."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ft.lab.simulate.churn.fit import Fit
from ft.lab.simulate.churn.scenario import Scenario
from ft.lab.simulate.churn.strategy import CHECKFREE, CHECKPOINT, NAMES, PLUS, REDUNDANT, strategy
from ft.lab.simulate.churn.study import Row
from ft.show.text import count, left_out, percent, seconds, table

LEFT_OUT = left_out(
    "repairs (each recovery finds a node)",
    "nodes with several stages",
    "losses off the given law",
)

_HEAD = (
    "rate",
    "strategy",
    "train time",
    "10-90 %",
    "iteration",
    "iterations",
    "failures",
    "falls back",
    "checkpoint every",
)
_PAPER = ("paper", "ours / paper")


def as_text(asked: Scenario, rows: Sequence[Row], fitted: Fit | None, matched: Sequence[float | None] | None) -> str:
    """Return what is left out, a summary of the scenario, a table of the results, and the assumptions of the model.

    Args:
        asked: the scenario.
        rows: the results.
        fitted: the parameters that were fitted to published hours, None if no fit was requested.
        matched: for each row, the failure rate at which the simulation takes the published hours; None if this was not
            requested.
    """
    beside = any(row.published is not None for row in rows)
    head = [*_HEAD, *(_PAPER if beside else ()), *(("paper's is ours at",) if matched else ())]
    lines = []
    for place, row in enumerate(rows):
        cells = _cells(row) + (_against(row) if beside else [])
        lines.append(cells + ([_rate(matched[place], row)] if matched else []))
        if place + 1 < len(rows) and rows[place + 1].rate != row.rate:
            lines.append([""] * len(head))
    shown = table(head, lines, right=range(2, len(head)))
    parts = [LEFT_OUT, "", *_question(asked), "", shown, "", *_model(asked, fitted)]
    return "\n".join(parts + _given_up(asked, rows))


def as_values(asked: Scenario, rows: Sequence[Row], fitted: Fit | None, matched: Sequence[float | None] | None) -> Any:
    """Return the results as a JSON-serializable mapping; times are in seconds unless the key says otherwise."""
    cases = [asdict(row) for row in rows]
    if matched:
        cases = [{**case, "matching_rate": rate} for case, rate in zip(cases, matched, strict=True)]
    return {
        "job": asdict(asked.costs),
        "loss": {**asdict(asked.law), "target": asked.law.target},
        "rates": asked.rates,
        "trace": asked.trace,
        "seeds": asked.seeds,
        "seed": asked.seed,
        "fitted": None if fitted is None else asdict(fitted),
        "cases": cases,
    }


def _cells(row: Row) -> list[str]:
    spread = "-" if row.low is None or row.high is None else f"{row.low:.0f}-{row.high:.0f}"
    return [
        "trace" if row.rate is None else f"{100 * row.rate:.4g} %",
        NAMES[row.strategy],
        "never" if row.hours is None else f"{row.hours:.1f} h",
        spread,
        "-" if row.iteration_s is None else f"{row.iteration_s:.1f} s",
        f"{row.iterations:.0f}",
        f"{row.failures:.1f}",
        f"{row.falls:.1f}",
        "-" if row.every is None else f"{row.every}",
    ]


def _against(row: Row) -> list[str]:
    if row.published is None:
        return ["-", "-"]
    return [f"{row.published:.1f} h", "-" if row.hours is None else f"{row.hours / row.published:.2f}"]


def _rate(found: float | None, row: Row) -> str:
    return "-" if found is None or row.published is None else percent(found)


def _question(asked: Scenario) -> list[str]:
    costs = asked.costs
    failing = f"trace {asked.trace}" if asked.trace else f"{count(asked.seeds, 'seed')} each"
    return [
        f"{costs.stages} stages that can fail, iterations of {seconds(costs.iteration_s)}, {asked.law.iterations} of "
        f"them to the target without failures; {failing}",
        "failures: each stage fails independently, with the given probability within an hour"
        if not asked.trace
        else "failures: as recorded; none follows the last recorded one",
    ]


def _model(asked: Scenario, fitted: Fit | None) -> list[str]:
    costs, law = asked.costs, asked.law
    paces = {key: seconds(strategy(key, costs).iteration_s) for key in NAMES}
    ends = {"copy": "are copied", "checkpoint": "fall back to the checkpoint", "safe": "are never lost"}[costs.ends]
    adjacent = (
        "if two adjacent stages are lost within that time, the run returns to a checkpoint, of which there is one "
        f"every {costs.fallback} iterations"
        if costs.fallback
        else "two adjacent stages are never lost at once (--fallback N: they may be)"
    )
    source = "" if fitted is None else f" (fitted to {100 * fitted.rate:.4g} %)"
    lines = {
        "loss": [
            f"{law.floor:g} + {law.above:g} (n / {law.iterations})^-{law.exponent:g} after n iterations,",
            f"without failures; target {law.target:.4g}, measured every {law.evaluate} iterations",
        ],
        "a lost stage": [f"all wait {seconds(costs.recovery_s)}; {adjacent}"],
        NAMES[CHECKPOINT]: [
            f"iteration {paces[CHECKPOINT]}; every {costs.interval} iterations a save of {seconds(costs.save_s)}; "
            f"after a loss the run returns to it: {seconds(costs.load_s)} more;",
            "the best interval is by Daly's formula",
        ],
        "redundant": [f"iteration {paces[REDUNDANT]}; nothing is lost, all wait {seconds(costs.redundant_pause_s)}"],
        NAMES[CHECKFREE]: [
            f"iteration {paces[CHECKFREE]}; a rebuilt stage is a jump of the loss by {costs.jump:.4g}{source}",
            f"and shrinks to 1/e in {law.made_good:g} iterations; first and last stage {ends}: {costs.ends_jump:.4g}",
        ],
        NAMES[PLUS]: [
            f"iteration {paces[PLUS]}: bubbles {percent(costs.bubbles)} -> {percent(costs.swapped_bubbles)}; first and "
            f"last stage are copied: {costs.swapped_jump:.2g};",
            f"{percent(costs.slowdown)} more iterations by swap training{source}",
        ],
    }
    shown = ["Assumptions of the model."]
    for name, (first, *others) in lines.items():
        shown += [f"  {name:13s}  {first}", *(f"  {'':13s}  {other}" for other in others)]
    return shown


def _given_up(asked: Scenario, rows: Sequence[Row]) -> list[str]:
    late = [row for row in rows if row.given_up]
    return [
        f"{NAMES[row.strategy]} at {'the trace' if row.rate is None else f'{100 * row.rate:.4g} %'}: "
        f"{row.given_up} of {count(asked.seeds, 'run')} given up after {asked.limit * asked.plain_s / 3600:.0f} h"
        for row in late
    ]
