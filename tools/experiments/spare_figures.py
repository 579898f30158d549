"""Figures 4 to 8 and Table 2 of the SPARe paper, redrawn by the planner and the simulation, with the paper's points.

    python tools/experiments/spare_figures.py [--seeds 3]

Scenarios: examples/spare/table1_n*.toml. The paper's points: its Table 2 (figures 6 and 7), and tables 4 to 6 of its
appendix C beside the same Monte Carlo here (figures 4 and 5). Results: results/spare_figures.txt and .png beside this
file. About a minute with numba.
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(Path(__file__).parent)]

from spare_figures_report import Case, write  # noqa: E402

from ft.lab.plan.spare.trials import Outcome, run_trials  # noqa: E402
from ft.lab.simulate.spare.scenario import read_file, scenario  # noqa: E402
from ft.lab.simulate.spare.study import study  # noqa: E402
from ft.systems.spare.placement import Placement  # noqa: E402
from ft.systems.spare.ruler import ruler  # noqa: E402

GROUPS = (200, 600, 1000)
TRIALS = 300


@dataclass(frozen=True)
class Options:
    """Options of the command. ``seeds``: per case; None: as in the scenarios. ``groups``: a subset of ``GROUPS``."""

    seeds: int | None
    groups: tuple[int, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, help="runs of each case (default: as in the scenarios)")
    given = parser.parse_args()
    print(write(simulate(Options(given.seeds, GROUPS)), ROOT))
    return 0


def simulate(options: Options) -> list[Case]:
    """Simulate all cases of all scenarios."""
    found = []
    for groups in options.groups:
        asked = scenario(read_file(ROOT / f"examples/spare/table1_n{groups}.toml"))
        if options.seeds is not None:
            asked = replace(asked, seeds=options.seeds)
        began = time.monotonic()
        for row in study(asked):
            trials = montecarlo(groups, row.redundancy) if row.scheme == "spare" else None
            found.append(Case.of(asked, row, trials))
            sys.stderr.write(f"N = {groups}: {row.scheme} {row.redundancy}, {time.monotonic() - began:.0f} s\n")
    return found


def montecarlo(groups: int, redundancy: int) -> Outcome:
    """Run Monte Carlo trials of random failures up to the first wipe-out."""
    return run_trials(Placement(groups, ruler(groups, redundancy)), TRIALS, seed=0)


if __name__ == "__main__":
    sys.exit(main())
