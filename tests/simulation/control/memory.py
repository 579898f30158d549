"""Snapshots in the host memory of a simulated worker (after ``ft.state.snapshot.buffers``).

A snapshot is a logical rank's training state at a committed step. A worker keeps its own snapshots and copies of other
ranks' snapshots, in two alternating buffers for each rank. An epoch is a version of the map from ranks to workers.

A state is modelled as a tuple (owner, step, history). ``owner`` is the logical rank or the part of the model that the
state belongs to. ``history`` is a hash over all steps that led to the state, with the epoch of each step, so that a
state restored from the wrong owner, or from a step that was rolled back, is recognized by its value.
"""

from dataclasses import dataclass, field
from typing import Any

EMPTY, STAGING, COMPLETE = range(3)


@dataclass(slots=True)
class Slot:
    """One buffer for one snapshot.

    Attributes:
        status: EMPTY, STAGING (being written) or COMPLETE.
        step: step of the snapshot.
        epoch: epoch in which the snapshot was taken.
        value: the states in the snapshot: (state of this rank alone, state replicated over data-parallel ranks).
        damaged: True if the checksums of the snapshot do not match.
    """

    status: int = EMPTY
    step: int = -1
    epoch: int = -1
    value: Any = None
    damaged: bool = False


class PingPong:
    """Two buffers used alternately, by the rules of ``ft.state.snapshot.buffers.PingPong``."""

    def __init__(self):
        self.slots = [Slot(), Slot()]

    def begin(self, step: int, epoch: int, value: Any, own: bool = False) -> Slot:
        """Return a buffer for a new snapshot, in status STAGING.

        Args:
            step: step of the snapshot.
            epoch: epoch in which the snapshot is taken.
            value: states of the snapshot.
            own: whether to overwrite the buffer that already has a snapshot of this step.
        """
        slot = min(
            self.slots,
            key=lambda s: (not (own and s.step == step), s.status == COMPLETE, s.step <= step, s.step, s.epoch),
        )
        slot.status, slot.step, slot.epoch, slot.value, slot.damaged = STAGING, step, epoch, value, False
        return slot

    def drop_after(self, step: int) -> None:
        """Drop the complete snapshots of steps after ``step``, which are rolled back."""
        for slot in self.slots:
            if slot.status == COMPLETE and slot.step > step:
                slot.status = EMPTY

    def find(self, step: int) -> Slot | None:
        """Return the complete snapshot of ``step`` from the latest epoch, None if there is none."""
        found = [s for s in self.slots if s.status == COMPLETE and s.step == step]
        return max(found, key=lambda s: s.epoch, default=None)

    def steps(self) -> list[int]:
        return sorted({slot.step for slot in self.slots if slot.status == COMPLETE})


@dataclass(slots=True)
class CopyStore:
    """A worker's own snapshots, and the copies that the worker holds for other logical ranks.

    Attributes:
        own: the worker's own snapshots.
        copies: logical rank -> copies of that rank's snapshots.
    """

    own: PingPong = field(default_factory=PingPong)
    copies: dict[int, PingPong] = field(default_factory=dict)

    def of(self, owner: int) -> PingPong:
        if owner not in self.copies:
            self.copies[owner] = PingPong()
        return self.copies[owner]

    def drop_after(self, step: int) -> None:
        self.own.drop_after(step)
        for held in self.copies.values():
            held.drop_after(step)

    def held(self) -> tuple[list[int], dict[str, list[int]]]:
        """Return (steps of own snapshots, rank -> steps of its copies), as in ``ft.job.messages.Holdings``."""
        copies = {owner: steps for owner, pair in sorted(self.copies.items()) if (steps := pair.steps())}
        return self.own.steps(), copies
