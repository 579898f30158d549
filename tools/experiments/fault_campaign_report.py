"""Table, figure and times of a fault campaign's runs (:mod:`fault_campaign`)."""

import json
import statistics
from pathlib import Path

from ft.faults.faults import RECOVERY_PHASES
from ft.faults.page import TIMES
from ft.faults.table import HARMLESS, IN_PLACE, MEANING, REPLACED, RESTARTED, TABLE

RESULTS = "tools/experiments/results/fault_campaign"
_OUTCOMES = {"in place": IN_PLACE, "replaced": REPLACED, "restart": RESTARTED}
_COLOURS = {IN_PLACE: "#d98e04", REPLACED: "#c8322b", RESTARTED: "#4b3f72"}


def write(runs: list[dict], root: Path) -> str:
    """Write the results under ``root``; return the table."""
    text = table(runs)
    path = root / RESULTS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text(text)
    (root / TIMES).write_text(json.dumps(times(runs), indent=1) + "\n")
    picture(runs, path.with_suffix(".png"))
    return text


def command(runs: list[dict]) -> str:
    """Return the command that produces these runs."""
    numbers: dict[str, list[int]] = {"seed": [], "matrix": []}
    for run in runs:
        kind, _, number = run["name"].partition(" ")
        numbers[kind].append(int(number))
    spans = {kind: f"{min(some)}..{max(some)}" for kind, some in numbers.items() if some}
    flags = [f"{flag} {spans[kind]}" for kind, flag in (("seed", "--seeds"), ("matrix", "--matrix")) if kind in spans]
    return f"python tools/experiments/fault_campaign.py {' '.join(flags)} --report --into FOLDER"


def by_row(runs: list[dict]) -> dict[str, list[dict]]:
    """Return row's name -> its faults in all runs, in the order of the table of kinds."""
    faults = [fault for run in runs for fault in run["faults"]]
    found = {row.name: [f for f in faults if f["row"] == row.name] for row in TABLE}
    return {name: some for name, some in found.items() if some}


def alone(faults: list[dict]) -> list[float]:
    """Return the seconds without training of the faults that were the only one in their interruption."""
    return [f["seconds"] for f in faults if f["seconds"] is not None and f["together"] == 1]


def times(runs: list[dict]) -> dict:
    """Return the figures for the documentation: row's name -> count, median and maximum."""
    found: dict = {"command": command(runs), "runs": len(runs), "faults": sum(len(run["faults"]) for run in runs)}
    for name, faults in by_row(runs).items():
        seconds = alone(faults)
        median = round(statistics.median(seconds), 3) if seconds else None
        found[name] = {"count": len(faults), "median_s": median, "worst_s": max(seconds, default=None)}
    return found


def table(runs: list[dict]) -> str:
    """Return the table as text for a terminal."""
    faults = [fault for run in runs for fault in run["faults"]]
    inside = sum(f["where"] in RECOVERY_PHASES for f in faults)
    together = sum(f["together"] > 1 for f in faults)
    problems = [run for run in runs if run["problem"]]
    lines = [
        command(runs),
        "",
        f"{len(faults)} faults in {len(runs)} runs of 4 ranks (PP 2 x DP 2, distributed optimizer) and 1 standby,",
        f"{inside} of them inside a phase of a recovery; {together} shared an interruption with another fault.",
        f"hangs: {_count(runs, 'hang')}   wrong losses: {_count(runs, 'wrong losses')}   "
        f"runs that did not reach their end: {_count(runs, 'stopped')}   sound runs: {len(runs) - len(problems)}",
        "",
        "seconds without training, from the fault to the next step on every rank; of faults that had the interruption "
        "to themselves",
        "",
        f"{'fault':30} {'count':>5} {'no stop':>8} {'in place':>8} {'replaced':>8} {'restart':>8} "
        f"{'median s':>9} {'worst s':>9}",
    ]
    for name, some in by_row(runs).items():
        counts = [sum(f["outcome"] == word for f in some) for word in (HARMLESS, "in place", "replaced", "restart")]
        seconds = alone(some)
        median, worst = (f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}") if seconds else ("-", "-")
        lines.append(
            f"{name:30} {len(some):5} " + " ".join(f"{c or '':>8}" for c in counts) + f" {median:>9} {worst:>9}"
        )
    lines += ["", *(f"{run['name']}: {run['problem']}: {run['inject']}" for run in problems)]
    return "\n".join(lines).rstrip() + "\n"


def _count(runs: list[dict], problem: str) -> int:
    return sum(run["problem"] == problem for run in runs)


def picture(runs: list[dict], path: Path) -> None:
    """Draw recovery times by kind, each as a dot, on a logarithmic axis; the median as a bar."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {name: some for name, some in by_row(runs).items() if alone(some)}
    order = sorted(rows, key=lambda name: statistics.median(alone(rows[name])))
    figure, axes = pyplot.subplots(figsize=(8.5, 0.27 * len(order) + 1.6), dpi=100)
    for place, name in enumerate(order):
        for outcome, colour in _COLOURS.items():
            seconds = alone([f for f in rows[name] if _OUTCOMES.get(f["outcome"]) == outcome])
            axes.scatter(seconds, [place] * len(seconds), s=16, color=colour, alpha=0.6, linewidths=0)
        axes.vlines(statistics.median(alone(rows[name])), place - 0.35, place + 0.35, color="#1f2933", linewidth=1.4)
    axes.set_xscale("log")
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.set_xlabel("seconds from the fault to the next step on every rank")
    count = sum(len(alone(some)) for some in rows.values())
    axes.set_title(f"{count} injected faults that each stopped training by itself", fontsize=10)
    for outcome in MEANING:
        if outcome in _COLOURS:
            axes.scatter([], [], s=16, color=_COLOURS[outcome], label=outcome)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    axes.grid(axis="x", color="#dfe4ea", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
