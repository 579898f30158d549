"""Values that are fields of several messages: reports on process groups, snapshots, seats and heartbeats.

A seat is one entry of the map logical rank -> worker of an epoch (one version of that map).
"""

from dataclasses import dataclass, field

from ft.net.codec import Numbers

ELSEWHERE = "another replica"
"""Source of the state of a worker whose replica fetches the whole state from another one before its next step."""


@dataclass(frozen=True)
class GroupReport:
    """The data that one worker has about one process group when an epoch ends.

    Attributes:
        name: name of the group, the same on all members.
        ranks: logical ranks of the members, in group order.
        used: whether this worker has ever started an operation on the group.
        in_flight: whether an operation that this worker had started was unfinished when the epoch was closed.
        collectives: number of collectives that this worker has started since the group was built.
        sent: logical rank of the receiver -> number of sends that this worker has started since then.
        received: logical rank of the sender -> number of receives that this worker has started since then.
    """

    name: str
    ranks: Numbers
    used: bool
    in_flight: bool
    collectives: int
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Holdings:
    """The complete snapshots (state of a rank at a committed step) in one worker's host memory.

    Attributes:
        own: steps of the worker's own snapshots.
        copies: logical rank of the owner (as a string, because it is a JSON key) -> steps of the peer copies that the
            worker holds for that rank.
        live: committed step of which the model itself still has the weights, or None if a step that began since may
            have changed them.
    """

    own: list[int] = field(default_factory=list)
    copies: dict[str, list[int]] = field(default_factory=dict)
    live: int | None = None


@dataclass(frozen=True)
class Seat:
    """The worker that holds a logical rank in an epoch.

    Attributes:
        worker: name of the worker.
        node: name of its agent.
        address: host:port of its snapshot server.
        local_rank: index of its device on the node.
        domains: kind (rack, switch, ...) -> name of each failure domain of the node, as its agent reported them.
    """

    worker: str
    node: str
    address: str
    local_rank: int
    domains: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """The ranks from which a logical rank gets its state of the restored step.

    Attributes:
        owned: logical rank whose worker holds the optimizer shard: the rank itself (own snapshot) or the holder of a
            peer copy.
        replicated: logical rank whose worker has the replicated state in its snapshot: the rank itself or a
            data-parallel peer.
    """

    owned: int
    replicated: int


@dataclass(frozen=True)
class Neighbours:
    """The ranks whose transformer blocks a lost pipeline stage is rebuilt from (CheckFree, section 4.2).

    Attributes:
        previous: logical rank at the same position of the previous stage, or None if there is no previous stage.
        following: logical rank at the same position of the next stage, or None if there is no next stage.
    """

    previous: int | None
    following: int | None

    @property
    def there(self) -> list[int]:
        """Return the logical ranks of the neighbours that exist, the previous one first."""
        return [rank for rank in (self.previous, self.following) if rank is not None]


ASIDE = ("evaluate", "save")
"""Places of a worker that works on something that may take longer than a step (``Beat.where``)."""


@dataclass(frozen=True)
class Beat:
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


@dataclass(frozen=True)
class StepTimes:
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
