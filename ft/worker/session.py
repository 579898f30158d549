"""A worker's session in the run: its logical rank, its process groups and its connection to the agent."""

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
    """Join the run that ``ft run`` started this process for. Blocks until the process has a logical rank.

    A standby blocks here until it replaces a worker that died. At the end of the run it exits.

    Args:
        environment: environment variables.
        settings: settings of the script, by name. They must be the same on all workers; otherwise no worker gets a
            logical rank.

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
    """One worker's session, from its first order to its last.

    Attributes:
        rank: logical rank.
        world_size: number of logical ranks.
        local_rank: number of the worker's device.
        joins: the worker has taken its rank over in a running job, and gets its state from other ranks.
        epoch: the epoch that the worker is in, open or closed.
        closed: that epoch is over.
        faulty_device: for fault injection: function of (number of the fault, bit flip); None without DMR.
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
        """Adopt the map of ranks to workers of a new epoch.

        Raises:
            SystemExit: the worker got another logical rank than the one it was set up for, and has to be restarted.
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
        """Make torch.distributed's default group, and all groups made from then on, follow the epochs."""
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

        It is unique, because old keys hold dead workers' addresses.
        """
        return f"groups/{self.epoch}"

    def topology(self) -> str:
        """Return a digest of the map of ranks to workers and of all groups (DEADPOOL, invariant I1)."""
        seats = {rank: asdict(seat) for rank, seat in sorted(self.seats.items())}
        return hashlib.sha256((json.dumps(seats, sort_keys=True) + self.groups.topology()).encode()).hexdigest()[:16]

    def when_closed(self, interrupt: Callable[[int, str], None]) -> None:
        """Have ``interrupt(epoch, reason)`` called, in another thread, as soon as an epoch is over."""
        self._when_closed.append(interrupt)

    def wait_closed(self) -> None:
        """Wait until the epoch is over, for a worker whose trainer cannot go on."""
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
        """Report that a collective failed in an open epoch, and wait for the control plane's verdict."""
        self.link.send(WorkerSuspects(self.worker, self.epoch, group, str(error)[:500]))
        self._left.wait(self.timeouts.verdict_s)
