"""Measure the cost of finding out why a run hangs: recording each operation, and asking a rank what it is doing.

    python tools/bench/hang_inspection.py

Prints one JSON line. `remember_us` is the time to remember one communication operation (sizes, line of the call,
number), beside `all_reduce_us`, that of the smallest all-reduce over gloo between two ranks of this machine, so `share`
is the most that it can add to an operation. `inspection_ms` is the time that a rank needs to say what it is doing,
after two steps of 2,000 operations each; it is spent only when a run seems to hang.
"""

import json
import statistics
import sys
import time
from types import SimpleNamespace

import in_ranks
import torch
import torch.distributed as dist

from ft.net.codec import to_json
from ft.state.groups.history import History
from ft.worker.session import running_threads

ROUNDS, WARM_UP, OPERATIONS = 15, 3, 2000


def measure() -> None:
    """Measure in one of two ranks; rank 0 publishes the result."""
    dist.init_process_group("gloo")
    gloo, (remember, inspection) = all_reduces(), inspections()
    if dist.get_rank() == 0:
        in_ranks.publish(
            {
                "remember_us": spread(remember),
                "all_reduce_us": spread(gloo),
                "share": round(statistics.median(remember) / statistics.median(gloo), 4),
                "inspection_ms": spread(inspection),
            }
        )
    dist.destroy_process_group()


def inspections() -> tuple[list[float], list[float]]:
    """Return the microseconds to remember an operation, and the milliseconds of an inspection, one value per round."""
    remember, inspection = [], []
    tensor = torch.ones(4, 8)

    class Work(SimpleNamespace):
        """Something that can be weakly referenced, as a work can."""

    work = Work(began=0.0)
    for _ in range(ROUNDS + WARM_UP):
        history = History()
        for _ in range(2):
            history.begins()
            began = time.perf_counter()
            for number in range(OPERATIONS):
                history.started("DATA_PARALLEL_GROUP/1", "allreduce", None, number, ([tensor],), work)
            remember.append((time.perf_counter() - began) / OPERATIONS * 1e6)
        began = time.perf_counter()
        operations, departed = history.operations(lambda entry: (True, False)), history.departure()
        json.dumps([to_json(operations), to_json(departed), to_json(running_threads())])
        inspection.append((time.perf_counter() - began) * 1e3)
    return remember[2 * WARM_UP :], inspection[WARM_UP:]


def all_reduces() -> list[float]:
    """Return the microseconds of an all-reduce of one number between the ranks, one value per round."""
    one, found = torch.ones(1), []
    for _ in range(ROUNDS + WARM_UP):
        began = time.perf_counter()
        for _ in range(200):
            dist.all_reduce(one)
        found.append((time.perf_counter() - began) / 200 * 1e6)
    return found[WARM_UP:]


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 2),
        "p10": round(ordered[len(ordered) // 10], 2),
        "p90": round(ordered[-1 - len(ordered) // 10], 2),
    }


if __name__ == "__main__":
    sys.exit(in_ranks.main(__file__, [], 2, measure))
