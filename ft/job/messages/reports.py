"""Reports: worker -> agent -> control plane."""

from dataclasses import dataclass, field
from typing import Any

from ft.job.messages.values import Beat, GroupReport, Holdings


@dataclass(frozen=True)
class AgentJoined:
    """An agent is there. ``seats``: training workers it runs (0: a standby node); ``standbys``: beyond those.

    ``meeting``: host:port of the store it hosts, for process groups to meet in. ``domains``: kind -> name of the
    failure domains of its node (``ft run --topology``).
    """

    node: str
    node_rank: int
    host: str
    seats: int
    standbys: int
    meeting: str = ""
    domains: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentBeat:
    """The agent lives; ``workers`` is what it last heard of each of its workers."""

    node: str
    workers: dict[str, Beat] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentLeaving:
    """The agent ends on purpose: ``signum`` it received (0: its work is done)."""

    node: str
    signum: int


@dataclass(frozen=True)
class WorkerStarted:
    """A process exists. ``rank``: the logical rank it is meant for, None for a standby. ``restart``: number of the warm
    restart that had it started (0: the run's start), None if that is not known."""

    worker: str
    node: str
    pid: int
    rank: int | None
    restart: int | None = None


@dataclass(frozen=True)
class WorkerReady:
    """The worker has attached and waits for a seat. ``address``: host:port of its snapshot server."""

    worker: str
    node: str
    address: str


@dataclass(frozen=True)
class WorkerExited:
    """A process has ended: ``code`` >= 0 as it exited, or -N: killed by signal N. ``attached``: it ever was ready."""

    worker: str
    node: str
    code: int
    attached: bool


@dataclass(frozen=True)
class WorkerSilent:
    """No beat for ``silent_s``. ``state``: the process's letter in /proc (T: stopped, D: in the kernel, R, S)."""

    worker: str
    node: str
    silent_s: float
    state: str


@dataclass(frozen=True)
class WorkerFailed:
    """The worker caught an exception of its own and waits for orders.

    ``kinds``: names of the exception's class and its bases, most special first (what classification goes by).
    """

    worker: str
    epoch: int
    step: int
    kinds: list[str]
    message: str
    trace: str = ""


@dataclass(frozen=True)
class WorkerSuspects:
    """A group operation failed here although the epoch is open: a peer or the connection to it is gone."""

    worker: str
    epoch: int
    group: str
    message: str


@dataclass(frozen=True)
class WorkerReleased:
    """The worker has left ``epoch`` (closed): it is in no group operation and starts none."""

    worker: str
    epoch: int
    step: int
    groups: list[GroupReport] = field(default_factory=list)
    holdings: Holdings = field(default_factory=Holdings)


@dataclass(frozen=True)
class WorkerArrived:
    """A joiner has assembled itself for its seat in ``epoch`` and can be connected."""

    worker: str
    epoch: int
    groups: list[GroupReport] = field(default_factory=list)


@dataclass(frozen=True)
class WorkerRepaired:
    """Groups are rebuilt and state is restored.

    Attributes:
        rank: the logical rank it now holds. topology: digest over the seats and all groups it is in the view of (I1).
        shards: digests-free names of the logical shards it owns (I2). step: of its state (I4).
        rebuilt, kept, deferred: groups. sources: how owned and replicated state came ("own", "copy:RANK", "peer:RANK").
        rebuild_s, restore_s: how long both took here.
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
    """The first step of ``epoch`` begins here; ``step`` is the last committed one."""

    worker: str
    epoch: int
    step: int


@dataclass(frozen=True)
class WorkerDone:
    """The worker has done all its work and waits for the others before it exits."""

    worker: str
    epoch: int
    step: int


@dataclass(frozen=True)
class Observed:
    """An event for the run's event file that asks for no decision (``fault_injected``, checkpoint saved, ...)."""

    event: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MasterChosen:
    """Where a script's own process group meets in warm restart ``number``: chosen by the agent of logical rank 0."""

    number: int
    host: str
    port: int


@dataclass(frozen=True)
class ControlBack:
    """The control plane says to itself: another one, whose journal this is, has ended; it goes on under ``term``.

    ``node``: beside whose agent.
    """

    term: int
    node: str
