"""Measure how long ``ft plan spare simulate`` takes for 10,000 steps of 600,000 GPUs: scenarios of Table 1, one core.

    python tools/bench/spare_simulation.py >> tools/bench/results/spare_simulation.jsonl

Prints one JSON line with the processor seconds of a run (median and maximum over seeds) and ``calls``, the mean number
of groups lost in it: with the controller interpreted, and compiled if numba is installed. Compiling is part of the
warm-up. The goal is 1 s.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT)]

from ft.lab.simulate.spare.run import run  # noqa: E402
from ft.lab.simulate.spare.scenario import read_file, scenario  # noqa: E402
from ft.lab.simulate.spare.schemes import Spare  # noqa: E402
from ft.lab.simulate.spare.study import checkpoint_period  # noqa: E402
from ft.systems.spare.placement import Placement  # noqa: E402
from ft.systems.spare.ruler import ruler  # noqa: E402

CASES = ((200, 9), (600, 9), (1000, 9), (1000, 26))
GOAL_S = 1.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args(argv).seeds
    found = {"bench": "spare_simulation", "goal_s": GOAL_S, "interpreted_s": {}, "numba_s": {}}
    has_numba = importlib.util.find_spec("numba") is not None
    for groups, redundancy in CASES:
        for name, accelerate in (("interpreted_s", False), ("numba_s", True)):
            if has_numba or not accelerate:
                found[name][f"{groups},{redundancy}"] = measure(groups, redundancy, accelerate, seeds)
    if not has_numba:
        found["numba_s"] = "not installed"
    print(json.dumps({**found, "seeds": seeds, "load": [round(load, 1) for load in os.getloadavg()]}))
    return 0


def measure(groups: int, redundancy: int, accelerate: bool, seeds: int) -> dict[str, float]:
    """Return the processor seconds of whole runs, and the mean number of groups that were lost in one.

    Args:
        groups: number of groups.
        redundancy: number of hosts of a type.
        accelerate: whether numba compiles the controller.
        seeds: number of runs.
    """
    asked = scenario(read_file(ROOT / f"examples/spare/table1_n{groups}.toml"))
    law, period = asked.failures(), checkpoint_period(asked, "spare", redundancy)
    scheme = Spare(Placement(groups, ruler(groups, redundancy)), accelerate)
    run(replace(asked.job, steps=100), scheme, law, period, 0)
    took, losses = [], []
    for seed in range(seeds):
        scheme.reset()
        began = time.process_time()
        losses.append(run(asked.job, scheme, law, period, seed).losses)
        took.append(time.process_time() - began)
    return {
        "median": round(statistics.median(took), 3),
        "most": round(max(took), 3),
        "calls": round(sum(losses) / seeds),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
