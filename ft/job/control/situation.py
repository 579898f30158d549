"""The situation after a fault: all that the recovery ladder (:mod:`ft.job.control.ladder`) decides on.

A job without replicas of the model has one replica. Each replica has its own control plane, so a situation is that of
one damaged replica, "this replica", beside the others. If several are damaged, each has a situation of its own.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ft.job.control.recovery_plan import Memory, Stages
from ft.job.control.rungs import COPY, EVERY_SAMPLE, IN_PLACE, STANDBY, Lost
from ft.job.messages import Holdings

Snapshot = tuple[int, int, int]
"""(logical rank whose worker holds it, logical rank whose state it is, step)."""


@dataclass(frozen=True)
class Seats:
    """The seats of this replica.

    Attributes:
        vacant: logical ranks whose worker is lost.
        standbys: number of standbys that are ready and have a device.
        room: number of further workers that nodes have room for.
    """

    vacant: Collection[int] = ()
    standbys: int = 0
    room: int = 0

    @property
    def rung(self) -> str | None:
        """Return the first rung that fills all seats, or None if they cannot be filled."""
        if not self.vacant:
            return IN_PLACE
        if len(self.vacant) <= self.standbys:
            return STANDBY
        return COPY if len(self.vacant) <= self.standbys + self.room else None


@dataclass(frozen=True)
class Others:
    """The other replicas.

    Attributes:
        replicas: number of replicas of the job, with this one.
        least: number of replicas that a step needs.
        whole: numbers of the other replicas that can train on now, at the newest committed step.
        holdings: number of another replica, the nearest first -> logical rank -> steps of whose state that replica has
            a verified source.
        reorders: whether the others compute a lost replica's part of the batch (SPARe).
        unhosted: with ``reorders``, the shard types that no replica hosts any more. Whoever is free computes them.
        are_unknown: whether nothing but ``replicas`` is known here. The quorum server knows the others; it has a
            replica without a state fetch that of another one, or the newest checkpoint if none has a state.
    """

    replicas: int = 1
    least: int = 1
    whole: Collection[int] = ()
    holdings: Mapping[int, Mapping[int, Collection[int]]] = field(default_factory=dict)
    reorders: bool = False
    unhosted: Collection[int] = ()
    are_unknown: bool = False

    @property
    def lost_without_this(self) -> Lost:
        """Return what is lost if the others train on without this replica: if nobody computes its part of the batches,
        these samples are trained on later.
        """
        return Lost(exactness=EVERY_SAMPLE, late=0.0 if self.reorders else 1.0 / self.replicas)


@dataclass(frozen=True)
class Restarts:
    """Warm restarts, in which all workers start anew.

    Attributes:
        allowed: number of them that the user allows.
        used: number of them so far.
        workers: number of workers of this replica.
        has_room: whether the nodes that are left have room for them.
        checkpoints: steps of the verified checkpoints; None: only the worker that loads one knows.
    """

    allowed: int = 3
    used: int = 0
    workers: int = 1
    has_room: bool = True
    checkpoints: Collection[int] | None = None

    @property
    def against(self) -> str:
        """Return why there can be no warm restart, or ""."""
        if self.used >= self.allowed:
            return f"{self.allowed} warm restart(s) are allowed and used up"
        return "" if self.has_room else f"the nodes that are left cannot hold {self.workers} workers"

    def steps_since(self, step: int) -> int | None:
        """Return how many steps a run has to repeat to be at ``step`` again, or None if that is not known."""
        if self.checkpoints is None:
            return None
        return step - max((saved for saved in self.checkpoints if saved <= step), default=0)


@dataclass(frozen=True)
class Situation:
    """The situation of one damaged replica.

    Attributes:
        step: the newest committed step.
        memory: the snapshots in the memory of this replica's live workers.
        stages: its pipeline stages, and whether CheckFree may rebuild them.
        seats: its seats.
        others: the other replicas.
        restarts: warm restarts.
        hot_swap: whether workers are replaced, and states restored from memory, while the others live on.
        barred: why nothing in this replica's memory may be used, such as an error of the program; "": it may be used.
        unverified: snapshots that were found wrong, or are not checked.
    """

    step: int
    memory: Memory
    stages: Stages = field(default_factory=Stages)
    seats: Seats = field(default_factory=Seats)
    others: Others = field(default_factory=Others)
    restarts: Restarts = field(default_factory=Restarts)
    hot_swap: bool = True
    barred: str = ""
    unverified: Collection[Snapshot] = ()

    def verified(self) -> Memory:
        """Return the memory without the snapshots that are not verified."""
        if not self.unverified:
            return self.memory
        kept = {}
        for holder, held in self.memory.holdings.items():
            own = [step for step in held.own if (holder, holder, step) not in self.unverified]
            copies = {
                owner: [step for step in steps if (holder, owner, step) not in self.unverified]
                for owner, steps in held.copies.items()
            }
            kept[holder] = Holdings(own, copies, held.live if held.live in own else None)
        return replace(self.memory, holdings=kept)
