"""Measure how long the production code takes to rebuild process groups, with real processes on this machine.

The measurements calibrate the predictions of ``ft simulate recovery``. Ranks are killed and replaced, as in a hot-swap,
and the process groups that need it are rebuilt over gloo.
"""

import json
import multiprocessing
import os
import secrets
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ft.base import bounded_json
from ft.base.errors import FtError
from ft.lab.simulate.recovery.loss import decide, everything, work_of
from ft.lab.simulate.recovery.rank import PATIENCE, follow
from ft.lab.simulate.recovery.topology import GroupSpec, Sizes, groups_of
from ft.net.store import StoreServer
from ft.state.groups import Rendezvous

KINDS = ("full", "least", "node")
"""Kinds of rebuilds: of all groups, of the groups that the loss of one rank requires, and of the groups that the loss
of one node requires.
"""

LAYOUTS = (
    *(Sizes(8, tp=2, pp=2), Sizes(8), Sizes(8, pp=4), Sizes(8, tp=4)),
    *(Sizes(16, tp=2, pp=4), Sizes(16), Sizes(16, tp=2, pp=2), Sizes(16, tp=4, pp=2)),
    *(Sizes(32, tp=2, pp=4), Sizes(32), Sizes(32, tp=4, pp=4), Sizes(32, tp=2, pp=2)),
)
"""Layouts that differ enough in groups and connections to separate the cost of each in the fit."""

RANKS_PER_NODE, ROUNDS = 4, 3
"""Number of ranks that are lost with a node, and default number of repetitions of each kind."""
LOST = 1
"""The logical rank that is killed in the kinds that lose one rank."""


def measure(sizes: Sizes, rounds: int = ROUNDS, kinds: Sequence[str] = KINDS) -> list[dict[str, Any]]:
    """Repeatedly kill ranks of a layout and rebuild the groups.

    Args:
        sizes: the parallel layout.
        rounds: number of repetitions of each kind.
        kinds: kinds of rebuilds to measure, from :data:`KINDS`.

    Returns:
        One row per kind, with medians over the rounds.

    Raises:
        FtError: a rank exited, or did not respond in time.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    groups = groups_of(sizes)
    with _Ranks(sizes) as ranks:
        possible = [kind for kind in kinds if len(names_of(groups, kind)[0]) < sizes.ranks]
        return [_row(sizes, kind, groups, ranks, rounds) for kind in possible]


def names_of(groups: Sequence[GroupSpec], kind: str) -> tuple[list[int], list[str], list[str]]:
    """Return (lost ranks, groups to rebuild, groups to connect at their first use) of one kind of rebuild."""
    lost = list(range(RANKS_PER_NODE)) if kind == "node" else [LOST]
    if kind == "full":
        return lost, everything(groups), []
    plan = decide(groups, lost, stuck=True).plan
    return lost, plan.rebuild, plan.defer


def _row(sizes: Sizes, kind: str, groups: list[GroupSpec], ranks: "_Ranks", rounds: int) -> dict[str, Any]:
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


class _Ranks:
    """The processes of all ranks of a layout. Their rendezvous store runs in this process."""

    def __init__(self, sizes: Sizes):
        self._sizes, self._epoch = sizes, 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["ft.lab.simulate.recovery.rank", "megatron.ft_trainer.initialize"])
        token = secrets.token_hex(16)
        server = StoreServer("127.0.0.1", 0, token)
        self._rendezvous = Rendezvous(server.address, token)
        self._store = self._rendezvous.connect()
        self._store.set_timeout(PATIENCE)
        self._processes: dict[int, multiprocessing.Process] = {}

    def __enter__(self) -> "_Ranks":
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
