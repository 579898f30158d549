"""Parts of messages: a worker's place, its process groups, the training state that it holds, and causes of a hang."""

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
    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Holdings:
    """The complete snapshots (state of a rank at a committed step) in one worker's host memory.

    Attributes:
        own: steps of the worker's own snapshots.
        copies: logical rank of the owner -> steps of the peer copies that the worker holds for that rank.
        whole: the same, of those that also have the state that the owner shares with its data-parallel peers: they
            were the own snapshots of a worker that has ended.
        live: committed step of which the model itself still has the weights, or None if a step that began since may
            have changed them.
    """

    own: list[int] = field(default_factory=list)
    copies: dict[int, list[int]] = field(default_factory=dict)
    live: int | None = None
    whole: dict[int, list[int]] = field(default_factory=dict)


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
        whose: logical rank whose snapshot that worker has, None if it is the worker's own.
    """

    owned: int
    replicated: int
    whose: int | None = None


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


@dataclass(frozen=True)
class HangCause:
    """A cause of a hang: the logical ranks at fault, its kind (``ft.faults.hang.causes.KINDS``), and why, as text."""

    ranks: list[int]
    kind: str
    why: str
