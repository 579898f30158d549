"""Model of a worker (a training process under hot-swap protection) for ``ft simulate control``.

The training thread is a generator. It yields the virtual seconds for which it is busy, during which nothing interrupts
it, or None to wait for the next event. ``Worker._live`` follows ``ft.worker.session`` and
``ft.systems.hot_swap.recovery_manager`` line by line where they interact with the control plane;
``ft.lab.simulate.control.recovery`` follows ``ft.systems.hot_swap.recovery``.

An epoch is a version of the map from logical ranks to workers; a worker with a rank in it has a seat. The control plane
closes the epoch after a failure. The fence is a barrier that begins before the optimizer step: a step that has passed
it is committed, which means that every rank has finished it.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ft.job import messages as m
from ft.lab.simulate.control.errors import Broken, EpochClosed, Exited
from ft.lab.simulate.control.recovery import recover
from ft.lab.simulate.control.snapshots import Snapshots
from ft.worker.acknowledged import PERIOD_S

if TYPE_CHECKING:
    from ft.lab.simulate.control.agent import Agent
    from ft.lab.simulate.control.cluster import Cluster
    from ft.lab.simulate.control.mesh import Operation

Thread = Generator[float | None, None, Any]
"""A part of a training thread: yields the virtual seconds for which it is busy, or None to wait for an event."""


class Worker:
    """One worker process.

    Attributes:
        meant: logical rank that the worker was started for; None: a standby.
        restart: number of the warm restart that the worker was started in.
        rank: logical rank, -1 before the worker has one.
        epoch: the last epoch that the worker has entered.
        closed: whether that epoch is closed.
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
        assembled: whether model and optimizer are built.
        empty: whether the worker has no training state yet, as a replacement.
        inside: whether the worker takes part in the collectives of its epoch, or is about to.
        repaired_epoch: the last epoch for which the worker has restored its state.
        owned: live state that only this rank has (see ``memory``).
        replicated: live state that is replicated over the data-parallel ranks.
        touched: whether the live state is not that of a committed step.
        broken_epoch: the last epoch in which a peer has closed a connection to this worker.
        fence: the fence of the current step, None outside of it.
        groups: process group -> [used, an operation was abandoned, number of collectives].
    """

    def __init__(self, cluster: "Cluster", agent: "Agent", name: str, meant: int | None, restart: int):
        self.cluster, self.agent, self.node, self.name = cluster, agent, agent.node, name
        self.meant, self.restart = meant, restart
        self.alive, self.stopped, self.deaf, self.spins = True, False, False, False
        self.attached, self.quits, self.ails, self.start = False, False, False, "ready"
        self.quiet_since = 0.0
        self.slow = 1.0
        self.defect: Broken | None = None
        self.rank, self.epoch, self.closed, self.closed_epoch = -1, -1, False, -1
        self.seats: dict[int, m.Seat] = {}
        self.broken_epoch = -1
        self.empty = self.touched = self.assembled = self.inside = False
        self.repaired_epoch = -1
        self.step = 0
        self.owned = self.replicated = (-1, 0, 0)
        self.snapshots, self.fence = Snapshots(self), None
        self.groups: dict[str, list[int | bool]] = {}
        self.doing, self.where, self.since, self.step_s, self.step_began = "idle", "start", 0.0, None, None
        self.orders: deque[Any] = deque()
        self.mumbles, self._asked = False, None
        self._thread = self._live()
        self._busy = self._poked = False

    # --- the process -------------------------------------------------------------------------------------------------

    def say(self, report: Any) -> None:
        """Send a report to the agent, which forwards it to the control plane."""
        self.agent.hear(report)

    def ask(self, report: Any) -> None:
        """Send a report that the control plane answers with an order, and repeat the report until the answer arrives
        (``ft.worker.acknowledged``).
        """
        self._asked = report
        if not self.mumbles:
            self.say(report)
        self.mumbles = False
        self.cluster.time.after(PERIOD_S, self._remind, report)

    def _remind(self, report: Any) -> None:
        if self._asked is not report or not self.alive:
            return
        if not self.stopped and not self.deaf:
            self.say(report)
        self.cluster.time.after(PERIOD_S, self._remind, report)

    def hear(self, order: Any) -> None:
        """Receive an order. An order to close the epoch takes effect at once, because a real worker handles it on a
        separate thread (``Session._on_close``).
        """
        if isinstance(order, m.Close):
            self.closed_epoch = max(self.closed_epoch, order.epoch)
            if order.epoch >= self.epoch:
                self.closed = True
        self.orders.append(order)
        self.poke()

    def poke(self) -> None:
        """Wake the training thread, because something has happened that it may be waiting for."""
        if not self._poked:
            self._poked = True
            self.cluster.time.after(0.0, self._go_on)

    def go_on_after_stop(self) -> None:
        """Continue the process after SIGSTOP."""
        self.stopped = False
        self.cluster.mesh.look_again()
        self.poke()

    def _wake(self) -> None:
        self._busy = False
        self.poke()

    def _go_on(self) -> None:
        """Run the training thread until it is busy, waits or ends."""
        self._poked = False
        if not self.alive or self.stopped or self.deaf or self.spins or self._busy:
            return
        try:
            pause = next(self._thread)
        except (StopIteration, Exited) as end:
            self.agent.ended(self, end.code if isinstance(end, Exited) else 0)
            return
        if pause is not None:
            self._busy = True
            self.cluster.time.after(pause, self._wake)

    def begin(self) -> None:
        self.poke()

    def beat(self, now: float) -> m.Beat:
        """Return the worker's last heartbeat (``ft.worker.progress``)."""
        age = now - self.quiet_since if self.stopped or self.deaf else 0.0
        since = max(0.0, now - age - self.since)
        return m.Beat(round(age, 3), self.epoch, self.step, self.doing, round(since, 3), self.where, self.step_s, 0)

    def does(self, doing: str, where: str) -> None:
        """Note what the training thread does from now on, for the heartbeats."""
        self.doing, self.where, self.since = doing, where, self.cluster.time.now

    # --- from the start to the end -----------------------------------------------------------------------------------

    def _live(self) -> Thread:
        """Run the whole training script: start, attach, wait for a logical rank, build the model, train."""
        rng, habits = self.cluster.rng, self.cluster.habits
        yield rng.uniform(*habits.import_s) * self.slow
        while self.start == "never":
            yield None
        if self.start == "exits":
            raise Exited(1)
        self.attached, self.quiet_since = True, self.cluster.time.now
        self.does("idle", "waiting for a seat")
        self.say(m.WorkerReady(self.name, self.node, f"{self.name}:1"))
        opened = yield from self.await_open(-1)
        self.does("idle", "assembling")
        yield rng.uniform(*habits.assemble_s) * self.slow
        self._assembled(opened)
        yield from self._carry_through()

    def _assembled(self, opened: m.Open) -> None:
        shape, rank = self.cluster.shape, self.rank
        self.assembled = True
        self.empty = not opened.fresh
        self.groups = {name: [False, False, 0] for name in shape.groups_of(rank)}
        said = {"dp_peers": {str(rank): shape.dp_peers(rank)}, "shards": {str(rank): [f"optimizer {rank}"]}}
        said |= {"copies": {str(rank): shape.copies_at(rank)}, "complete": {str(rank): len(shape.dp_peers(rank)) == 1}}
        if shape.checkfree:
            said |= {"places": {str(rank): asdict(shape.place_of(rank))}, "checkfree": shape.checkfree}
        self.say(m.Observed("layout", {"worker": self.name, **said}))
        if not self.empty:
            step, history = self.cluster.load(self.epoch)
            self.step, self.owned, self.replicated = step, (rank, step, history), (shape.part_of(rank), step, history)

    def _carry_through(self) -> Thread:
        """Train with recovery, like ``RecoveryManager.run_with_recovery``."""
        begun = False
        while True:
            try:
                if not begun:
                    begun = True
                    if self.empty:
                        yield from recover(self)
                    else:
                        self.resumes()
                yield from self._train()
                yield from self._finish()
                return
            except EpochClosed:
                pass
            except Broken as error:
                yield from self.fails(error)
            yield from recover(self)

    def resumes(self) -> None:
        """Resume training in a new epoch, like ``RecoveryManager.resumes``."""
        self.inside = True
        self.say(m.WorkerResumed(self.name, self.epoch, self.step))
        self.fence, self.touched = None, False
        self.snapshots.take()
        self.step_began = self.cluster.time.now
        self.does("compute", f"step {self.step + 1}")

    def _train(self) -> Thread:
        """Train to the last step: compute, all-reduce gradients, update behind the fence, take a snapshot."""
        cluster, rng = self.cluster, self.cluster.rng
        while self.step < cluster.habits.steps:
            yield rng.uniform(*cluster.habits.compute_s) * self.slow
            self.slow = 1.0
            self._raise_defect()
            gradients = yield from self.collective("gradients", (self.step + 1, "gradients"))
            yield from self.snapshots.wait()
            self.fence = self.join("fence", (self.step + 1, "fence"))
            self.touched = True
            yield rng.uniform(*cluster.habits.update_s)
            self._raise_defect()
            self._update(gradients)
            yield from self.wait_for(self.fence, "fence")
            self.fence, self.touched = None, False
            self.snapshots.take()
            now = cluster.time.now
            self.step_s, self.step_began = round(now - self.step_began, 3), now
            self.does("compute", f"step {self.step + 1}")
            if self.step % cluster.habits.save_every == 0:
                self.does("aside", "save")
                yield rng.uniform(*cluster.habits.save_s)
                cluster.saved(self)
                self.does("compute", f"step {self.step + 1}")

    def _update(self, gradients: "Operation") -> None:
        self.step += 1
        history = self.cluster.checks.history_after(gradients, self)
        self.owned = (self.owned[0], self.step, history)
        self.replicated = (self.replicated[0], self.step, history)

    def _finish(self) -> Thread:
        self.step_began = None
        self.does("idle", "done")
        self.ask(m.WorkerDone(self.name, self.epoch, self.step))
        yield from self.await_order(m.Finish)

    def fails(self, error: Broken) -> Thread:
        """Report a failure and wait until the epoch is closed, like ``RecoveryManager.fails``."""
        if self.closed:
            return
        self.ask(m.WorkerFailed(self.name, self.epoch, self.step, error.kinds, error.message))
        self.does("idle", "failed")
        while not self.closed:
            yield None
        self._asked = None

    def _raise_defect(self) -> None:
        defect, self.defect = self.defect, None
        if self.ails:
            raise Broken(["RecoverableError", "Exception"], "as in every step")
        poison = self.cluster.poisoned.get((self.rank, self.step + 1))
        if poison == "kill":
            raise Exited(-11)
        if poison is not None:
            raise Broken([poison, "Exception"], f"the same in every step {self.step + 1}")
        if defect is not None:
            raise defect

    # --- orders ------------------------------------------------------------------------------------------------------

    def await_open(self, newer_than: int) -> Generator[float | None, None, m.Open]:
        """Wait for the order that opens an epoch with a seat for this worker, and enter the epoch.

        The model follows ``Orders.wait_open`` and ``Session.enter``.

        Args:
            newer_than: older epochs and this one are ignored.

        Raises:
            Exited: the run is finished.
        """
        while True:
            while not self.orders:
                yield None
            order = self.orders.popleft()
            if isinstance(order, m.Finish):
                raise Exited(0)
            if isinstance(order, m.Open) and order.epoch > newer_than:
                for rank, seat in order.seats.items():
                    if seat.worker == self.name:
                        self._asked = None
                        self._enter(int(rank), order)
                        return order

    def _enter(self, rank: int, opened: m.Open) -> None:
        if self.rank not in (-1, rank):
            raise Exited(1)
        self.rank, self.epoch = rank, opened.epoch
        self.seats = {int(r): seat for r, seat in opened.seats.items()}
        self.closed = self.closed_epoch >= opened.epoch

    def await_order(self, kind: type) -> Thread:
        """Wait for an order of this type for the worker's epoch, and return the order (``Orders.wait``).

        Raises:
            EpochClosed: the control plane has closed the epoch.
        """
        while True:
            while not self.orders:
                yield None
            order = self.orders.popleft()
            if isinstance(order, m.Close) and order.epoch >= self.epoch:
                self._asked = None
                raise EpochClosed
            if isinstance(order, kind) and getattr(order, "epoch", self.epoch) == self.epoch:
                self._asked = None
                return order

    # --- group operations --------------------------------------------------------------------------------------------

    def join(self, group: str, key: Any) -> "Operation":
        """Start a collective without waiting for it.

        Raises:
            EpochClosed: the control plane has closed the epoch.
        """
        if self.closed:
            raise EpochClosed
        for name in self.groups:
            if name == "world" or group == "gradients":
                self.groups[name][0], self.groups[name][2] = True, self.groups[name][2] + 1
        return self.cluster.mesh.join(self, key, (self.owned, self.replicated))

    def collective(self, group: str, key: Any) -> Thread:
        operation = self.join(group, key)
        yield from self.wait_for(operation, group)
        return operation

    def wait_for(self, operation: "Operation", group: str) -> Thread:
        """Wait until the collective completes on this worker, or the epoch is closed.

        If a connection breaks in an open epoch, report this to the control plane, which decides what follows.

        Raises:
            EpochClosed: the control plane has closed the epoch.
            Broken: a connection broke, and the control plane has not closed the epoch in time.
        """
        before = (self.doing, self.where)
        self.does("wait", group)
        while self.rank not in operation.ended:
            if self.closed or self.broken_epoch == self.epoch:
                self.leave(operation)
                yield from self.suspect(group)
            yield None
        self.does(*before)

    def leave(self, operation: "Operation") -> None:
        """Abandon a collective that has not completed on this worker when the epoch ends."""
        for group in self.groups.values():
            group[1] = True
        self.cluster.mesh.leave(self, operation)

    def suspect(self, group: str) -> Thread:
        """Report a broken connection and wait for a decision, like ``Session.suspect``.

        Raises:
            EpochClosed: the epoch is closed.
            Broken: the control plane has not closed the epoch in time.
        """
        if self.closed:
            raise EpochClosed
        self.say(m.WorkerSuspects(self.name, self.epoch, group, "Connection closed by peer"))
        limit = self.cluster.time.now + self.cluster.timeouts.verdict_s
        self.cluster.time.after(self.cluster.timeouts.verdict_s, self.poke)
        while not self.closed and self.cluster.time.now < limit:
            yield None
        if self.closed:
            raise EpochClosed
        self.broken_epoch = -1
        raise Broken(["RecoverableError", "FtError", "Exception"], f"group {group} failed: Connection closed by peer")
