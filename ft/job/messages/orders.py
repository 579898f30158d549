"""Orders: messages from the control plane to the agents, and from an agent to its workers.

Terms: an epoch is a version of the map logical rank -> worker. A seat is one entry of that map. A joiner is a worker
that is new to its seat. A peer copy is the copy of a rank's snapshot that a data-parallel neighbour holds.
"""

from dataclasses import dataclass, field

from ft.job.messages.values import Neighbours, Seat, Source


@dataclass(frozen=True)
class Close:
    """Epoch ``epoch`` is over: its workers leave their communication operations and report ``WorkerReleased``."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Open:
    """A new epoch begins.

    Attributes:
        epoch: number of the epoch.
        seats: logical rank (as a string, because it is a JSON key) -> seat.
        joiners: logical ranks whose worker is new to its seat.
        fresh: no worker has state in memory, as at the start of the run: process groups connect at once, and the state
            comes from the checkpoint folder or from the random seed.
        fired: numbers of the injected faults that have happened.
        rendezvous_address: host:port of the store that this epoch's process groups use for their rendezvous; one of the
            nodes of this epoch's workers hosts it.
    """

    epoch: int
    seats: dict[str, Seat]
    joiners: list[int]
    fresh: bool
    fired: list[int] = field(default_factory=list)
    rendezvous_address: str = ""


@dataclass(frozen=True)
class Repair:
    """All workers have left the old epoch and all joiners are built: rebuild the groups, restore the state of ``step``.

    A worker answers with ``WorkerRepaired``.

    Attributes:
        epoch: the new epoch.
        step: step whose state is restored.
        rebuild: names of the process groups to rebuild now.
        defer: names of the process groups to rebuild afterwards in the background; their first use waits for that.
            All other groups are kept.
        sources: logical rank (as a string) -> where its state comes from.
        copies: logical rank (as a string) -> logical ranks that its peer copies have been sent to until now.
        rebuilt: logical rank (as a string) -> neighbours, for the ranks of pipeline stages whose state is lost. These
            ranks have no source; CheckFree (section 4.2) rebuilds them from the neighbouring stages.
        lent: logical rank (as a string) -> data-parallel peer, for the ranks whose state is lost although their
            pipeline stage is not. These ranks have no source; they take the weights of the peer's live model.
        teller: logical rank whose own snapshot gives all ranks the position of ``step``, and nothing else, because
            this replica has lost a part of the state: it fetches the whole state from another replica before its next
            step. No rank has a source then. None: the state is restored here.
    """

    epoch: int
    step: int
    rebuild: list[str]
    defer: list[str]
    sources: dict[str, Source]
    copies: dict[str, list[int]] = field(default_factory=dict)
    rebuilt: dict[str, Neighbours] = field(default_factory=dict)
    lent: dict[str, int] = field(default_factory=dict)
    teller: int | None = None


@dataclass(frozen=True)
class Resume:
    """All workers are repaired and the invariants hold: continue training after ``step``."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Look:
    """Every worker says what it is doing, for the search for the cause of a hang; its agent stores that.

    Attributes:
        number: number of the look in this run.
        why: why it is taken.
        seats: logical rank (as a string) -> name of the worker that holds it.
    """

    number: int
    why: str
    seats: dict[str, str]


@dataclass(frozen=True)
class Kill:
    """The agent of ``worker`` kills it with SIGKILL."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Spawn:
    """The agent of ``node`` starts ``count`` workers without a logical rank (standbys)."""

    node: str
    count: int


@dataclass(frozen=True)
class Restart:
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
class GivenUp:
    """The control plane counts ``node`` as lost.

    An agent that receives this order about its own node ends its workers and joins again under another name.
    """

    node: str
    reason: str


@dataclass(frozen=True)
class Master:
    """The content of ``MasterChosen``, sent on to all agents."""

    number: int
    host: str
    port: int


@dataclass(frozen=True)
class Reach:
    """Every agent connects to one other agent and reports ``PeerUnreached`` if it cannot.

    Attributes:
        peers: agent -> the agent to connect to.
        addresses: agent -> the address at which it accepts connections, as host:port.
    """

    peers: dict[str, str]
    addresses: dict[str, str]


@dataclass(frozen=True)
class Notice:
    """A message for the user, which the agents that print messages about the run print."""

    message: str


@dataclass(frozen=True)
class Finish:
    """All workers are done: the workers exit with code 0, then the agents exit with ``code``."""

    code: int = 0


@dataclass(frozen=True)
class Stop:
    """The run ends: agents kill their workers and exit with ``code``. ``message`` is for the user."""

    code: int
    message: str
