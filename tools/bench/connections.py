"""Count the process groups and connections that a recovery rebuilds, in layouts of any size, without other processes.

    python tools/bench/connections.py --ranks 8 64 512 4096 --tp 2 --pp 2

Prints one JSON line for each layout and kind of rebuild: "full" (all groups), "least" (those that the loss of one rank
requires) and "node" (the loss of a node). ``idle`` counts if no other rank is in an operation, ``blocked`` if all ranks
are; a worker needs ``ulimit -n`` above ``most_connections``, the connections of the rank that has the most.
"""

import argparse
import json
import sys
from dataclasses import asdict

from layout_groups import Sizes, decide, everything, groups_of, work_of


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    for name in ("tp", "pp", "cp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--lost", type=int, default=0, help="the rank that is lost, alone or with its node")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    given = parser.parse_args(argv)
    for ranks in given.ranks:
        for row in count(Sizes(ranks, given.tp, given.pp, given.cp, given.ep), given.lost, given.ranks_per_node):
            print(json.dumps({"bench": "connections"} | row), flush=True)
    return 0


def count(sizes: Sizes, lost: int, ranks_per_node: int) -> list[dict]:
    """Return a row for each kind of rebuild."""
    groups = groups_of(sizes)
    first = lost // ranks_per_node * ranks_per_node
    node = list(range(first, min(first + ranks_per_node, sizes.ranks)))
    rows = [{"kind": "full", "blocked": asdict(work_of(groups, everything(groups)))}]
    for kind, gone in (("least", [lost]), ("node", node)):
        if len(gone) < sizes.ranks:
            idle, blocked = (decide(groups, gone, stuck=stuck) for stuck in (False, True))
            works = {"idle": idle.rebuild, "blocked": blocked.rebuild}
            row = {name: asdict(work_of(groups, names)) for name, names in works.items()}
            rows.append({"kind": kind, "deferred": len(blocked.defer)} | row)
    return [asdict(sizes) | {"groups": len(groups)} | row for row in rows]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
