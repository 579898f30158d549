"""What workers, agents and the control plane tell each other: reports go up, orders come down.

Every message is a frozen dataclass of JSON values; ``encode`` and ``decode`` are the only way onto and off a wire.
``node`` names an agent (``"n0"``), ``worker`` a worker (``"n0.w3"``: the fourth process that agent started),
``rank`` a logical rank. Times are seconds.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ft.errors import FtError


class BadMessage(FtError):
    """Bytes that are no message: not JSON, of an unknown kind, or with other fields than that kind has."""


# --- values inside messages ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupReport:
    """What one worker knows of one process group when its epoch ends.

    Attributes:
        name: the same on all members.
        ranks: logical ranks of the members, in group order.
        used: some operation was ever started on it here.
        in_flight: an operation had been started here and not ended when the epoch was closed.
        collectives: collective operations started here since the group was built.
        sent, received: point-to-point operations started here since then, by the other member's logical rank.
    """

    name: str
    ranks: list[int]
    used: bool
    in_flight: bool
    collectives: int
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Holdings:
    """The complete snapshots in one worker's host memory.

    Attributes:
        own: steps of its own snapshots.
        copies: owner's logical rank (as a string: a JSON key) -> steps of the peer copies held for it.
    """

    own: list[int] = field(default_factory=list)
    copies: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Seat:
    """Who holds a logical rank in an epoch.

    ``address``: host:port where its snapshots can be fetched; ``local_rank``: its device on its node. ``domains``:
    kind -> name of the failure domains its node is in (rack, switch, ...), as its agent said.
    """

    worker: str
    node: str
    address: str
    local_rank: int
    domains: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Where a logical rank's state of the restore step comes from.

    Attributes:
        owned: logical rank of the worker that holds the optimizer shard: the rank itself (own snapshot) or a peer.
        replicated: logical rank of the worker whose own snapshot has the replicated state: itself or a DP peer.
    """

    owned: int
    replicated: int


@dataclass(frozen=True)
class Beat:
    """What a worker is at. ``doing``: "compute", "wait" (in a group operation), "aside" (evaluation, save),
    "idle" (standby, or awaiting orders).

    ``since_s``: for how long. ``step_s``: median step time so far, None before there is one. ``lag``: steps between the
    committed step and the newest snapshot that all peers hold.
    """

    age_s: float
    epoch: int
    step: int
    doing: str
    since_s: float
    where: str = ""
    step_s: float | None = None
    lag: int = 0


# --- reports: worker -> agent -> control plane -----------------------------------------------------------------------


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


# --- orders: control plane -> agents -> workers ----------------------------------------------------------------------


@dataclass(frozen=True)
class Close:
    """``epoch`` is over: every worker in it leaves its operations and reports ``WorkerReleased``."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Open:
    """A new epoch with its map logical rank (as a string) -> seat.

    ``joiners``: logical ranks whose worker is new to its seat. ``fresh``: all are, and no state is in memory: groups
    connect at once and state comes from the checkpoint folder or the seed.
    ``fired``: numbers of the injected faults that have happened. ``meeting``: host:port of the store in which the
    groups of this epoch meet, on the node of one of its workers.
    """

    epoch: int
    seats: dict[str, Seat]
    joiners: list[int]
    fresh: bool
    fired: list[int] = field(default_factory=list)
    meeting: str = ""


@dataclass(frozen=True)
class Repair:
    """All have left the old epoch and every joiner has arrived: rebuild, restore ``step``, report ``WorkerRepaired``.

    ``rebuild``: names of the groups to build anew now. ``defer``: to be built when first used. All others are kept.
    ``copies``: owner's logical rank -> logical ranks that its peer copies went to up to now.
    """

    epoch: int
    step: int
    rebuild: list[str]
    defer: list[str]
    sources: dict[str, Source]
    copies: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Resume:
    """All are repaired and the invariants hold: go on after ``step``."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Kill:
    """The agent kills a worker (SIGKILL)."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Spawn:
    """The agent of ``node`` starts workers without a logical rank."""

    node: str
    count: int


@dataclass(frozen=True)
class Restart:
    """Warm restart: agents kill every worker and start new ones; ``number`` counts them. ``seats``: node -> ranks."""

    number: int
    reason: str
    ranks: dict[str, list[int]]


@dataclass(frozen=True)
class GivenUp:
    """``node`` counts as lost. If its agent hears that, it ends its workers, and comes back as another node."""

    node: str
    reason: str


@dataclass(frozen=True)
class Master:
    """What ``MasterChosen`` said, for all agents."""

    number: int
    host: str
    port: int


@dataclass(frozen=True)
class Finish:
    """All workers are done: they exit with 0, then the agents do."""


@dataclass(frozen=True)
class Stop:
    """The run ends: agents kill their workers and exit with ``code``; ``message`` is for the user."""

    code: int
    message: str


REPORTS = (
    *(AgentJoined, AgentBeat, AgentLeaving, WorkerStarted, WorkerReady, WorkerExited, WorkerSilent, WorkerFailed),
    *(WorkerSuspects, WorkerReleased, WorkerArrived, WorkerRepaired, WorkerResumed, WorkerDone, Observed, Beat),
    *(MasterChosen, ControlBack),
)
ORDERS = (Close, Open, Repair, Resume, Kill, Spawn, Restart, GivenUp, Master, Finish, Stop)
_KINDS = {kind.__name__: kind for kind in (*REPORTS, *ORDERS)}
_NESTED = {
    ("WorkerReleased", "groups"): [GroupReport],
    ("WorkerArrived", "groups"): [GroupReport],
    ("WorkerReleased", "holdings"): Holdings,
    ("AgentBeat", "workers"): {"": Beat},
    ("Open", "seats"): {"": Seat},
    ("Repair", "sources"): {"": Source},
}


def encode(message: Any) -> str:
    """One line of JSON, without its newline."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}, separators=(",", ":"))


def decode(text: str | bytes) -> Any:
    """The message that ``encode`` made.

    Raises:
        BadMessage: it is none.
    """
    try:
        values = json.loads(text)
        name = values.pop("kind")
        kind = _KINDS[name]
        known = {f.name for f in fields(kind)}
        if not values.keys() <= known:
            raise BadMessage(f"{name} has no field {sorted(values.keys() - known)}")
        return kind(**{key: _inflate(_NESTED.get((name, key)), value) for key, value in values.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadMessage(f"not a message ({type(error).__name__}: {error}): {text[:200]!r}") from error


def _inflate(shape: Any, value: Any) -> Any:
    if shape is None:
        return value
    if isinstance(shape, list):
        return [shape[0](**item) for item in value]
    if isinstance(shape, dict):
        return {key: shape[""](**item) for key, item in value.items()}
    return shape(**value)
