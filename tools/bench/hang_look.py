"""Measure what it costs to be able to say why a run hangs: remembering operations, and taking a look.

    python tools/bench/hang_look.py

Prints one JSON line. `remember_us` is the time to remember one communication operation (sizes, line of the call,
number), beside `all_reduce_us`, that of the smallest all-reduce over gloo between two ranks of this machine, so `share`
is the most that it can add to an operation. `look_ms` is the time that a rank needs to say what it is doing, after two
steps of 2,000 operations each; it is spent only when a run seems to hang.
"""

import json
import os
import statistics
import sys
import time
from multiprocessing import get_context
from types import SimpleNamespace

import torch
import torch.distributed as dist

from ft.net.codec import to_json
from ft.state.groups.history import History
from ft.worker.session import running_threads

ROUNDS, WARM_UP, OPERATIONS = 15, 3, 2000


def main() -> int:
    remember, look = [], []
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
        look.append((time.perf_counter() - began) * 1e3)
    gloo = _all_reduce()
    found = {
        "remember_us": _said(remember[2 * WARM_UP :]),
        "all_reduce_us": _said(gloo),
        "share": round(statistics.median(remember) / statistics.median(gloo), 4),
        "look_ms": _said(look[WARM_UP:]),
    }
    print(json.dumps(found))
    return 0


def _said(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 2),
        "p10": round(ordered[len(ordered) // 10], 2),
        "p90": round(ordered[-1 - len(ordered) // 10], 2),
    }


def _all_reduce() -> list[float]:
    """Return the microseconds of an all-reduce of one number between two ranks, one value per round."""
    context = get_context("spawn")
    answers = context.Queue()
    port = 20000 + os.getpid() % 20000
    ranks = [context.Process(target=_rank, args=(rank, port, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    found: list[float] = answers.get(timeout=120)
    for process in ranks:
        process.join(30)
    return found


def _rank(rank: int, port: int, answers) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    one, found = torch.ones(1), []
    for _ in range(ROUNDS + WARM_UP):
        began = time.perf_counter()
        for _ in range(200):
            dist.all_reduce(one)
        found.append((time.perf_counter() - began) / 200 * 1e6)
    if rank == 0:
        answers.put(found[WARM_UP:])
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
