"""Measure the calls of SPARe's controller, and the Monte Carlo trials of tables 4 to 6 of the SPARe paper.

    python tools/bench/spare.py
    python tools/bench/spare.py --rows 55 --trials 1000

Prints one JSON line. ``compiled`` (if numba is installed) and ``interpreted`` hold the mean, median, 99th percentile
and maximum, in milliseconds, of calls of ``Controller.lose`` for every failure of whole trials at (1000, 26), including
state and answer. ``table_s`` is the time of ``--trials`` Monte Carlo trials for each of the first ``--rows`` rows of
the tables on one core, compiled if numba is installed; ``table_cpu_s`` is its CPU time.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from closed_forms import spare_tables, trials  # noqa: E402

from ft.systems.spare.controller import Controller  # noqa: E402
from ft.systems.spare.placement import Placement  # noqa: E402
from ft.systems.spare.ruler import ruler  # noqa: E402

NUMBA = importlib.util.find_spec("numba") is not None
ROWS = spare_tables()
SEED = 1


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--redundancy", type=int, default=26)
    parser.add_argument("--whole-trials", type=int, default=10, help="trials in which each call is timed")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="number of rows of the tables")
    parser.add_argument("--trials", type=int, default=100, help="trials of each row")
    given = parser.parse_args(argv)
    placement = Placement(given.groups, ruler(given.groups, given.redundancy))
    found = {"bench": "spare", **vars(given)}
    if NUMBA:
        found["compiled"] = figures(calls(placement, given.whole_trials, accelerate=True))
    found["interpreted"] = figures(calls(placement, given.whole_trials, accelerate=False))
    print(json.dumps(found | table(ROWS[: given.rows], given.trials)))
    return 0


def calls(placement: Placement, trials: int, accelerate: bool) -> list[float]:
    """Return the seconds of each call, over ``trials`` trials after one warm-up trial."""
    controller, rng, found = Controller(placement, accelerate), np.random.default_rng(SEED), []
    for trial in range(trials + 1):
        controller.reset()
        for group in rng.permutation(placement.groups).tolist():
            began = time.perf_counter()
            done = controller.lose([group])
            if trial > 0:
                found.append(time.perf_counter() - began)
            if done.wipe_out:
                break
    return found


def table(rows: list, number: int) -> dict[str, float]:
    """Measure the seconds of the Monte Carlo for these rows, after rulers are computed and code is compiled."""
    placements = [Placement(groups, ruler(groups, redundancy)) for groups, redundancy, *_ in rows]
    trials(placements[0], 1, SEED)
    wall, core = time.perf_counter(), time.process_time()
    for placement in placements:
        trials(placement, number, SEED)
    wall, core = time.perf_counter() - wall, time.process_time() - core
    return {"table_s": round(wall, 2), "table_cpu_s": round(core, 2)}


def figures(seconds: list[float]) -> dict[str, float]:
    """Return mean, median, 99th percentile and maximum in milliseconds, and the number of values."""
    values = {
        "mean_ms": statistics.fmean(seconds),
        "median_ms": statistics.median(seconds),
        "p99_ms": statistics.quantiles(seconds, n=100)[98],
        "max_ms": max(seconds),
    }
    return {"calls": len(seconds), **{name: round(value * 1e3, 4) for name, value in values.items()}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
