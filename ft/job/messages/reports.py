"""Reports: messages from a worker to its node's agent, and from the agent to the control plane.

Terms: an epoch is a version of the map logical rank -> worker, and every process group belongs to one epoch. A seat is
one entry of that map. A joiner is a worker that is new to its seat.
"""

from dataclasses import dataclass, field
from typing import Any

from ft.faults.hang.look import Across
from ft.job.messages.values import Beat, GroupReport, Holdings, StepTimes
from ft.net.codec import Numbers

_MANY = 1_000_000
"""More workers, devices or nodes than any run has."""


@dataclass(frozen=True)
class AgentJoined:
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
        unusable: index of a device (as a string, because it is a JSON key) -> why no worker can use it.
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
    unusable: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    interfaces: dict[str, str] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    clock: float = 0.0

    def __post_init__(self):
        numbers = [self.node_rank, self.seats, self.standbys, self.devices]
        devices_are_numbers = all(device.isdecimal() and len(device) < 7 for device in self.unusable)
        if not all(0 <= number <= _MANY for number in numbers) or not devices_are_numbers:
            raise ValueError("an agent with impossible numbers of workers or devices")


@dataclass(frozen=True)
class PeerUnreached:
    """The agent of ``node`` cannot connect to the agent of ``peer`` at the address that this one advertises.

    ``problem`` is the error of the last attempt.
    """

    node: str
    peer: str
    address: str
    problem: str


@dataclass(frozen=True)
class NodeRefused:
    """An agent that cannot reach the control plane has left the message ``reason`` in the run's directory.

    ``node`` is the name of that agent; another agent has found the message.
    """

    node: str
    reason: str


@dataclass(frozen=True)
class AgentBeat:
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
class AgentLeaving:
    """The agent exits on purpose. ``signum`` is the signal that it received, or 0 if its work is done."""

    node: str
    signum: int


@dataclass(frozen=True)
class EndWanted:
    """The agent of ``node`` has received signal ``signum`` and has told its workers to save and end."""

    node: str
    signum: int


@dataclass(frozen=True)
class WorkerStarted:
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
class WorkerReady:
    """The worker has connected to its agent and waits for a seat. ``address`` is host:port of its snapshot server."""

    worker: str
    node: str
    address: str


@dataclass(frozen=True)
class WorkerExited:
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
class DeviceReleased:
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
class WorkerSilent:
    """The worker has sent no heartbeat for ``silent_s`` seconds.

    ``state`` is the state letter of its process in /proc (T: stopped, D: uninterruptible sleep, R: running, S:
    sleeping).
    """

    worker: str
    node: str
    silent_s: float
    state: str


@dataclass(frozen=True)
class WorkerFailed:
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
class WorkerSuspects:
    """A collective or point-to-point operation of process group ``group`` failed although the epoch is still open.

    Either a peer or the connection to the peer is gone; this worker cannot distinguish the two.
    """

    worker: str
    epoch: int
    group: str
    message: str


@dataclass(frozen=True)
class WorkerReleased:
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
class WorkerArrived:
    """A joiner has built model and optimizer for its seat in ``epoch``, and can be connected to the others."""

    worker: str
    epoch: int
    groups: list[GroupReport] = field(default_factory=list)


@dataclass(frozen=True)
class WorkerRepaired:
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
class WorkerResumed:
    """The worker begins the first step of ``epoch``. ``step`` is the last committed step."""

    worker: str
    epoch: int
    step: int


@dataclass(frozen=True)
class WorkerDone:
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
class Observed:
    """An event for the run's event file that needs no decision (``fault_injected``, a saved checkpoint, ...)."""

    event: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Looked:
    """What a worker does at the moment of a look, for its agent, which stores it and passes it on in a ``LookTaken``.

    Attributes:
        worker: name of the worker.
        number: number of the look.
        said: JSON values of a ``ft.faults.hang.look.Rank``.
        groups: name of each process group of the worker -> logical ranks of its members.
        across: name of each group of ranks of several replicas -> its members.
    """

    worker: str
    number: int
    said: dict[str, Any]
    groups: dict[str, Numbers]
    across: dict[str, Across] = field(default_factory=dict)


@dataclass(frozen=True)
class LookTaken:
    """What the workers of ``node`` do at the moment of look ``number``.

    ``said`` is the node's part of the look as it is stored (``ft.record.looks``), without the stacks of threads.
    """

    node: str
    number: int
    said: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HangCause:
    """A cause of a hang: the logical ranks at fault, its kind (``ft.faults.hang.causes.KINDS``), and why, as text."""

    ranks: list[int]
    kind: str
    why: str


@dataclass(frozen=True)
class HangJudged:
    """Report of the control plane to itself: what look ``number`` says of a hang.

    Attributes:
        number: number of the look.
        causes: the causes, the most certain first.
        waiting: logical ranks that wait for others.
    """

    number: int
    causes: list[HangCause] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LookWanted:
    """Somebody wants to know what all workers are doing.

    ``why`` says for what, as text.
    """

    why: str


@dataclass(frozen=True)
class PaceJudged:
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
class MasterChosen:
    """Address at which the training script's own process group has its rendezvous in warm restart ``number``.

    The agent of logical rank 0 chooses this address.
    """

    number: int
    host: str
    port: int


@dataclass(frozen=True)
class ControlBack:
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
