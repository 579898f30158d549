"""All messages between workers, agents and the control plane, with their JSON encoding.

Reports go from workers and agents to the control plane, orders from the control plane to agents and workers. Every
message is a frozen dataclass of JSON values; all senders use ``encode`` and all receivers ``decode``. A field ``node``
is the name of an agent (``"n0"``), ``worker`` the name of a worker (``"n0.w3"``: the fourth process that this agent
started), and ``rank`` a logical rank: a position in the parallel grid (TP x CP x EP x DP x PP) that outlives the
process that holds it. Times are in seconds.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from ft.base import bounded_json
from ft.faults.hang.inspection import ReplicaGroup
from ft.job.parts import GroupReport, HangCause, Holdings, Neighbours, Seat, Source
from ft.net.codec import BadMessage, Numbers, from_json, to_json


class Message:
    """A message: every subclass is a kind of report or order, and its name is the name of the kind."""


ASIDE = ("evaluate", "save")
"""Places of a worker that works on something that may take longer than a step (``Beat.where``)."""


@dataclass(frozen=True)
class Beat(Message):
    """The heartbeat of a worker: what it is doing.

    Attributes:
        age_s: age of this information in seconds when the agent sent it on.
        epoch: epoch that the worker is in.
        step: its last committed step.
        doing: "compute", "wait" (for a communication operation, which may be unfinished on the device while the host
            goes on), "aside" (it works on an evaluation or a checkpoint save, or waits for other replicas) or "idle" (a
            standby, or a worker that waits for orders).
        since_s: how long it has been doing this, in seconds.
        where: name of the operation or place, for people.
        step_s: median step time in seconds, or None before a step has ended.
        lag: number of steps from the newest snapshot that all peers hold to the committed step.
        at_step_s: how long the present step has taken, in seconds, without evaluations and checkpoint saves.
        memory: number that changes with the files that hold the worker's snapshots (``SNAPSHOT_MEMORY``).
    """

    age_s: float
    epoch: int
    step: int
    doing: str
    since_s: float
    where: str = ""
    step_s: float | None = None
    lag: int = 0
    at_step_s: float = 0.0
    memory: int = 0


@dataclass(frozen=True)
class StepTimes(Message):
    """What one worker has done in some consecutive steps (:mod:`ft.base.step_clock`).

    Attributes:
        worker: name of the worker.
        epoch: epoch of the steps.
        rank: its logical rank.
        role: name of the part of the work that it does; ranks with the same role have the same work in every step.
        steps: numbers of the steps.
        step_s: duration of each step, in seconds.
        own_s: time in each step in which the rank did not wait for others, in seconds.
        parts: kind of own work -> its time in all of these steps, in seconds.
        waits: name of a process group, or of something else that it has waited for -> time in all of these steps, in
            seconds.
    """

    worker: str
    epoch: int
    rank: int
    role: str
    steps: list[int]
    step_s: list[float]
    own_s: list[float]
    parts: dict[str, float] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)


# --- reports ----------------------------------------------------------------------------------------------------------

_MANY = 1_000_000
"""More workers, devices or nodes than any run has."""


@dataclass(frozen=True)
class AgentJoined(Message):
    """Sent once by an agent that has started.

    Attributes:
        node: name of the agent.
        node_rank: index of its node.
        host: address under which other nodes reach it.
        seats: number of training workers that it starts; 0 for a node that holds standbys only.
        standbys: number of standby workers that it starts in addition.
        rendezvous_address: host:port of the store that it hosts; process groups use this store for their rendezvous.
        domains: kind (rack, switch, ...) -> name of each failure domain of its node (``ft run --topology``).
        devices: number of devices (GPUs) of its node, one for each worker with a logical rank; 0: workers need none.
        unusable: index of a device -> why no worker can use it.
        machine: host name of its node.
        interfaces: name of a network interface of its node -> the interface's address.
        about: settings that must be equal on all nodes, such as the version of torch.
        paths: flag and path of the command line -> "there" or "missing" on its node.
        clock: wall-clock time of its node when it joined, in seconds since 1970.
    """

    node: str
    node_rank: int
    host: str
    seats: int
    standbys: int
    rendezvous_address: str = ""
    domains: dict[str, str] = field(default_factory=dict)
    devices: int = 0
    unusable: dict[int, str] = field(default_factory=dict)
    machine: str = ""
    interfaces: dict[str, str] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    clock: float = 0.0

    def __post_init__(self) -> None:
        numbers = [self.node_rank, self.seats, self.standbys, self.devices, *self.unusable]
        if not all(0 <= number <= _MANY for number in numbers):
            raise ValueError("an agent with impossible numbers of workers or devices")


@dataclass(frozen=True)
class PeerUnreached(Message):
    """The agent of ``node`` cannot connect to the agent of ``peer`` at the address that this one advertises.

    ``problem`` is the error of the last attempt.
    """

    node: str
    peer: str
    address: str
    problem: str


@dataclass(frozen=True)
class NodeRefused(Message):
    """An agent that cannot reach the control plane has left the message ``reason`` in the run's directory.

    ``node`` is the name of that agent; another agent has found the message.
    """

    node: str
    reason: str


@dataclass(frozen=True)
class AgentBeat(Message):
    """The heartbeat of an agent.

    Attributes:
        node: name of the agent.
        workers: worker -> its last heartbeat, for the agent's workers.
        step_times: what its workers have reported about their steps since the heartbeat before.
    """

    node: str
    workers: dict[str, Beat] = field(default_factory=dict)
    step_times: list[StepTimes] = field(default_factory=list)


@dataclass(frozen=True)
class AgentLeaving(Message):
    """The agent exits on purpose. ``signum`` is the signal that it received, or 0 if its work is done."""

    node: str
    signum: int


@dataclass(frozen=True)
class EndWanted(Message):
    """The agent of ``node`` has received signal ``signum`` and has told its workers to save and end."""

    node: str
    signum: int


@dataclass(frozen=True)
class WorkerStarted(Message):
    """The agent has started a worker process.

    Attributes:
        worker: name of the worker.
        node: name of its agent.
        pid: process id on that node.
        rank: logical rank that the worker is meant for, or None for a standby.
        restart: number of the warm restart for which it was started (0: start of the run), or None if unknown.
        local_rank: index of the device that the agent has given to a worker with a logical rank.
    """

    worker: str
    node: str
    pid: int
    rank: int | None
    restart: int | None = None
    local_rank: int = 0


@dataclass(frozen=True)
class WorkerReady(Message):
    """The worker has connected to its agent and waits for a seat. ``address`` is host:port of its snapshot server."""

    worker: str
    node: str
    address: str


@dataclass(frozen=True)
class WorkerExited(Message):
    """A worker process has ended.

    Attributes:
        worker: name of the worker.
        node: name of its agent.
        code: exit code if >= 0; -N means that signal N killed the process.
        attached: whether the worker had ever reported ``WorkerReady``.
    """

    worker: str
    node: str
    code: int
    attached: bool


@dataclass(frozen=True)
class DeviceReleased(Message):
    """The process of a worker has ended, and its device is free for another worker, or turned out to be unusable.

    Attributes:
        worker: name of the worker; "" if the device became unusable by itself (``ft run --health drain``).
        node: name of its agent.
        device: index of its device on that node.
        problem: why no worker can use the device, or "".
    """

    worker: str
    node: str
    device: int
    problem: str = ""


@dataclass(frozen=True)
class WorkerSilent(Message):
    """The worker has sent no heartbeat for ``silent_s`` seconds.

    ``state`` is the state letter of its process in /proc (T: stopped, D: uninterruptible sleep, R: running, S:
    sleeping).
    """

    worker: str
    node: str
    silent_s: float
    state: str


@dataclass(frozen=True)
class WorkerFailed(Message):
    """The worker has caught an exception and waits for orders.

    Attributes:
        worker: name of the worker.
        epoch: epoch that the worker was in.
        step: its last committed step.
        kinds: class names of the exception and its bases, most specific first; the failure is classified by these
            names.
        message: text of the exception.
        trace: its traceback.
    """

    worker: str
    epoch: int
    step: int
    kinds: list[str]
    message: str
    trace: str = ""


@dataclass(frozen=True)
class WorkerSuspects(Message):
    """A collective or point-to-point operation of process group ``group`` failed although the epoch is still open.

    Either a peer or the connection to the peer is gone; this worker cannot distinguish the two.
    """

    worker: str
    epoch: int
    group: str
    message: str


@dataclass(frozen=True)
class WorkerReleased(Message):
    """The worker has left the closed epoch ``epoch``: it is in no communication operation and starts none.

    Attributes:
        worker: name of the worker.
        epoch: epoch that it has left.
        step: its last committed step.
        groups: what it knows of each of its process groups.
        holdings: the snapshots in its host memory.
    """

    worker: str
    epoch: int
    step: int
    groups: list[GroupReport] = field(default_factory=list)
    holdings: Holdings = field(default_factory=Holdings)


@dataclass(frozen=True)
class WorkerArrived(Message):
    """A joiner has built model and optimizer for its seat in ``epoch``, and can be connected to the others.

    Attributes:
        worker: name of the worker.
        epoch: the epoch.
        groups: its process groups.
        holdings: the snapshots that it has inherited from the worker that had the seat before.
    """

    worker: str
    epoch: int
    groups: list[GroupReport] = field(default_factory=list)
    holdings: Holdings = field(default_factory=Holdings)


@dataclass(frozen=True)
class WorkerInherited(Message):
    """The worker has taken over the snapshots of an ended worker of its node, and serves them to others.

    Attributes:
        worker: name of the worker.
        holdings: the snapshots in its host memory.
    """

    worker: str
    holdings: Holdings


@dataclass(frozen=True)
class WorkerRepaired(Message):
    """The worker has rebuilt its process groups and restored its state for the new epoch.

    I1 to I4 are the invariants of DEADPOOL, section V-C; the control plane checks them with these fields.

    Attributes:
        worker: name of the worker.
        epoch: the new epoch.
        rank: logical rank that the worker now holds.
        step: step of its restored state (I4, step atomicity).
        topology: digest over the seats and all process groups, as this worker sees them (I1, topology consistency).
        shards: names of the optimizer shards that it owns (I2, shard completeness).
        rebuilt: number of process groups that it has rebuilt.
        kept: number of process groups that it has kept.
        deferred: number of process groups that are rebuilt afterwards in the background.
        sources: where its "owned" and its "replicated" state came from: "own", "copy:RANK", "peer:RANK",
            "rebuilt:RANK[+RANK]", or ``ELSEWHERE`` (I3).
        rebuild_s: seconds that the process groups took.
        restore_s: seconds that the state took.
    """

    worker: str
    epoch: int
    rank: int
    step: int
    topology: str
    shards: list[str]
    rebuilt: int
    kept: int
    deferred: int
    sources: dict[str, str]
    rebuild_s: float
    restore_s: float


@dataclass(frozen=True)
class WorkerResumed(Message):
    """The worker begins the first step of ``epoch``.

    Attributes:
        worker: name of the worker.
        epoch: the epoch.
        step: the last committed step.
        heap: bytes that model and optimizer take of its heap, 0 if that is unknown, or is memory of a device.
        snapshot: bytes of a snapshot of its state, 0 if unknown.
    """

    worker: str
    epoch: int
    step: int
    heap: int = 0
    snapshot: int = 0


@dataclass(frozen=True)
class WorkerDone(Message):
    """The worker has finished its training and waits for the others before it exits.

    Attributes:
        worker: name of the worker.
        epoch: epoch that it is in.
        step: its last committed step.
        early: name of the signal that has ended training before the last step, "" if none has.
        steps: number of steps of the whole training, 0 if unknown.
        unsaved: why the last checkpoint could not be saved, "" if it was saved, or none was to be.
    """

    worker: str
    epoch: int
    step: int
    early: str = ""
    steps: int = 0
    unsaved: str = ""


@dataclass(frozen=True)
class Observed(Message):
    """An event for the run's event file that needs no decision (``fault_injected``, a saved checkpoint, ...)."""

    event: str
    detail: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Inspected(Message):
    """What a worker does at the moment of an inspection, for its agent, which stores it and passes it on in an
    ``InspectionAnswered``.

    Attributes:
        worker: name of the worker.
        number: number of the inspection.
        said: JSON values of a ``ft.faults.hang.inspection.Rank``.
        groups: name of each process group of the worker -> logical ranks of its members.
        across: name of each group of ranks of several replicas -> its members.
    """

    worker: str
    number: int
    said: dict[str, object]
    groups: dict[str, Numbers]
    across: dict[str, ReplicaGroup] = field(default_factory=dict)


@dataclass(frozen=True)
class InspectionAnswered(Message):
    """What the workers of ``node`` do at the moment of inspection ``number``.

    ``said`` is the node's part of the inspection as it is stored (``ft.record.inspections``), without the stacks of
    threads.
    """

    node: str
    number: int
    said: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class HangJudged(Message):
    """Report of the control plane to itself: what inspection ``number`` says of a hang.

    Attributes:
        number: number of the inspection.
        causes: the causes, the most certain first.
        waiting: logical ranks that wait for others.
    """

    number: int
    causes: list[HangCause] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class InspectionWanted(Message):
    """Somebody wants to know what all workers are doing.

    ``why`` says for what, as text.
    """

    why: str


@dataclass(frozen=True)
class PaceJudged(Message):
    """Report of the control plane to itself: a worker is persistently slower than those with the same work, or is not.

    Attributes:
        worker: name of the worker.
        epoch: epoch of the steps that were compared.
        rank: its logical rank.
        step: the last of these steps.
        is_late: whether it is slower.
        ratio: median over the steps of its own work's time, divided by the median time of the others.
        own_s: median time of its own work in a step, in seconds.
        usual_s: the same of the others, in seconds.
        cause: the kind of work that takes it longer than the others.
        steps: number of steps that were compared.
    """

    worker: str
    epoch: int
    rank: int
    step: int
    is_late: bool
    ratio: float
    own_s: float
    usual_s: float
    cause: str
    steps: int


@dataclass(frozen=True)
class MasterChosen(Message):
    """Address at which the training script's own process group has its rendezvous in warm restart ``number``.

    The agent of logical rank 0 chooses this address and reports it; the control plane sends the report to all agents.
    """

    number: int
    host: str
    port: int


@dataclass(frozen=True)
class ControlBack(Message):
    """Report of a new control plane to itself after a failover: the previous one has ended, this one continues its
    journal.

    Attributes:
        term: leader-election term of the new control plane.
        node: agent on whose node it runs.
        damaged: number of lines of the journal that could not be read, and were skipped.
        paused_s: if positive, there was no failover: this control plane was paused itself for so many seconds.
    """

    term: int
    node: str
    damaged: int = 0
    paused_s: float = 0.0


# --- orders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Close(Message):
    """Epoch ``epoch`` is over: its workers leave their communication operations and report ``WorkerReleased``."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Open(Message):
    """A new epoch begins.

    Attributes:
        epoch: number of the epoch.
        seats: logical rank -> seat.
        joiners: logical ranks whose worker is new to its seat.
        fresh: no worker has state in memory, as at the start of the run: process groups connect at once, and the state
            comes from the checkpoint folder or from the random seed.
        fired: numbers of the injected faults that have happened.
        rendezvous_address: host:port of the store that this epoch's process groups use for their rendezvous; one of the
            nodes of this epoch's workers hosts it.
        copies: logical rank of a joiner -> logical ranks that its peer copies have been sent to until now.
    """

    epoch: int
    seats: dict[int, Seat]
    joiners: list[int]
    fresh: bool
    fired: list[int] = field(default_factory=list)
    rendezvous_address: str = ""
    copies: dict[int, list[int]] = field(default_factory=dict)


SNAPSHOT_MEMORY = "ft-snapshot"
"""Name that workers give to the memory files (memfd) of their snapshots; an agent finds the files by this name."""


@dataclass(frozen=True)
class Inherit(Message):
    """An agent's order to a worker: take over the snapshots of another one, which was killed or has crashed.

    Attributes:
        files: paths in /proc at which the memory of the snapshots can be opened.
        rank: logical rank of the worker that has ended.
        is_successor: whether the receiver is about to hold that rank. Otherwise it serves the snapshots to others,
            because the rank goes to a worker of another node.
    """

    files: list[str]
    rank: int
    is_successor: bool


@dataclass(frozen=True)
class Reserve(Message):
    """Standbys touch memory now that they will need with a seat, of whichever logical rank, and make a device ready.

    Attributes:
        heap: bytes that model and optimizer of a rank take of the heap.
        snapshot: bytes of a snapshot.
        devices: standby -> index of the device on its node that is kept for it, if there is one to spare.
    """

    heap: int
    snapshot: int
    devices: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Repair(Message):
    """All workers have left the old epoch and all joiners are built: rebuild the groups, restore the state of ``step``.

    A worker answers with ``WorkerRepaired``.

    Attributes:
        epoch: the new epoch.
        step: step whose state is restored.
        rebuild: names of the process groups to rebuild now.
        defer: names of the process groups to rebuild afterwards in the background; their first use waits for that.
            All other groups are kept.
        sources: logical rank -> where its state comes from.
        copies: logical rank -> logical ranks that its peer copies have been sent to until now.
        rebuilt: logical rank -> neighbours, for the ranks of pipeline stages whose state is lost. These
            ranks have no source; CheckFree (section 4.2) rebuilds them from the neighbouring stages.
        lent: logical rank -> data-parallel peer, for the ranks whose state is lost although their
            pipeline stage is not. These ranks have no source; they take the weights of the peer's live model.
        position_of: logical rank whose own snapshot gives all ranks the position of ``step``, and nothing else, because
            this replica has lost a part of the state: it fetches the whole state from another replica before its next
            step. No rank has a source then. None: the state is restored here.
        live: logical ranks whose models still have the weights of ``step``, unless stages are rebuilt or weights lent.
    """

    epoch: int
    step: int
    rebuild: list[str]
    defer: list[str]
    sources: dict[int, Source]
    copies: dict[int, list[int]] = field(default_factory=dict)
    rebuilt: dict[int, Neighbours] = field(default_factory=dict)
    lent: dict[int, int] = field(default_factory=dict)
    position_of: int | None = None
    live: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Resume(Message):
    """All workers are repaired and the invariants hold: continue training after ``step``."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Inspect(Message):
    """Every worker says what it is doing, for the search for the cause of a hang; its agent stores that.

    Attributes:
        number: number of the inspection in this run.
        why: why it is taken.
        seats: logical rank -> name of the worker that holds it.
    """

    number: int
    why: str
    seats: dict[int, str]


@dataclass(frozen=True)
class Kill(Message):
    """The agent of ``worker`` kills it with SIGKILL."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Spawn(Message):
    """The agent of ``node`` starts ``count`` workers without a logical rank (standbys)."""

    node: str
    count: int


@dataclass(frozen=True)
class Restart(Message):
    """Warm restart: all agents kill their workers and start new ones.

    Attributes:
        number: number of this warm restart, counted over the run.
        reason: why, for people.
        ranks: node -> logical ranks of the workers that its agent starts.
    """

    number: int
    reason: str
    ranks: dict[str, list[int]]


@dataclass(frozen=True)
class GivenUp(Message):
    """The control plane counts ``node`` as lost.

    An agent that receives this order about its own node ends its workers and joins again under another name.
    """

    node: str
    reason: str


@dataclass(frozen=True)
class Reach(Message):
    """Every agent connects to one other agent and reports ``PeerUnreached`` if it cannot.

    Attributes:
        peers: agent -> the agent to connect to.
        addresses: agent -> the address at which it accepts connections, as host:port.
    """

    peers: dict[str, str]
    addresses: dict[str, str]


@dataclass(frozen=True)
class Notice(Message):
    """A message for the user, which the agents that print messages about the run print."""

    message: str


@dataclass(frozen=True)
class Finish(Message):
    """All workers are done: the workers exit with code 0, then the agents exit with ``code``."""

    code: int = 0


@dataclass(frozen=True)
class Stop(Message):
    """The run ends: agents kill their workers and exit with ``code``. ``message`` is for the user."""

    code: int
    message: str


# --- on the wire ------------------------------------------------------------------------------------------------------

_KINDS = {kind.__name__: kind for kind in Message.__subclasses__()}


def encode(message: Any) -> str:
    """Return the message as one line of JSON, without a newline."""
    return json.dumps(to_values(message), separators=(",", ":"))


def to_values(message: Any) -> dict[str, Any]:
    """Return the message as a JSON object."""
    return {"kind": type(message).__name__, **to_json(message)}


def decode(text: str | bytes) -> Any:
    """Return the message that ``encode`` wrote as ``text``.

    Raises:
        BadMessage: ``text`` is not a valid message.
    """
    try:
        values = bounded_json.loads(text, non_finite=True)
    except (ValueError, TypeError, AttributeError) as error:  # what a message contains may be anything
        raise BadMessage(f"not a message ({type(error).__name__}: {error}): {str(text)[:200]!r}") from error
    return from_values(values)


def from_values(values: Any) -> Any:
    """Return the message of which ``to_values`` has made ``values``.

    Raises:
        BadMessage: ``values`` are not those of a valid message.
    """
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadMessage(f"not a message: {str(values)[:200]!r}")
    return from_json(_KINDS[kind], {name: value for name, value in values.items() if name != "kind"})
