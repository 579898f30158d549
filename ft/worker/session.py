"""A worker's session in an ``ft run``: its logical rank, its process groups and its connection to the node agent.

A worker is a training process. A logical rank is a position in the parallel layout, which outlives processes. A standby
is a worker without a logical rank; it replaces a worker that died. An epoch is a version of the assignment of workers
to logical ranks: the control plane closes an epoch after a failure and opens the next one. The node agent, the
supervisor process of the node, passes on the orders of the control plane.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from ft.base import token
from ft.base.errors import UserError
from ft.faults.flip import Flip
from ft.job.agent.link import Link
from ft.job.control.timeouts import Timeouts
from ft.job.messages import Close, Observed, Open, WorkerReady, WorkerSuspects
from ft.net.choice import network_of
from ft.state.groups import Groups, Meeting
from ft.state.snapshot import SnapshotServer
from ft.worker.orders import Orders
from ft.worker.progress import Heartbeat, Progress
from ft.worker.settings import surroundings


def is_attachable(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``ft run`` started this process."""
    return "FT_AGENT" in environment


def attach(environment: Mapping[str, str] = os.environ, settings: Mapping[str, str] | None = None) -> "Session":
    """Join the run of the ``ft run`` that started this process. Block until this process has a logical rank.

    A standby blocks here until it replaces a worker that died. At the end of the run, the standby exits here.

    Args:
        environment: environment variables.
        settings: settings of the script, by name. They must be equal on all workers: if they differ at the start, the
            run ends; a worker that joins later with other settings gets no logical rank.

    Raises:
        UserError: the process was not started by ``ft run``.
    """
    if not is_attachable(environment):
        raise UserError("this process was not started by ft run", "start with: ft run --nproc-per-node N SCRIPT ...")
    session = Session(environment)
    session.observe("settings", settings={**surroundings(environment), **(settings or {})})
    session.take_seat()
    return session


class Session:
    """One worker's session in the run, from its start to its end.

    Attributes:
        worker: name of the worker.
        node: name of the node agent.
        token: the run's secret token.
        rank: logical rank, -1 before the worker has one.
        world_size: number of logical ranks.
        local_rank: index of the worker's device on its node.
        joins: whether the worker has taken over its rank in a running job, and gets its state from other ranks.
        epoch: number of the worker's epoch, open or closed.
        closed: whether that epoch was closed.
        seats: logical rank -> worker that holds it, with its addresses.
        meeting: address of the rendezvous store for this epoch's process groups.
        fired: numbers of the planned faults that were injected already.
        groups: the process groups, None before ``init_process_group``.
        faulty_device: function (number of the fault, bit flip) that injects a bit flip into this worker's computation;
            None without redundant execution (SpareTrain).
        progress: progress that heartbeats report.
        server: server that sends and receives snapshots.
        orders: queue of the control plane's orders.
        link: connection to the node agent.
    """

    def __init__(self, environment: Mapping[str, str]):
        self.worker, self.node = environment["FT_WORKER"], environment["FT_NODE"]
        self.token = token.find(Path(environment["FT_RUN_DIR"]), 0.0, environment)
        self.timeouts = Timeouts()
        self.epoch, self.closed, self.joins = -1, False, False
        self.rank = self.local_rank = -1
        self.world_size = int(environment.get("WORLD_SIZE", "1"))
        self.seats: dict[int, object] = {}
        self.meeting = ""
        self.fired: set[int] = set()
        self.groups: Groups | None = None
        self.faulty_device: Callable[[int, Flip], None] | None = None
        self.progress = Progress(lambda: self.groups.waiting() if self.groups is not None else None)
        self.server = SnapshotServer(network_of(environment), token=self.token)
        self._left = threading.Event()
        self._lock = threading.Lock()
        self._closed_epoch = -1
        self._when_closed: list[Callable[[int, str], None]] = []
        self.orders = Orders(self._on_close)
        self.link = Link.connect(environment)
        self.link.listen(self.orders.deliver)
        self._heartbeat = Heartbeat(self.progress, self.link.send, self.timeouts.beat_s)

    def take_seat(self) -> None:
        """Report that this worker is ready, and wait for a logical rank."""
        self.progress.idles("waiting for a seat")
        self.link.send(WorkerReady(self.worker, self.node, self.server.address))
        rank, opened = self.orders.wait_open(self.worker, newer_than=-1)
        self.enter(rank, opened)
        self.joins = not opened.fresh
        self.progress.idles("assembling")

    def enter(self, rank: int, opened: Open) -> None:
        """Enter a new epoch, and adopt its assignment of workers to logical ranks.

        Args:
            rank: logical rank of this worker.
            opened: the order that opens the epoch.

        Raises:
            SystemExit: the worker got another logical rank than before. Its model does not fit that rank, so the worker
                has to be restarted.
        """
        if self.rank not in (-1, rank):
            raise SystemExit(f"seated as logical rank {rank}, assembled as {self.rank}")
        self.rank, self.epoch = rank, opened.epoch
        self.seats = {int(r): seat for r, seat in opened.seats.items()}
        self.world_size = len(self.seats)
        self.meeting = opened.meeting
        self.local_rank = self.seats[rank].local_rank
        self.fired = set(opened.fired)
        self.progress.epoch = opened.epoch
        with self._lock:
            self.closed = self._closed_epoch >= opened.epoch
            if not self.closed:
                self._left.clear()

    def init_process_group(self, device_backend: str) -> None:
        """Create torch.distributed's default process group such that it and all later groups can be rebuilt.

        ``device_backend`` is "gloo" or "nccl".
        """
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.world_size), LOCAL_RANK=str(self.local_rank))
        self.groups = Groups.start(
            meeting=self.meeting_place(),
            prefix=self.prefix(),
            rank=self.rank,
            world_size=self.world_size,
            device_backend=device_backend,
            alone=self.joins,
            on_failure=self.suspect,
            epoch=self.epoch,
        )

    def meeting_place(self) -> Meeting:
        """Return the store in which the groups of this epoch rendezvous."""
        return Meeting(self.meeting, self.token)

    def prefix(self) -> str:
        """Return the prefix of the store keys of this epoch's groups.

        The prefix is different for every epoch, because old keys hold addresses of dead workers.
        """
        return f"groups/{self.epoch}"

    def topology(self) -> str:
        """Return a digest of the assignment of workers to ranks and of all process groups.

        It must be equal on all workers (DEADPOOL, section V-C, invariant I1).
        """
        seats = {rank: asdict(seat) for rank, seat in sorted(self.seats.items())}
        return hashlib.sha256((json.dumps(seats, sort_keys=True) + self.groups.topology()).encode()).hexdigest()[:16]

    def when_closed(self, interrupt: Callable[[int, str], None]) -> None:
        """Register a callback ``interrupt(epoch, reason)``, called in another thread as soon as an epoch is closed."""
        self._when_closed.append(interrupt)

    def wait_closed(self) -> None:
        """Wait until the epoch is closed. A worker calls this when it cannot continue training."""
        self._left.wait()

    def observe(self, event: str, **detail) -> None:
        """Write an event into the run's event log."""
        stamp = {"wall": time.time(), "monotonic": time.monotonic(), "node": self.node, "worker": self.worker}
        place = {"rank": self.rank, "epoch": self.epoch, "step": self.progress.step}
        self.link.send(Observed(event, {**stamp, **place, **detail}))

    def close(self) -> None:
        self._heartbeat.close()
        self.server.close()
        self.link.close()

    def _on_close(self, order: Close) -> None:
        with self._lock:
            self._closed_epoch = max(self._closed_epoch, order.epoch)
            if order.epoch < self.epoch:
                return
            self.closed = True
        if self.groups is not None:
            self.groups.close(order.epoch, order.reason)
        for interrupt in self._when_closed:
            interrupt(order.epoch, order.reason)
        self._left.set()

    def suspect(self, group: str, error: BaseException) -> None:
        """Report that a collective failed in an open epoch, and wait for the control plane to close the epoch.

        Return after ``timeouts.verdict_s`` seconds at the latest.
        """
        self.link.send(WorkerSuspects(self.worker, self.epoch, group, str(error)[:500]))
        self._left.wait(self.timeouts.verdict_s)
