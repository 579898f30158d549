"""Invariants that every simulated run of the control plane must keep, and whether its faults explain its reactions.

The invariants are checked against the actual state of the simulated workers, not against the workers' reports.
Examples: an epoch has one worker per rank; all gradients of a step are computed on one committed state; a recovery
restores the newest step that every rank has a source of. A fault may lead to, from mild to strong: no reaction; another
epoch with the same workers; a hot-swap; a warm restart; the end of the run.
"""

from typing import TYPE_CHECKING, Any

from ft.base import events
from ft.job import messages as m
from ft.job.control import recovery
from ft.job.control.history import MOST_RETURNS
from ft.job.control.recovery import LOST, PLUS
from ft.job.control.state import ENDED
from ft.net.codec import to_json
from tests.simulation.engine import Violation

if TYPE_CHECKING:
    from tests.simulation.control.cluster import Cluster
    from tests.simulation.control.training import Operation
    from tests.simulation.control.worker import Worker

# --- reactions --------------------------------------------------------------------------------------------------------

ANYTHING, HOT_SWAP, IN_PLACE, NOTHING = "anything", "hot-swap", "another epoch of the same workers", "nothing"
"""The strongest reaction that a fault may cause, from any reaction to none."""

_TOO_MUCH = {
    HOT_SWAP: (m.Restart, m.Stop),
    IN_PLACE: (m.Restart, m.Stop, m.Kill),
    NOTHING: (m.Restart, m.Stop, m.Kill, m.Close),
}
_AFTERMATH_S = 20.0
"""Virtual seconds from the end of a fault until all its consequences are detected."""


class Legitimacy:
    """Checks that the faults of one simulated run explain each of its warm restarts, and its end."""

    def __init__(self, cluster: "Cluster"):
        self._cluster = cluster
        self._excused = self._restarts = 0

    def of_restart(self, order: m.Restart) -> None:
        """Check that a fault has struck since the previous warm restart."""
        self._restarts += 1
        struck = len(self._cluster.struck)
        if not self._is_excused():
            self._cluster.checks.fail(f"warm restart {order.number} without a fault since the last one: {order.reason}")
        self._excused = struck
        self._check_lost_agents(order.reason)

    def of_stop(self, order: m.Stop) -> None:
        """Check that the faults explain the message with which the control plane ends the run."""
        text, kinds = order.message, {kind for _, kind in self._cluster.struck}
        checks, shape = self._cluster.checks, self._cluster.shape
        if "was told to end" in text:
            legitimate = "tell an agent to end" in kinds
        elif "are allowed and used up" in text:
            legitimate = self._restarts == shape.max_restarts and self._is_excused()
        elif "the nodes that are left cannot hold" in text or "before training began" in text:
            legitimate = self._room() < shape.world_size or not self._cluster.plane.state.attached
        elif "agents came within" in text or "workers were announced" in text:
            legitimate = any(agent.excuse for agent in self._cluster.agents.values())
        elif "the same error as before the warm restart" in text:
            alike = "replacements failed alike" in text and len(self._cluster.struck) > 3
            alike = alike or bool(self._cluster.poisoned)
            legitimate = alike or bool(kinds & {"raise software error", "exit with code 1", "bad start"})
        elif "times after committed step" in text:  # a fault has caused each of them, a flapping link several
            legitimate = len(self._cluster.struck) > MOST_RETURNS or "flapping link" in kinds or self._cluster.poisoned
        elif not self._cluster.plane.state.attached:  # until a worker attaches, any failure ends the run
            legitimate = bool(self._cluster.struck)
        else:
            legitimate = False
        self._check_lost_agents(text)
        if not legitimate:
            checks.fail(f"the run is stopped without a reason for it: {text}")

    def _is_excused(self) -> bool:
        """Return whether a fault has struck since the last warm restart, or a fault or its consequences still last."""
        news = len(self._cluster.struck) > self._excused or bool(self._cluster.poisoned)
        return news or self._cluster.time.now < self._cluster.calm_at + _AFTERMATH_S

    def _room(self) -> int:
        """Return how many workers fit on the usable devices of nodes that the control plane has not declared lost."""
        here = [a for a in self._cluster.plane.state.agents.values() if not a.gone]
        devices = self._cluster.shape.devices or self._cluster.shape.world_size
        overdue = [sum(hold.overdue for hold in agent.held.values()) for agent in here]
        wanted = [agent.joined.seats + agent.joined.standbys for agent in here]
        return sum(min(most, devices - lost) for most, lost in zip(wanted, overdue, strict=True))

    def _gone(self) -> list[str]:
        """Return the nodes that the control plane counts as lost."""
        return [node for node, agent in self._cluster.plane.state.agents.items() if agent.gone]

    def _check_lost_agents(self, text: str) -> None:
        """Check that a node was declared lost only if a fault may have kept its agent's messages away."""
        for node in self._gone():
            if not self._cluster.agents[node].excuse and not self._cluster.plane.was_cut_off:
                self._cluster.checks.fail(f"node {node} was given up, but nothing had struck its agent; then: {text}")


def check_alone(cluster: "Cluster", at_worst: str, struck: str, limit: float) -> None:
    """Check the control plane's reaction to the only fault of a run: no stronger one than ``at_worst``, and in time.

    ``limit``: true time in seconds until which the epoch must be closed, if it is closed. A verdict on a hang may wait
    for an inspection of all workers, ``inspection_s`` more.
    """
    if at_worst == ANYTHING:
        return
    limit += cluster.plane.state.options.timeouts.inspection_s
    if cluster.checks.first_close > limit:
        cluster.checks.fail(f"{cluster.checks.first_close - limit:.1f} s too late, the epoch is closed for {struck}")
    for order in cluster.plane.log:
        kind = type(order).__name__
        if isinstance(order, m.Restart) and at_worst == HOT_SWAP and not cluster.shape.copies:
            continue  # without copies the loss of one worker may need the checkpoint
        is_innocent = isinstance(order, m.Kill) and f"{order.worker} (" not in struck
        if is_innocent or isinstance(order, _TOO_MUCH[at_worst]):
            cluster.checks.fail(f"a fault that may lead to {at_worst} at worst has led to {kind}; {struck}: {order}")


# --- invariants -------------------------------------------------------------------------------------------------------

_CHECK_EVERY = 97
"""Out of so many calls of ``decide``, one without a report is checked to leave the state as it is."""


class Checks:
    """The invariants and statistics of one history. The models call a method of this class at each event.

    Attributes:
        committed: the last step that every logical rank has finished.
        furthest: the highest step committed since the last warm restart.
        progress_at: virtual time in seconds at which the run last made progress.
        redone: number of committed steps that were rolled back and are executed again.
        first_close: virtual time in seconds at which the first epoch was closed, 0 if none was.
    """

    def __init__(self, cluster: "Cluster"):
        self._cluster = cluster
        self._legitimacy = Legitimacy(cluster)
        self.committed, self.furthest, self.progress_at = 0, 0, 0.0
        self.redone, self.first_close = 0, 0.0
        self._lineage = {0: 0}
        self._done: dict[tuple[int, int], set[int]] = {}
        self._sitting: dict[tuple[int, int], Worker] = {}
        self._trained = self._newest = self._fresh = -1
        self._is_open = self._is_over = False
        self._opens: dict[int, m.Open] = {}
        self._dead: set[str] = set()
        self._calls, self._before = 0, None
        self._rebuilt_at: set[int] = set()
        self._repaired_to: dict[int, int] = {}
        self._may_train: set[int] = set()
        self._spoiled: set[int] = set()

    def fail(self, text: str) -> None:
        raise Violation(text)

    # --- calls of decide ---------------------------------------------------------------------------------------------

    def before(self, report: Any | None) -> None:
        """Note the control plane's state before a call of ``decide``; ``report`` None: only time has passed."""
        self._calls += 1
        recovery = self._cluster.plane.state.recovery
        self._spoiled = set() if recovery is None else set(recovery.spoiled)
        is_due = report is None and self._calls % _CHECK_EVERY == 0
        self._before = to_json(self._cluster.plane.state) if is_due else None

    def decided(self, report: Any | None, decisions: list[Any]) -> None:
        """Check that a call of ``decide`` without a decision has not changed the state, and log the decisions."""
        if self._before is not None and not decisions and to_json(self._cluster.plane.state) != self._before:
            self.fail("time passed, nothing was decided, and yet the state changed")
        for decision in decisions:
            for note in decision.events:
                if note.name == events.REPAIR_ORDERED:
                    self._check_level(note.values["level"], decision.orders[0])
        if self._cluster.lines is not None and (decisions or not isinstance(report, m.AgentBeat | None)):
            said = "time passes" if report is None else m.encode(report)
            self._cluster.note("{}", said if len(said) < 300 else said[:297] + "...")
            for decision in decisions:
                self._cluster.note("    {}", decision.reason)
                for order in decision.orders:
                    text = m.encode(order)
                    self._cluster.note("        -> {}", text if len(text) < 400 else text[:397] + "...")

    def on_record(self, report: Any | None) -> None:
        """Note that a report is in the journal, so that every later control plane process knows the report."""
        if isinstance(report, m.WorkerExited):
            self._dead.add(report.worker)

    def plans(self, now: float, following: float) -> None:
        """Check that the control plane's next deadline is in the future."""
        if following <= now:
            self.fail(f"the next deadline, {following}, is not after now, {now}")

    # --- training ----------------------------------------------------------------------------------------------------

    def takes_part(self, operation: "Operation", worker: "Worker") -> None:
        """Check that each seat has one worker, the one named in the order that opened the epoch (topology consistency,
        DEADPOOL, section V-C, invariant I1).
        """
        place = (worker.epoch, worker.rank)
        other = self._sitting.setdefault(place, worker)
        seat = self._opens[worker.epoch].seats[worker.rank].worker
        if other is not worker or seat != worker.name:
            self.fail(f"{worker.name} works in seat {worker.rank} of epoch {worker.epoch}, which is {other.name}'s")
        if worker.rank in operation.members:
            self.fail(f"{worker.name} takes part in {operation.key} of epoch {worker.epoch} a second time")

    def operation_ended(self, operation: "Operation") -> None:
        """Check a gradient all-reduce: all ranks compute the same step, each on its own part of one committed state."""
        if not operation.ended or operation.key[-1] != "gradients":
            return
        step, shape = operation.key[0], self._cluster.shape
        if operation.epoch < self._fresh:
            self._check_left_behind(operation)
            return
        if operation.epoch < self._trained:
            self.fail(f"epoch {operation.epoch} does step {step} after epoch {self._trained} has trained")
        self._trained = operation.epoch
        histories = {owned[2] for _, (owned, _) in operation.members.values()}
        histories |= {replicated[2] for _, (_, replicated) in operation.members.values()}
        for rank, (worker, (owned, replicated)) in sorted(operation.members.items()):
            if owned[:2] != (rank, step - 1) or replicated[:2] != (shape.part_of(rank), step - 1):
                self.fail(f"{worker.name}, rank {rank}, does step {step} with states {owned} and {replicated}")
        if len(histories) > 1:
            self.fail(f"step {step} is done with states of {len(histories)} different pasts")
        if histories != {self._lineage.get(step - 1)}:
            self.fail(f"step {step} is done with a state of step {step - 1} that is not the one committed")

    def _check_left_behind(self, operation: "Operation") -> None:
        """Check that, after a warm restart, only workers that could not be reached still train in an older epoch."""
        for worker, _ in operation.members.values():
            if not worker.agent.excuse:
                self.fail(f"{worker.name} does {operation.key} of epoch {operation.epoch} after a warm restart")

    def history_after(self, operation: "Operation", worker: "Worker") -> int:
        """Return the history of the worker's state after the step, and note that its rank has finished the step."""
        step, before = operation.key[0], operation.members[worker.rank][1][0][2]
        history = hash((before, operation.epoch, step))
        if operation.epoch < self._fresh:
            return history
        ranks = self._done.setdefault((operation.epoch, step), set())
        if worker.rank in ranks:
            self.fail(f"rank {worker.rank} does step {step} twice in epoch {operation.epoch}")
        ranks.add(worker.rank)
        if len(ranks) == self._cluster.shape.world_size:
            if step != self.committed + 1:
                self.fail(f"step {step} is committed after step {self.committed}")
            self._lineage[step], self.committed = history, step
            if step > self.furthest:
                self.furthest, self.progress_at = step, self._cluster.time.now
        return history

    def restored(self, worker: "Worker") -> None:
        """Check that the restored state is the committed one of the step that the control plane has ordered (optimizer
        availability and step atomicity, DEADPOOL, section V-C, invariants I3 and I4).
        """
        step, live = self._repaired_to[worker.epoch], worker.training
        shape, history = self._cluster.shape, self._lineage.get(step)
        wanted = (worker.rank, step, history), (shape.part_of(worker.rank), step, history)
        if (live.owned, live.replicated) != wanted or worker.step != step:
            self.fail(
                f"{worker.name}, rank {worker.rank}, restores step {step} as {live.owned} and {live.replicated}, "
                f"committed was {wanted}"
            )

    def begins_epoch(self, worker: "Worker") -> None:
        """Check that a worker begins to train in an epoch only when the control plane has ordered it."""
        if worker.epoch not in self._may_train:
            self.fail(f"{worker.name} goes on in epoch {worker.epoch}, which is not resumed")

    def enters(self, worker: "Worker", opened: m.Open) -> None:
        """Check that a worker enters only epochs that are newer than its previous one."""
        if opened.epoch <= worker.epoch:
            self.fail(f"{worker.name} enters epoch {opened.epoch} after epoch {worker.epoch}")

    def leaves(self, worker: "Worker") -> None:
        """Check that a worker leaves its epoch only when the control plane has closed it."""
        if self._is_open and worker.epoch == self._newest:
            self.fail(f"{worker.name} leaves epoch {worker.epoch}, which is open")

    def takes_snapshot(self, worker: "Worker", step: int) -> None:
        """Check that a worker overwrites its last but one snapshot only when every worker's last one has reached its
        peers.
        """
        for seat in worker.seats.values():
            other = self._cluster.everyone[seat.worker]
            is_behind = other.alive and other.inside and other.epoch == worker.epoch and other.step < step
            if is_behind and not other.training.snapshots.is_safe:
                self.fail(f"{worker.name} takes the snapshot of step {step}, and that of {other.name} is not complete")

    def updates(self, worker: "Worker") -> None:
        """Check that the optimizer changes a worker's state only when its last snapshot and all copies of it are
        complete.
        """
        if not worker.training.snapshots.is_safe:
            self.fail(f"{worker.name} updates the state of step {worker.step}, whose snapshot is not complete")

    def ends_itself(self, worker: "Worker", code: int) -> None:
        """Check that a worker ends without an error only when the run is finished."""
        if code == 0 and not self._is_over:
            self.fail(f"{worker.name} ends with code 0 before the order to finish")

    # --- orders ------------------------------------------------------------------------------------------------------

    def ordered(self, order: Any) -> None:
        """Check a published order, with the method for its type."""
        if self._is_over:
            self.fail(f"an order after the end: {order}")
        check = getattr(self, f"_on_{type(order).__name__.lower()}", None)
        if check is not None:
            check(order)

    def _on_open(self, order: m.Open) -> None:
        """Check that epochs follow each other, with one living worker and one device per logical rank, and that no
        living worker has lost its rank.
        """
        if self._is_open or order.epoch != self._newest + 1:
            self.fail(f"epoch {order.epoch} opens, epoch {self._newest} is {'open' if self._is_open else 'closed'}")
        before = None if order.fresh else self._opens[order.epoch - 1]
        self._newest, self._is_open, self._opens[order.epoch] = order.epoch, True, order
        names = [seat.worker for seat in order.seats.values()]
        devices = {(seat.node, seat.local_rank) for seat in order.seats.values()}
        if not len(names) == len(set(names)) == len(devices) == self._cluster.shape.world_size:
            self.fail(f"seats of epoch {order.epoch} are not one worker and one device for each rank: {order.seats}")
        self._check_devices(order)
        if lost := sorted(set(names) & self._dead):
            self.fail(f"epoch {order.epoch} has seats for workers that are dead or ordered to be: {', '.join(lost)}")
        for rank, seat in before.seats.items() if before is not None else ():
            if order.seats[rank].worker != seat.worker and seat.worker not in self._dead:
                self.fail(f"{seat.worker} lives and has lost seat {rank} to {order.seats[rank].worker}")
        if order.fresh:
            self._fresh = order.epoch
            self._may_train.add(order.epoch)
            self.committed, history = self._cluster.load(order.epoch)
            self._lineage = {self.committed: history}
            self.furthest = self.committed

    def _check_devices(self, order: m.Open) -> None:
        """Check that each seat has a device of its node that no other worker's process still uses."""
        for seat in order.seats.values():
            agent = self._cluster.agents[seat.node]
            if agent.devices and seat.local_rank >= agent.devices:
                self.fail(f"{seat.worker} gets device {seat.local_rank} of {seat.node}, which has {agent.devices}")
            users = [name for name, device in agent.in_use.items() if device == seat.local_rank and name != seat.worker]
            if agent.devices and agent.alive and users:
                self.fail(f"{seat.worker} gets device {seat.local_rank} of {seat.node}, which {users} still use")

    def _on_close(self, order: m.Close) -> None:
        if not self._is_open or order.epoch != self._newest:
            self.fail(f"epoch {order.epoch} is closed, the open one is {self._newest if self._is_open else None}")
        self._is_open = False
        self.first_close = self.first_close or self._cluster.time.now

    def _on_repair(self, order: m.Repair) -> None:
        """Check that all workers have left the old epoch and are built, and that the ordered step is the newest
        possible.
        """
        seated = self._seated(order.epoch)
        self._repaired_to[order.epoch] = order.step
        for rank, worker in seated.items():
            if worker.inside:
                self.fail(
                    f"repair of epoch {order.epoch} begins, {worker.name} (rank {rank}) is in epoch {worker.epoch}"
                )
            if worker.training is None:
                self.fail(f"repair of epoch {order.epoch} begins, {worker.name} (rank {rank}) is not assembled")
        spoiled = set(self._cluster.plane.state.recovery.spoiled)
        best = self._best(seated, spoiled)
        if order.rebuilt or order.lent:
            self._check_rebuilt(order, seated, best)
        elif order.step != best:
            self.fail(f"step {order.step} is restored, the newest that everybody has a source of is {best}")
        if order.step < self.committed - 1 and not spoiled:
            self.fail(f"step {order.step} is restored, committed was {self.committed}")
        self._check_kept(order, seated)
        self.redone += self.committed - order.step
        self.committed = order.step

    def _check_level(self, level: str, order: m.Repair) -> None:
        """Check that a repair is of the level of the recovery ladder that the control plane names."""
        joiners = self._opens[order.epoch].joiners
        taken_over = [r for r, source in order.sources.items() if r not in joiners and source.owned != r]
        if order.rebuilt or order.lent:
            right = (recovery.CHECKFREE,)
        elif taken_over:
            right = (recovery.COPY,)
        else:
            right = (recovery.STANDBY, recovery.COPY) if joiners else (recovery.IN_PLACE,)
        if level not in right:
            self.fail(f"the repair of epoch {order.epoch} is called {level!r}, it is {' or '.join(right)}: {order}")

    def _check_rebuilt(self, order: m.Repair, seated: "dict[int, Worker]", best: int | None) -> None:
        """Check a rebuild of lost pipeline stages from adjacent stages (CheckFree, section 4): only whole stages are
        rebuilt, other ranks take the weights of a peer that has its state, and both only if no step can be restored.
        """
        shape = self._cluster.shape
        rebuilt = dict(order.rebuilt)
        begun = shape.checkfree == PLUS and order.step in self._rebuilt_at
        if not shape.checkfree or (best is not None and not begun):
            self.fail(f"stages are rebuilt at step {order.step}, though step {best} could be restored: {rebuilt}")
        for rank, beside in rebuilt.items():
            if any(peer not in rebuilt for peer in shape.dp_peers(rank)):
                self.fail(f"rank {rank} is rebuilt, but not all of its stage: {rebuilt}")
            parts = [shape.part_of(other) for other in beside.there]
            count = shape.world_size // shape.dp
            stages = range(count) if shape.checkfree == PLUS else range(-1, count + 1)
            if parts != [part for part in (shape.part_of(rank) - 1, shape.part_of(rank) + 1) if part in stages]:
                self.fail(f"rank {rank} is rebuilt from ranks {beside.there}, which are not beside it")
        for rank, peer in order.lent.items():
            if peer not in shape.dp_peers(rank) or peer not in order.sources:
                self.fail(f"rank {rank} takes the weights of rank {peer}, which has no such weights")
        if sorted([*rebuilt, *order.lent, *order.sources]) != sorted(seated):
            self.fail(f"not every rank has one origin: {order}")
        self._rebuilt_at.add(order.step)
        self._take_as_committed(order, seated)

    def _take_as_committed(self, order: m.Repair, seated: "dict[int, Worker]") -> None:
        """Take the state of the remaining ranks as committed: they may have finished a step that the lost ranks had
        not finished.
        """
        slots = [(seated[source.owned].stock, rank, source.owned) for rank, source in order.sources.items()]
        found = [(stock.own if owner == rank else stock.copies[rank]).find(order.step) for stock, rank, owner in slots]
        histories = {slot.value[0][2] for slot in found}
        if len(histories) > 1:
            self.fail(f"stages are rebuilt beside states of step {order.step} of {len(histories)} different pasts")
        if order.step == self.committed + 1:
            self._lineage[order.step] = histories.pop()
            self.committed, self.furthest = order.step, max(self.furthest, order.step)

    def _best(self, seated: "dict[int, Worker]", spoiled: set[int]) -> int | None:
        """Return the newest step that every rank has a source of, None if there is none; ``spoiled`` ones do not count.

        A joiner counts with the snapshot that it has fetched in an epoch that was closed before the joiner resumed.
        """
        shape = self._cluster.shape
        stocks = {rank: worker.stock for rank, worker in seated.items()}
        own = {rank: set(stock.own.steps()) for rank, stock in stocks.items()}
        steps = {step for stock in stocks.values() for pair in stock.copies.values() for step in pair.steps()}
        for step in sorted(steps.union(*own.values()) - spoiled, reverse=True):
            if all(self._has_source(shape, rank, step, stocks, own) for rank in seated):
                return step
        return None

    @staticmethod
    def _has_source(shape: Any, rank: int, step: int, stocks: dict[int, Any], own: dict[int, set[int]]) -> bool:
        copies = [(o, pair) for at, stock in stocks.items() for o, pair in stock.copies.items() if o != at]
        left = {owner for owner, pair in copies if step in pair.steps(whole=True)}
        if step in own.get(rank, ()) or rank in left:
            return True
        copied = any(owner == rank and step in pair.steps() for owner, pair in copies)
        peers = [peer for peer in shape.dp_peers(rank) if peer != rank]
        return copied and (not peers or any(step in own.get(peer, ()) or peer in left for peer in peers))

    def _check_kept(self, order: m.Repair, seated: "dict[int, Worker]") -> None:
        """Check that the members of a process group that is not rebuilt have all executed the same number of
        operations on the group.
        """
        for name, ranks in self._cluster.shape.groups.items():
            if name in order.rebuild or name in order.defer or len(ranks) == 1:
                continue
            members = [seated[rank] for rank in ranks]
            if any(member.empty for member in members) or len({tuple(w.training.groups[name]) for w in members}) > 1:
                self.fail(f"group {name} is kept in epoch {order.epoch}, though its members are not in step")

    def _on_resume(self, order: m.Resume) -> None:
        self._may_train.add(order.epoch)
        for rank, worker in self._seated(order.epoch).items():
            if worker.training.repaired_epoch != order.epoch or worker.step != order.step:
                self.fail(f"epoch {order.epoch} goes on, {worker.name} (rank {rank}) is not repaired")

    def _on_kill(self, order: m.Kill) -> None:
        self._dead.add(order.worker)

    def _on_restart(self, order: m.Restart) -> None:
        self._is_open = False
        self._dead |= self._cluster.everyone.keys()
        self.progress_at = self._cluster.time.now
        self._check_loss(order.reason)
        self._legitimacy.of_restart(order)

    def _on_finish(self, order: m.Finish) -> None:
        self._is_over = True
        last = self._cluster.habits.steps
        quit_early = all(worker.quits or worker.step == last for worker in self._seated(self._newest).values())
        if self.committed != last and not quit_early:
            self.fail(f"the run is finished at step {self.committed} of {last}")

    def _on_stop(self, order: m.Stop) -> None:
        self._is_over = True
        self._check_loss(order.message)
        self._legitimacy.of_stop(order)

    def _check_loss(self, reason: str) -> None:
        """Check that a recovery falls back to the checkpoint for lack of snapshots only if no step can be restored."""
        if reason.startswith(LOST):
            best = self._best(self._seated(self._newest), self._spoiled)
            if best is not None:
                self.fail(f"all go back to the checkpoint, though step {best} could be restored: {reason}")

    def _seated(self, epoch: int) -> "dict[int, Worker]":
        """Return the workers of an epoch by logical rank; a dead worker has the state in which it died.

        Before the first epoch, a run has no such workers.
        """
        if epoch not in self._opens:
            return {}
        return {r: self._cluster.everyone[s.worker] for r, s in self._opens[epoch].seats.items()}

    # --- progress ----------------------------------------------------------------------------------------------------

    def is_stuck(self, limit_s: float) -> bool:
        """Return whether nothing has made progress for ``limit_s`` seconds since the last fault was over."""
        if self._cluster.plane.state.phase == ENDED:
            return False
        return self._cluster.time.now > max(self.progress_at, self._cluster.calm_at) + limit_s
