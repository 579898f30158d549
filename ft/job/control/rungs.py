"""The rungs of the recovery ladder, in order, what each can lose, and the limits of all that each can wait for.

A rung is a kind of recovery. A replica is a full copy of the model with its own workers; a seat is the place of a
worker that holds a logical rank; a standby is a warm worker without a seat. A snapshot is one rank's state at a
committed step in host memory; a peer copy is the copy of it in another worker's memory.
"""

from dataclasses import dataclass

IN_PLACE, STANDBY, COPY, REPLICA = "in place", "standby", "copy elsewhere", "another replica"
REORDER, CHECKFREE, CHECKPOINT, END = "reorder", "CheckFree", "checkpoint", "end"
LADDER = (IN_PLACE, STANDBY, COPY, REPLICA, REORDER, CHECKFREE, CHECKPOINT, END)
"""The rungs, from the one that is tried first.

- in place: every worker keeps its seat and its own snapshot; all repeat the interrupted step.
- standby: ready standbys take the seats of lost workers, with peer copies.
- copy elsewhere: a worker has to be started for a seat first, or one that kept its seat takes over a peer copy, because
  its own snapshot is unusable.
- another replica: the state of ranks comes from other replicas (hot-swap inside a replica); or, if the seats cannot be
  filled, the other replicas train on, and this one starts anew and fetches its state from them.
- reorder: as before, and the other groups compute this group's part of each batch (SPARe).
- CheckFree: a pipeline stage whose state is lost is rebuilt from others; a rank of a stage that is lost in part takes
  the weights of a data-parallel peer.
- checkpoint: all workers start anew from the newest verified checkpoint, or from the beginning if there is none.
- end: the run ends.
"""

EXACT, EVERY_SAMPLE, APPROXIMATE = "bit for bit", "every sample once", "approximate"
"""How the run continues: with the losses of a run without the fault; with every sample trained on once, but sums in
another order or batches of another size; with a state of which a part is an estimate.
"""
_EXACTNESS = (EXACT, EVERY_SAMPLE, APPROXIMATE)

_RELEASE, _JOIN, _START = ("control.drain_s",), ("control.assemble_s",), ("control.ready_s",)
_REPAIR = ("control.repair_s", "control.repair_s")  # restore the state, and begin the first step
_GO_ON = ("quorum.silent_s", "quorum.member_s")
_COME_BACK = ("quorum.minimum_s",)
_WARM_RESTART = ("control.join_s",)
TABLES = ("control", "quorum")
"""The tables of limits: ``ft.job.control.timeouts.Timeouts`` and ``ft.job.quorum.limits.Limits``."""


@dataclass(frozen=True)
class Lost:
    """What a recovery loses.

    Attributes:
        steps: committed steps that are repeated; None: not known, because the age of the checkpoint is not.
        exactness: EXACT, EVERY_SAMPLE or APPROXIMATE.
        samples: samples that are never trained on. The position in the data is part of every state that a rung
            restores, so no rung gives up samples.
        late: share of each batch that is trained on later, when the replica is back.
        starts_anew: whether all workers of the job start anew.
        ended: whether the run ends.
    """

    steps: int | None = 0
    exactness: str = EXACT
    samples: int = 0
    late: float = 0.0
    starts_anew: bool = False
    ended: bool = False

    def is_less_than(self, other: "Lost") -> bool:
        """Return whether this is not more than ``other`` in any respect, and less in at least one."""
        mine, its = self._amounts(), other._amounts()
        return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))

    def _amounts(self) -> tuple[float, ...]:
        steps = float("inf") if self.steps is None else float(self.steps)
        which = float(_EXACTNESS.index(self.exactness))
        return float(self.ended), float(self.starts_anew), float(self.samples), which, self.late, steps


def waits(seats: str) -> tuple[str, ...]:
    """Return the limits of a recovery in memory, one after the other.

    Args:
        seats: IN_PLACE if every worker keeps its seat, STANDBY if standbys are ready for all others, COPY if workers
            have to be started.

    Returns:
        Names as ``table.field``, where the table is one of ``TABLES``.
    """
    before = {IN_PLACE: (), STANDBY: _JOIN, COPY: (*_START, *_JOIN)}[seats]
    return (*_RELEASE, *before, *_REPAIR)


def waits_of_others(*, is_awaited: bool) -> tuple[str, ...]:
    """Return the limits of what the other replicas wait for when one leaves; ``is_awaited``: they are too few to train
    until it is back.
    """
    return (*_GO_ON, *_COME_BACK) if is_awaited else _GO_ON


def waits_of_restart() -> tuple[str, ...]:
    """Return the limits of a warm restart."""
    return _WARM_RESTART


def too_few(left: int, replicas: int, least: int) -> str:
    """Return why the ``left`` of ``replicas`` replicas are too few to train on, or "" if they are enough.

    Args:
        left: number of replicas that are left.
        replicas: number of replicas of the job.
        least: number of replicas that a step needs.
    """
    return f"{left} of {replicas} replicas are left, at least {least} must be" if left < least else ""
