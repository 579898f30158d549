"""Measure the search for the cause of a hang, by the number of ranks.

    python tools/bench/hang_search.py

Prints one JSON line: for each layout and number of ranks, the seconds of processor time of one search in an inspection
of all ranks (`tests/helpers/large_inspections.py`), over the kinds of hangs there: a rank that computes, a lost node, a
rank in another collective, a connection, and every rank in a collective of another size.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from large_inspections import FAULTS, large_inspection  # noqa: E402

from ft.faults.hang.causes import over_time  # noqa: E402
from tests.simulation.hangs.machine import Layout  # noqa: E402

LAYOUTS = (
    ("TP8 PP8 VPP2", Layout(tp=8, pp=8, vpp=2)),
    ("TP2 CP4 PP4 EP8", Layout(tp=2, cp=4, pp=4, ep=8)),
    ("DP", Layout()),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the search for the cause of a hang.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096, 32768], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=3, help="searches of each kind of hang")
    given = parser.parse_args()
    found = {}
    for name, layout in LAYOUTS:
        for ranks in given.ranks:
            grid = Layout(layout.tp, layout.cp, ranks // layout.world_size, layout.pp, layout.ep, layout.vpp)
            found[f"{name}, {ranks} ranks"] = {fault: _measured(grid, fault, given.rounds) for fault in FAULTS}
    print(json.dumps({"search_s": found}))
    return 0


def _measured(layout: Layout, fault: str, rounds: int) -> dict[str, float]:
    """Return the median, the least and the most seconds of processor time of a search."""
    inspection, taken = large_inspection(layout, fault), []
    for _ in range(rounds):
        gc.collect()
        began = time.process_time()
        over_time([inspection])
        taken.append(time.process_time() - began)
    return {"median": round(statistics.median(taken), 3), "min": round(min(taken), 3), "max": round(max(taken), 3)}


if __name__ == "__main__":
    sys.exit(main())
