"""Measure the time to rebuild process groups after ranks were lost, with the production code and small processes.

    python tools/bench/rebuild.py --ranks 8 --tp 2 --pp 2 >> tools/bench/results/rebuild.jsonl
    python tools/bench/rebuild.py --all > tools/bench/results/rebuild.jsonl

Prints one JSON line for each kind of rebuild: of all groups, of the groups that the loss of one rank requires, and of
the groups that the loss of a node of four ranks requires. `wall_s` is the median wall time of the slowest rank,
`busiest_cpu_s` the CPU time of the busiest rank, and `store_cpu_s` that of the rendezvous store. `ft simulate recovery`
fits and extrapolates these lines.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT)]

from megatron.ft_trainer.logging.quiet import quieten  # noqa: E402

quieten()  # torch and megatron-core are imported below
from ft.lab.simulate.recovery.measure import KINDS, LAYOUTS, ROUNDS, measure  # noqa: E402
from ft.lab.simulate.recovery.topology import Sizes  # noqa: E402


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every layout of the recorded results")
    parser.add_argument("--ranks", type=int, default=8)
    for name in ("tp", "pp", "cp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="losses of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    given = parser.parse_args(argv)
    for sizes in LAYOUTS if given.all else [Sizes(given.ranks, given.tp, given.pp, given.cp, given.ep)]:
        for row in measure(sizes, given.rounds, given.kinds):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
