"""Values inside messages."""

from dataclasses import dataclass, field


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
class Neighbours:
    """Whose blocks a lost stage is rebuilt from: logical ranks of the same place in the stage before and in the stage
    after, None where the pipeline ends (CheckFree)."""

    previous: int | None
    following: int | None

    @property
    def there(self) -> list[int]:
        """Those that there are, the previous one first."""
        return [rank for rank in (self.previous, self.following) if rank is not None]


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
