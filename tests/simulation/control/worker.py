"""A simulated worker process (a training process under hot-swap protection).

The reports of the worker and its reactions to orders come from production code: ``ft.worker.protocol``,
``ft.systems.hot_swap.recovery`` and ``ft.worker.progress``. The process, its threads and its clock are models in this
module; the training computation, process groups and snapshots are models in ``tests.simulation.control.training`` and
``snapshots``.

The training thread is a coroutine. It awaits the virtual seconds for which it is busy, during which nothing interrupts
it, or the next event.
"""

from collections import deque
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ft.job import messages as m
from ft.systems.hot_swap.recovery import WorkerRecovery
from ft.worker import protocol
from ft.worker.progress import Progress
from tests.simulation.control.snapshots import CopyStore
from tests.simulation.control.training import Training
from tests.simulation.engine import Thread, pause

if TYPE_CHECKING:
    from tests.simulation.control.agent import Agent
    from tests.simulation.control.cluster import Cluster

_REPEATED = (m.WorkerReleased, m.WorkerArrived, m.WorkerRepaired, m.WorkerFailed, m.WorkerDone)
"""Reports that the protocol repeats until they are answered."""

_ON_HOST = ("fence", "rebuild")
"""Collectives that the host carries out in any case."""


class Worker(protocol.Member):
    """One worker process.

    Attributes:
        started_for: logical rank that the worker was started for; None: a standby.
        restart: number of the warm restart that the worker was started in.
        alive: False once the process has ended.
        attached: whether the training script has attached to the agent.
        stopped: whether the process is stopped by SIGSTOP.
        deaf: whether the process hangs and sends no heartbeats.
        spins: whether the training thread hangs while heartbeats are sent.
        mumbles: whether the next report that asks for an order is lost.
        ails: whether the worker raises an exception in every step.
        quits: whether the process has exited with code 0, as if its work was done.
        defect: exception that the worker raises next.
        start: how the process starts: "ready", "exits" at once, or "never" attaches.
        slow: factor by which the next work takes longer.
        waiting: (collective in which the training thread is blocked, time of its start), or None.
        stock: the snapshots and peer copies in the process's memory.
        training: model of the training script, None until model and optimizer are built.
        recovery: the production code of training and recoveries, None until model and optimizer are built.
        broken_epoch: the last epoch in which a peer has closed a connection to this worker.
    """

    def __init__(self, cluster: "Cluster", agent: "Agent", name: str, started_for: int | None, restart: int):
        super().__init__(name, agent.node)
        self.cluster, self.agent, self.name, self.address = cluster, agent, name, f"{name}:1"
        self.started_for, self.restart = started_for, restart
        self.alive, self.stopped, self.deaf, self.spins = True, False, False, False
        self.attached, self.quits, self.ails, self.start = False, False, False, "ready"
        self.mumbles = False
        self.quiet_since = 0.0
        self.slow = 1.0
        self.defect: Exception | None = None
        self.waiting: tuple[str, float] | None = None
        self.progress = Progress(self._blocked, self._clock, self._unfinished)
        self.stock = CopyStore()
        self.training: Training | None = None
        self.recovery: WorkerRecovery | None = None
        self.broken_epoch = -1
        self._orders: deque[Any] = deque()
        self._thread = Thread(self._live, cluster.time.after, self._ends, self._runs)

    @property
    def empty(self) -> bool:
        """Return whether the worker has no training state yet, as a replacement."""
        return self.recovery is not None and self.recovery.is_empty

    @property
    def inside(self) -> bool:
        """Return whether the worker takes part in the collectives of its epoch, or is about to."""
        return self.training is not None and self.training.inside

    @property
    def step(self) -> int:
        """Return the last committed step of the live state."""
        return 0 if self.training is None else self.training.step

    def enter(self, opened: m.Open) -> None:
        self.cluster.checks.enters(self, opened)
        super().enter(opened)

    # --- the process -------------------------------------------------------------------------------------------------

    def hear(self, order: Any) -> None:
        """Receive an order. An order to close the epoch takes effect at once, because a real worker handles it on a
        separate thread (``Session._on_close``).
        """
        if isinstance(order, m.Close):
            self.note_close(order)
        self._orders.append(order)
        self.poke()

    def poke(self) -> None:
        """Wake the training thread, because something has happened that it may be waiting for."""
        self._thread.poke()

    def falls_silent(self) -> None:
        """Note that the process does not run from now on."""
        self.quiet_since = self.cluster.time.now

    def go_on_after_stop(self) -> None:
        """Continue the process after SIGSTOP."""
        self.stopped = False
        self.cluster.mesh.look_again()
        self.poke()

    def _runs(self) -> bool:
        return self.alive and not (self.stopped or self.deaf or self.spins)

    def _ends(self, why: int | str) -> None:
        code = why if isinstance(why, int) else 1
        self.cluster.checks.ends_itself(self, code)
        self.agent.ended(self, code)

    def _clock(self) -> float:
        """Return the time up to which the process has run."""
        return self.quiet_since if self.stopped or self.deaf else self.cluster.time.now

    def _blocked(self) -> tuple[str, float] | None:
        return None if self._unfinished() is not None else self.waiting

    def _unfinished(self) -> tuple[str, str, float] | None:
        """Return the operation that the worker's device has not finished, if devices carry out collectives."""
        if not self.cluster.shape.on_device or self.waiting is None or self.waiting[0] in _ON_HOST:
            return None
        group, since = self.waiting
        return group, "collective", self._clock() - since

    def beat(self, now: float) -> m.Beat:
        """Return the worker's last heartbeat, with its age."""
        beat = self.progress.beat()
        return replace(beat, age_s=round(now - self.quiet_since, 3)) if self.stopped or self.deaf else beat

    # --- the I/O of the protocol -------------------------------------------------------------------------------------

    def send(self, report: Any) -> None:
        if self.mumbles and isinstance(report, _REPEATED):
            self.mumbles = False
            return
        self.agent.hear(report)

    async def next_order(self, within_s: float | None) -> Any | None:
        limit = self._limit(within_s) if not self._orders else None
        while not self._orders:
            if limit is not None and self.cluster.time.now >= limit:
                return None
            await pause(None)
        return self._orders.popleft()

    async def wait_closed(self, within_s: float) -> bool:
        limit = self._limit(within_s)
        while not self.closed and self.cluster.time.now < limit:
            await pause(None)
        return self.closed

    def _limit(self, within_s: float | None) -> float | None:
        """Return the time in ``within_s`` seconds, at which the training thread will be woken."""
        if within_s is None:
            return None
        self.cluster.time.after(within_s, self.poke)
        return self.cluster.time.now + within_s

    def log_error(self, error: Exception) -> None:
        """Do nothing: a simulated worker has no log; the report of the error is in the history."""

    # --- the training script -----------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Run the whole training script: start, attach, wait for a logical rank, build the model, train."""
        rng, habits = self.cluster.rng, self.cluster.habits
        await pause(rng.uniform(*habits.import_s) * self.slow)
        while self.start == "never":
            await pause(None)
        if self.start == "exits":
            raise SystemExit(1)
        self.attached, self.quiet_since = True, self.cluster.time.now
        await protocol.take_seat(self)
        await pause(rng.uniform(*habits.assemble_s) * self.slow)
        self._assemble()
        await self.recovery.run()

    def _assemble(self) -> None:
        shape, rank = self.cluster.shape, self.rank
        self.training = Training(self)
        self.recovery = self.training.recovery = WorkerRecovery(self, self.training)
        said = {"dp_peers": {str(rank): shape.dp_peers(rank)}, "shards": {str(rank): self.training.shards}}
        said |= {"copies": {str(rank): shape.copies_at(rank)}, "complete": {str(rank): len(shape.dp_peers(rank)) == 1}}
        if shape.checkfree:
            said |= {"places": {str(rank): asdict(shape.place_of(rank))}, "checkfree": shape.checkfree}
        self.send(m.Observed("layout", {"worker": self.name, **said}))
        if not self.empty:
            self.training.load()
