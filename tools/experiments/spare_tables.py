"""Redoes tables 4, 5 and 6 of the SPARe paper: every column by formula and by Monte Carlo, beside what is printed.

    python tools/experiments/spare_tables.py [--trials 1000] > tools/experiments/results/spare_tables.txt

Half a minute with numba, half an hour without.
"""

import argparse
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from spare_tables import ROWS  # noqa: E402

from ft.lab.plan.spare.trials import run_trials  # noqa: E402
from ft.lab.simulate.spare import theory  # noqa: E402
from ft.show.text import table  # noqa: E402
from ft.systems.spare.placement import Placement  # noqa: E402
from ft.systems.spare.ruler import ruler  # noqa: E402

HEAD = ["N", "r", "failures (3)", "paper", "simulated", "+-", "paper", "stack (6)", "paper", "simulated", "paper"]
HEAD += ["rho (5)", "patch rate"]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000, help="of each row")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(argv)
    lines, failures, stacks, same = [], [], [], 0
    for row in ROWS:
        size = (row.groups, row.redundancy)
        found = run_trials(Placement(row.groups, ruler(*size)), given.trials, given.seed)
        mean, bound = f"{theory.mu(*size):.1f}", f"{theory.stack_lower_bound(*size):.2f}"
        same += (mean, bound) == (row.failures, row.stack)
        failures.append(abs(found.failures_mean / row.failures_simulated - 1))
        stacks.append(abs(found.stack_mean - row.stack_simulated))
        simulated = [f"{found.failures_mean:.1f}", f"{found.failures_sem:.1f}", f"{row.failures_simulated:.1f}"]
        stack = [bound, row.stack, f"{found.stack_mean:.3f}", f"{row.stack_simulated:.2f}"]
        expected = statistics.fmean(theory.rho(row.groups, k) for k in range(int(theory.mu(*size))))
        lines.append(
            [
                *(str(size[0]), str(size[1]), mean, row.failures, *simulated, *stack),
                *(f"{expected:.3f}", f"{found.patch_rate:.3f}"),
            ]
        )
    print(f"{given.trials} trials of each row, seed {given.seed}; failures with the fatal one\n")
    print(table(HEAD, lines, right=range(len(HEAD))))
    print(f"\nby formula, to the printed digit: {same} of {len(ROWS)} rows")
    print(f"simulated failures against the paper's: mean error {100 * statistics.fmean(failures):.2f} %")
    print(f"simulated stack against the paper's: mean error {statistics.fmean(stacks):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
