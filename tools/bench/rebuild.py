"""Measure the time to rebuild process groups after ranks were lost, with the production code and small processes.

    python tools/bench/rebuild.py --ranks 8 --tp 2 --pp 2 >> tools/bench/results/rebuild.jsonl
    python tools/bench/rebuild.py --all > tools/bench/results/rebuild.jsonl

Prints one JSON line for each kind of rebuild: of all groups, of the groups that the loss of one rank requires, and of
the groups that the loss of a node of four ranks requires. `wall_s` is the median wall time of the slowest rank,
`busiest_cpu_s` the CPU time of the busiest rank, and `store_cpu_s` that of the rendezvous store. `connections.py`
counts the work in layouts of any size.
"""

import argparse
import json
import multiprocessing
import os
import secrets
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT)]

from megatron.ft_trainer.logging.quiet import quieten  # noqa: E402

quieten()  # torch and megatron-core are imported below
import torch.distributed as dist  # noqa: E402
from layout_groups import GroupSpec, Sizes, decide, everything, groups_of, make_groups, work_of  # noqa: E402

from ft.base import bounded_json  # noqa: E402
from ft.base.errors import FtError  # noqa: E402
from ft.net.store import StoreServer  # noqa: E402
from ft.state.groups import Groups, Rendezvous  # noqa: E402

KINDS = ("full", "least", "node")
"""Kinds of rebuilds: of all groups, of the groups that the loss of one rank requires, and of the groups that the loss
of one node requires.
"""
LAYOUTS = (
    *(Sizes(8, tp=2, pp=2), Sizes(8), Sizes(8, pp=4), Sizes(8, tp=4)),
    *(Sizes(16, tp=2, pp=4), Sizes(16), Sizes(16, tp=2, pp=2), Sizes(16, tp=4, pp=2)),
    *(Sizes(32, tp=2, pp=4), Sizes(32), Sizes(32, tp=4, pp=4), Sizes(32, tp=2, pp=2)),
)
"""The layouts of the recorded results; they differ in groups and connections."""
RANKS_PER_NODE, LOST = 4, 1
"""Number of ranks that are lost with a node; the logical rank that is killed in the kinds that lose one rank."""
PATIENCE = timedelta(seconds=600)
"""Timeout of the store, of the process groups, and of the measuring process that waits for the ranks."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every layout of the recorded results")
    parser.add_argument("--ranks", type=int, default=8)
    for name in ("tp", "pp", "cp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="losses of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    given = parser.parse_args(argv)
    for sizes in LAYOUTS if given.all else [Sizes(given.ranks, given.tp, given.pp, given.cp, given.ep)]:
        for row in measure(sizes, given.rounds, given.kinds):
            print(json.dumps(row), flush=True)
    return 0


def measure(sizes: Sizes, rounds: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Repeatedly kill ranks of a layout and rebuild the groups.

    Returns:
        One row per kind, with medians over the rounds.

    Raises:
        FtError: a rank exited, or did not respond in time.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    groups = groups_of(sizes)
    with Ranks(sizes) as ranks:
        possible = [kind for kind in kinds if len(names_of(groups, kind)[0]) < sizes.ranks]
        return [_row(sizes, kind, groups, ranks, rounds) for kind in possible]


def names_of(groups: Sequence[GroupSpec], kind: str) -> tuple[list[int], list[str], list[str]]:
    """Return (lost ranks, groups to rebuild, groups to connect at their first use) of one kind of rebuild."""
    lost = list(range(RANKS_PER_NODE)) if kind == "node" else [LOST]
    if kind == "full":
        return lost, everything(groups), []
    plan = decide(groups, lost, stuck=True)
    return lost, plan.rebuild, plan.defer


def _row(sizes: Sizes, kind: str, groups: list[GroupSpec], ranks: "Ranks", rounds: int) -> dict[str, Any]:
    lost, rebuild, defer = names_of(groups, kind)
    took = [ranks.lose(lost, rebuild, defer) for _ in range(rounds)]
    return {
        "bench": "rebuild",
        **asdict(sizes),
        "kind": kind,
        "lost": lost,
        **asdict(work_of(groups, rebuild)),
        "wall_s": round(statistics.median(one["wall_s"] for one in took), 5),
        "wall_all_s": [round(one["wall_s"], 5) for one in took],
        "busiest_cpu_s": round(statistics.median(one["busiest_cpu_s"] for one in took), 5),
        "store_cpu_s": round(statistics.median(one["store_cpu_s"] for one in took), 5),
        "cores": len(os.sched_getaffinity(0)),
    }


class Ranks:
    """The processes of all ranks of a layout. Their rendezvous store runs in this process."""

    def __init__(self, sizes: Sizes):
        self._sizes, self._epoch = sizes, 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["__main__", "megatron.ft_trainer.initialize"])
        token = secrets.token_hex(16)
        server = StoreServer("127.0.0.1", 0, token)
        self._rendezvous = Rendezvous(server.address, token)
        self._store = self._rendezvous.connect()
        self._store.set_timeout(PATIENCE)
        self._processes: dict[int, multiprocessing.Process] = {}

    def __enter__(self) -> "Ranks":
        self._start(range(self._sizes.ranks), joins=False)
        self._await("ready")
        return self

    def __exit__(self, *exception) -> None:
        self._store.set(f"order/{self._epoch}", "end")
        deadline = time.monotonic() + 10
        for process in self._processes.values():
            process.join(0 if exception[0] else max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def lose(self, lost: Sequence[int], rebuild: list[str], defer: list[str]) -> dict[str, float]:
        """Kill ranks, start replacements, and let all ranks rebuild the groups.

        Args:
            lost: ranks to kill.
            rebuild: names of the groups to rebuild.
            defer: names of the groups to connect at their first use.

        Returns:
            The times in seconds: "wall_s", wall time of the slowest rank; "busiest_cpu_s", CPU time of the busiest
            rank; "store_cpu_s", CPU time of the store.
        """
        for rank in lost:
            self._processes[rank].kill()
            self._processes[rank].join()
        for rank in lost:
            self._store.delete_key(f"ready/{self._epoch}/{rank}")
        self._start(lost, joins=True)
        self._await("ready")
        self._store.set(f"order/{self._epoch}", json.dumps({"rebuild": rebuild, "defer": defer}))
        self._await("left")
        own = time.process_time()
        self._store.set(f"go/{self._epoch}", "")
        self._await("done")
        own = time.process_time() - own
        keys = [f"done/{self._epoch}/{rank}" for rank in range(self._sizes.ranks)]
        took = [bounded_json.loads(value, non_finite=True) for value in self._store.multi_get(keys)]
        self._epoch += 1
        self._await("ready")
        return {
            "wall_s": max(one["wall_s"] for one in took),
            "busiest_cpu_s": max(one["cpu_s"] for one in took),
            "store_cpu_s": own,
        }

    def _start(self, ranks: Iterable[int], joins: bool) -> None:
        for rank in ranks:
            arguments = (self._rendezvous, rank, self._sizes, self._epoch, joins)
            process = self._context.Process(target=follow, args=arguments, daemon=True)
            process.start()
            self._processes[rank] = process

    def _await(self, what: str) -> None:
        """Wait until all ranks have set their ``what`` key of this epoch."""
        keys = [f"{what}/{self._epoch}/{rank}" for rank in range(self._sizes.ranks)]
        deadline = time.monotonic() + PATIENCE.total_seconds()
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=2))
                return
            except dist.DistStoreError:
                ended = [rank for rank, process in self._processes.items() if not process.is_alive()]
                if ended or time.monotonic() > deadline:
                    said = f"rank {ended[0]} ended" if ended else f"not all ranks reached {what!r} in time"
                    raise FtError(f"the measurement of {self._sizes} failed: {said}") from None


# --- the process of one rank ------------------------------------------------------------------------------------------


def follow(rendezvous: Rendezvous, rank: int, sizes: Sizes, epoch: int, joins: bool) -> None:
    """Create real process groups, and rebuild them on order, as ``ft.systems.hot_swap.recovery`` does.

    Keys in the store, in their order within an epoch: ``ready/EPOCH/RANK`` (this rank's groups exist), ``order/EPOCH``
    (a JSON object with rebuild and defer, or "end"), ``left/EPOCH/RANK`` (this rank has dropped its old connections),
    ``go/EPOCH`` (start the rebuild), ``done/EPOCH/RANK`` (a JSON object with the times).

    Args:
        rendezvous: address and token of the store.
        rank: logical rank of this process.
        sizes: the parallel layout.
        epoch: epoch in which this process starts.
        joins: whether this process replaces a rank that was lost in this epoch; the next rebuild then connects it.
    """
    store = rendezvous.connect()
    store.set_timeout(PATIENCE)
    groups = Groups.start(
        rendezvous=rendezvous,
        prefix=f"groups/{epoch}",
        rank=rank,
        world_size=sizes.ranks,
        device_backend="gloo",
        alone=joins,
        on_failure=lambda group, error: None,
        epoch=epoch,
        timeout_s=PATIENCE.total_seconds(),
    )
    make_groups(sizes)
    if not joins:
        use_all()
    store.set(f"ready/{epoch}/{rank}", "")
    while (order := store.get(f"order/{epoch}")) != b"end":
        groups.close(epoch, "measured")
        groups.drop()
        store.set(f"left/{epoch}/{rank}", "")
        store.wait([f"go/{epoch}"])
        took = _rebuild(groups, bounded_json.loads(order, non_finite=True), epoch + 1)
        store.set(f"done/{epoch}/{rank}", json.dumps(took))
        epoch += 1
        use_all()
        store.set(f"ready/{epoch}/{rank}", "")


def use_all() -> None:
    """Run a barrier in every group, in the order of creation. This checks that each group works, and connects the
    groups whose connection was deferred to their first use.
    """
    for group in list(dist.distributed_c10d._world.pg_names):
        if group.size() > 1:
            dist.barrier(group)


def _rebuild(groups: Groups, order: dict, epoch: int) -> dict[str, float]:
    """Rebuild the groups, and return the wall time and the CPU time of all threads of this process, in seconds."""
    began = time.process_time()
    wall = groups.rebuild(order["rebuild"], order["defer"], f"groups/{epoch}", epoch)
    cpu = time.process_time() - began
    groups.reopen(epoch)
    return {"wall_s": wall, "cpu_s": cpu}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
