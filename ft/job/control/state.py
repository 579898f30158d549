"""The state of the control plane, and the decisions on it: plain values.

Only :func:`ft.job.control.controller.decide` changes the state, and it returns the decisions. A joiner is a worker that
is new to its seat.
"""

from dataclasses import dataclass, field
from typing import Any

from ft.base import events
from ft.base.events import Note
from ft.faults.health import Finding
from ft.job.control.timeouts import Timeouts
from ft.job.messages import (
    AgentJoined,
    Beat,
    HangJudged,
    PaceJudged,
    Repair,
    WorkerArrived,
    WorkerDone,
    WorkerReleased,
    WorkerRepaired,
    WorkerSuspects,
)
from ft.job.parts import Holdings

GATHERING, CLOSED, OPENED = "gathering", "closed", "opened"
REPAIRING, RESUMING, RUNNING, ENDED = "repairing", "resuming", "running", "ended"
"""Phases of the control plane.

- gathering: agents and workers of a fresh start are connecting.
- closed: an epoch is over, and not all of its empty seats have a new worker.
- opened: the workers of the next epoch are fixed; survivors leave the old epoch, joiners build model and optimizer.
- repairing: workers rebuild process groups and restore state.
- resuming: workers are about to begin their first step.
- running: every worker has begun its first step.
- ended: the run is over.
"""

EPOCH_OPEN = (OPENED, REPAIRING, RESUMING, RUNNING)
"""The phases in which workers are in an epoch that has not been closed."""


@dataclass(frozen=True)
class ControlOptions:
    """The configuration of a run.

    Attributes:
        nodes: number of agents to wait for at a start.
        counts_standby_nodes: whether the nodes without logical ranks of their own are among them.
        world_size: number of logical ranks.
        max_restarts: maximum number of warm restarts (all workers start anew from a persistent checkpoint).
        restarts: number of warm restarts before this control plane started without the journal of its predecessor.
        hot_swap: if False, every failure leads to a warm restart.
        replicas: number of replicas of the model that train together; this run is one of them.
        reorders: whether the other replicas compute the part of a lost one (SPARe).
        faults: number of faults that are planned for injection.
        command: command line of the training script.
        timeouts: limits in seconds.
    """

    nodes: int
    world_size: int
    max_restarts: int = 3
    restarts: int = 0
    hot_swap: bool = True
    replicas: int = 1
    reorders: bool = False
    faults: int = 0
    command: list[str] = field(default_factory=list)
    timeouts: Timeouts = field(default_factory=Timeouts)
    counts_standby_nodes: bool = True


@dataclass(frozen=True)
class ControlStart:
    """What the process of the control plane is to do, which its agent passes to it as JSON.

    Attributes:
        run_dir: folder for journal, events and status.
        where: tcp://HOST:PORT to listen on (port 0: any free port).
        node: name of the agent on whose node the process runs.
        term: term of the leader election that the process has won.
    """

    run_dir: str
    where: str
    options: ControlOptions
    node: str = "n0"
    term: int = 0


@dataclass
class Agent:
    """What the control plane knows about an agent, the supervisor of one node.

    Attributes:
        joined: what it has said of itself and of its node when it joined.
        heard_at: time of its last report, in seconds.
        places: number of workers that it starts at the start of the run, or at the last warm restart.
        beats: worker -> the heartbeat of that worker that the agent last forwarded.
        suspect: why the node is suspected to be faulty, or "".
        gone: why the agent counts as lost, or "".
        started: names of all workers that it has ever started.
        held: lost worker -> the device that it has not released yet.
        unusable: index of a device -> why no worker can use it.
        evidence: what the node has found against itself or one of its devices, which has the device's index in its name
            ("gpu3"), if the run acts on it; ``when`` is the time of the report, in seconds.
    """

    joined: AgentJoined
    heard_at: float
    places: int
    beats: dict[str, Beat] = field(default_factory=dict)
    suspect: str = ""
    gone: str = ""
    started: list[str] = field(default_factory=list)
    held: dict[str, "Hold"] = field(default_factory=dict)
    unusable: dict[int, str] = field(default_factory=dict)
    evidence: list[Finding] = field(default_factory=list)

    @property
    def node(self) -> str:
        """Return the name of the agent."""
        return self.joined.node


@dataclass(frozen=True)
class Hold:
    """A device that waits for the end of the lost worker that used it.

    Attributes:
        device: index of the device on its node.
        since: time at which the worker was lost, in seconds.
        overdue: whether the worker has not released the device in time.
    """

    device: int
    since: float
    overdue: bool = False


@dataclass
class Worker:
    """A worker process that is alive as far as the control plane knows.

    Attributes:
        name: name of the worker.
        node: name of its agent.
        pid: process id on that node.
        started_for: logical rank for which it was started, or None for a standby.
        since: time at which it was started, in seconds.
        address: host:port of its snapshot server.
        ready: whether it has connected to its agent.
        rank: logical rank that it holds, or None while it has no seat.
        local_rank: index of its device on the node.
        keeps_device: whether that device is kept for it although it is a standby.
        empty: whether it still has no training state of its own.
        assembled: whether it has built model and optimizer.
        leaving_epoch: closed epoch that it has not left yet, or -1.
        release: its report when it last left an epoch.
        arrived: its last report that model and optimizer are built.
        inherited: its last report of what it holds since it has taken over what others have left; None once an epoch is
            closed, because it then reports all that it holds.
        repaired: its report that it is repaired, in the present epoch.
        resumed: last epoch whose first step it has begun.
        done: whether it has finished its training steps, in the present epoch.
        end: its report of how its training has ended.
        left: whether it has exited with code 0.
        left_at: time of that exit, in seconds.
        released: whether its agent has reported that its device is free again.
        reserved: whether it was told, as a standby, how much memory a logical rank needs.
    """

    name: str
    node: str
    pid: int
    started_for: int | None
    since: float
    address: str = ""
    ready: bool = False
    rank: int | None = None
    local_rank: int = 0
    keeps_device: bool = False
    empty: bool = True
    assembled: bool = False
    leaving_epoch: int = -1
    release: WorkerReleased | None = None
    arrived: WorkerArrived | None = None
    inherited: Holdings | None = None
    repaired: WorkerRepaired | None = None
    resumed: int = -1
    done: bool = False
    end: WorkerDone | None = None
    left: bool = False
    left_at: float = 0.0
    released: bool = False
    reserved: bool = False


@dataclass(frozen=True)
class Vacancy:
    """The lost worker of an empty seat, with its node and its device there."""

    worker: str
    node: str
    local_rank: int


@dataclass(frozen=True)
class Suspicion:
    """A worker's report that an operation failed; ``since`` is the time at which it came, in seconds."""

    since: float
    said: WorkerSuspects


@dataclass(frozen=True)
class GridPosition:
    """The position of a logical rank in the parallel grid (pipeline, tensor, data, context, expert), as its worker
    reported it.

    ``blocks`` is the number of transformer layers that the rank holds. ``lends``: whether a data-parallel peer may take
    its weights from the rank's live model.
    """

    pp: int
    tp: int
    dp: int
    cp: int
    blocks: int
    ep: int = 0
    lends: bool = False


@dataclass(frozen=True)
class PastFault:
    """A failure that was classified before; the classification of later failures takes it into account.

    Attributes:
        at: time in seconds.
        rank: logical rank of the failed worker, or None.
        step: last committed step at that time.
        action: the action that was taken, as in ``ft.faults.verdict``.
        key: text that is equal for equal errors.
    """

    at: float
    rank: int | None
    step: int
    action: str
    key: str


@dataclass(frozen=True)
class Return:
    """One recovery that rolled training back to committed step ``step``.

    Attributes:
        step: the step that was restored.
        verdicts: the failures that caused it, in words.
        fired: number of injected faults until then.
    """

    step: int
    verdicts: list[str]
    fired: int


@dataclass
class RecoveryInProgress:
    """The recovery in progress.

    Attributes:
        at: time at which it began, in seconds.
        closed: the epoch that was running when it began.
        reason: why it began.
        ranks: logical ranks that have failed.
        verdicts: the failures since the last repair, in words.
        in_vain: whether all of these failures were unanswered waits, without a death, an error or an outside cause.
        released: whether all workers have left the last closed epoch.
        spoiled: steps whose snapshots turned out to be unusable.
        unusable: logical rank -> the steps that it found unusable.
        unbuildable: steps at which a pipeline stage could not be rebuilt from its neighbours (CheckFree).
        awaited: logical ranks for whose empty seat no standby was ready.
    """

    at: float
    closed: int
    reason: str
    ranks: list[int] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    in_vain: bool = True
    released: bool = False
    spoiled: list[int] = field(default_factory=list)
    unusable: dict[int, list[int]] = field(default_factory=dict)
    unbuildable: list[int] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)


@dataclass
class ControlState:
    """The whole state of the control plane.

    Attributes:
        options: configuration of the run.
        phase: one of the phases above.
        since: time at which the phase began, in seconds.
        epoch: the newest epoch; -1 before the first.
        fresh: whether this epoch began without training state in memory.
        step: last step that is known to be committed.
        restarts: number of warm restarts so far.
        attached: whether any worker has ever connected, so that the script takes part in recoveries.
        checked: whether all agents of the start have been compared with each other.
        told_of_difference: last epoch in which the user was told that a redone step differs from its first try.
        noticed: whether the user was told which agents are missing at the start.
        protected: whether any worker has ever trained under hot-swap protection. From then on, other workers hold
            copies of its state in memory, and faults can be injected.
        footprint: the most (bytes of heap, bytes of a snapshot) that a logical rank's worker needed at the start.
        agents: node -> agent.
        workers: name -> worker.
        seats: logical rank -> name of the worker that holds it.
        vacant: logical rank -> the worker that was lost, for the empty seats.
        spawning: node -> times at which workers were ordered there that have not been started yet.
        failed_starts: number of standbys in a row that ended before they were ready.
        dp_peers: logical rank -> its data-parallel peers, as its worker reported them.
        shards: logical rank -> names of its optimizer shards, as its worker reported them.
        copies: logical rank -> logical ranks that receive its peer copies.
        complete: logical rank -> whether its peer copies hold all of its state.
        checkfree: which lost pipeline stages may be rebuilt from their neighbours (CheckFree): "" (none), "middle", or
            "plus" (CheckFree+: also the first and the last).
        places: logical rank -> its position in the grid, if CheckFree is enabled.
        rebuilt: pipeline stage -> step at which it was last rebuilt.
        fired: numbers of the injected faults that have happened.
        settings: the settings that the first worker reported.
        settings_of: name of that worker.
        suspicions: worker -> its unexplained loss of a connection.
        history: the failures that were classified, oldest first.
        repair: the last repair that was ordered.
        kept: number of process groups that this repair keeps.
        recovery: the recovery in progress, or None.
        returns: the last rollbacks, all to the same step and without any new failure in between.
        last_recovery: the last recovery, for the status file.
        inspections: number of inspections of all workers that were ordered (``ft.job.control.inspections``).
        inspected_at: time of the last one.
        inspected_in: the epoch in which it was taken.
        inspection_why: why it was taken, "" if somebody has asked for it.
        judged: what an inspection says of a hang, the last one of which that is known.
        stragglers: logical rank -> the last report that its worker is persistently slower than others with the same
            work.
        evict_factor: a straggler is replaced if its own work takes this many times as long as that of the others; None:
            stragglers keep their seats.
        evicted_at: step at which a straggler was last replaced, or None.
        told_at: time at which an agent was told to end the run by a signal, None if none was.
        told_by: that agent's node and the number of the signal.
    """

    options: ControlOptions
    phase: str = GATHERING
    since: float = 0.0
    epoch: int = -1
    fresh: bool = True
    step: int = 0
    restarts: int = 0
    attached: bool = False
    protected: bool = False
    noticed: bool = False
    told_of_difference: int = -1
    checked: bool = False
    footprint: tuple[int, int] = (0, 0)
    agents: dict[str, Agent] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    seats: dict[int, str] = field(default_factory=dict)
    vacant: dict[int, Vacancy] = field(default_factory=dict)
    spawning: dict[str, list[float]] = field(default_factory=dict)
    failed_starts: int = 0
    dp_peers: dict[int, list[int]] = field(default_factory=dict)
    shards: dict[int, list[str]] = field(default_factory=dict)
    copies: dict[int, list[int]] = field(default_factory=dict)
    complete: dict[int, bool] = field(default_factory=dict)
    checkfree: str = ""
    places: dict[int, GridPosition] = field(default_factory=dict)
    rebuilt: dict[int, int] = field(default_factory=dict)
    fired: list[int] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    settings_of: str = ""
    suspicions: dict[str, Suspicion] = field(default_factory=dict)
    history: list[PastFault] = field(default_factory=list)
    repair: Repair | None = None
    kept: int = 0
    recovery: RecoveryInProgress | None = None
    returns: list[Return] = field(default_factory=list)
    last_recovery: dict[str, str | int | float] = field(default_factory=dict)
    inspections: int = 0
    inspected_at: float = -1e9
    inspected_in: int = -2
    inspection_why: str = ""
    judged: HangJudged | None = None
    stragglers: dict[int, PaceJudged] = field(default_factory=dict)
    evict_factor: float | None = None
    evicted_at: int | None = None
    told_at: float | None = None
    told_by: tuple[str, int] = ("", 0)

    @classmethod
    def begin(cls, options: ControlOptions) -> "ControlState":
        """Return the state before any report was received."""
        return cls(options, restarts=options.restarts)

    def nodes_seen(self) -> int:
        """Count the nodes that have joined, among those that a start waits for. A node whose agent has joined again
        under another name counts once.
        """
        everyone = self.options.counts_standby_nodes
        return len({agent.joined.node_rank for agent in self.agents.values() if everyone or agent.joined.seats})

    def named(self, agent: Agent) -> str:
        """Return the name of an agent's node for people, such as "n1 (gpu0137)"."""
        machines = {one.node: one.joined.machine for one in self.agents.values() if one.joined.machine}
        return events.named(agent.node, machines)

    def seated(self) -> list[Worker]:
        """Return the workers that have a seat, ordered by logical rank."""
        return list(self.by_rank().values())

    def by_rank(self) -> dict[int, Worker]:
        """Return logical rank -> worker that holds it, ordered by logical rank."""
        return {rank: self.workers[self.seats[rank]] for rank in sorted(self.seats)}

    def recovering(self) -> RecoveryInProgress:
        """Return the recovery that is under way, since an epoch was closed."""
        assert self.recovery is not None, "no epoch was closed"
        return self.recovery

    def standbys(self) -> list[Worker]:
        """Return the ready workers without a seat, in the order in which they were started."""
        return [w for w in self.workers.values() if w.ready and w.rank is None and not w.left and w.started_for is None]

    def beat(self, worker: Worker) -> Beat | None:
        """Return the last heartbeat of ``worker``, or None."""
        agent = self.agents.get(worker.node)
        return agent.beats.get(worker.name) if agent is not None else None

    def newest_step(self) -> int:
        """Return the largest committed step that is known from any report or heartbeat."""
        beats = [beat.step for worker in self.seated() if (beat := self.beat(worker))]
        return max([self.step, *beats])

    def step_time(self) -> float | None:
        """Return the median step time of the slowest worker in seconds, or None before a step has ended."""
        times = [beat.step_s for worker in self.seated() if (beat := self.beat(worker)) and beat.step_s]
        return max(times, default=None)

    def limits(self) -> Timeouts:
        """Return the timeouts, extended by the present step time."""
        return self.options.timeouts.calibrated(self.step_time())

    def enter(self, phase: str, now: float) -> None:
        """Change the phase."""
        self.phase, self.since = phase, now


@dataclass(frozen=True)
class RecordedDecision:
    """One decision of the control plane.

    A decision without orders is recorded in the journal too, for example that a report was ignored, and why.

    Attributes:
        reason: why, for people.
        orders: the orders to send, in this sequence.
        events: the events to write to the event file.
    """

    reason: str
    orders: list[Any] = field(default_factory=list)
    events: list[Note] = field(default_factory=list)


class Decisions(list[RecordedDecision]):
    """The decisions of one call of ``decide``, in order."""

    def add(self, reason: str, *orders: Any) -> "Decisions":
        """Append a decision and return the list for chaining; ``note`` adds events to this decision."""
        self.append(RecordedDecision(reason, list(orders)))
        return self

    def note(self, name: str, **values: Any) -> "Decisions":
        """Add an event to the last decision."""
        self[-1].events.append(Note(name, values))
        return self
