"""The production rebuild, measured on real process groups between processes of this machine."""

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

from ft.base.errors import FtError
from ft.lab.simulate.recovery.loss import decide, everything, work_of
from ft.lab.simulate.recovery.rank import PATIENCE, follow
from ft.lab.simulate.recovery.topology import GroupSpec, Sizes, groups_of
from ft.net.store import StoreServer
from ft.state.groups import Meeting

KINDS = ("full", "least", "node")
"""All groups; those that the loss of a rank asks for; those that the loss of a node does."""

LAYOUTS = (
    *(Sizes(8, tp=2, pp=2), Sizes(8), Sizes(8, pp=4), Sizes(8, tp=4)),
    *(Sizes(16, tp=2, pp=4), Sizes(16), Sizes(16, tp=2, pp=2), Sizes(16, tp=4, pp=2)),
    *(Sizes(32, tp=2, pp=4), Sizes(32), Sizes(32, tp=4, pp=4), Sizes(32, tp=2, pp=2)),
)
"""Enough different numbers of groups and connections to tell what each of them costs."""

RANKS_PER_NODE, ROUNDS = 4, 3
LOST = 1


def measure(sizes: Sizes, rounds: int = ROUNDS, kinds: Sequence[str] = KINDS) -> list[dict[str, Any]]:
    """Loses ranks of a layout again and again, and rebuilds; one row per kind, medians over the rounds.

    Raises:
        FtError: a rank ended, or did not come in time.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    groups = groups_of(sizes)
    with _Ranks(sizes) as ranks:
        possible = [kind for kind in kinds if len(names_of(groups, kind)[0]) < sizes.ranks]
        return [_row(sizes, kind, groups, ranks, rounds) for kind in possible]


def names_of(groups: Sequence[GroupSpec], kind: str) -> tuple[list[int], list[str], list[str]]:
    """(lost ranks, groups to rebuild, groups to defer) of a kind of rebuild."""
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
    """The processes of a layout and the store that they meet in, which is in this process."""

    def __init__(self, sizes: Sizes):
        self._sizes, self._epoch = sizes, 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["ft.lab.simulate.recovery.rank", "megatron.training.initialize"])
        token = secrets.token_hex(16)
        server = StoreServer("127.0.0.1", 0, token)
        self._meeting, self._store = Meeting(server.address, token), server.store
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
        """Kills ranks, puts new ones in their places and has the groups rebuilt; what that took.

        Returns:
            wall_s: of the slowest rank. busiest_cpu_s: of the rank that computed most. store_cpu_s: of the store.
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
        took = [json.loads(value) for value in self._store.multi_get(keys)]
        self._epoch += 1
        self._await("ready")
        return {
            "wall_s": max(one["wall_s"] for one in took),
            "busiest_cpu_s": max(one["cpu_s"] for one in took),
            "store_cpu_s": own,
        }

    def _start(self, ranks: Iterable[int], joins: bool) -> None:
        for rank in ranks:
            arguments = (self._meeting, rank, self._sizes, self._epoch, joins)
            process = self._context.Process(target=follow, args=arguments, daemon=True)
            process.start()
            self._processes[rank] = process

    def _await(self, what: str) -> None:
        """Until all ranks have said so."""
        keys = [f"{what}/{self._epoch}/{rank}" for rank in range(self._sizes.ranks)]
        deadline = time.monotonic() + PATIENCE.total_seconds()
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=2))
                return
            except dist.DistStoreError:
                ended = [rank for rank, process in self._processes.items() if not process.is_alive()]
                if ended or time.monotonic() > deadline:
                    said = f"rank {ended[0]} ended" if ended else f"not all came to {what!r} in time"
                    raise FtError(f"the measurement of {self._sizes} failed: {said}") from None
