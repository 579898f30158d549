"""A worker's host memory: two buffers per logical rank's snapshots, as in ``ft.state.snapshot.buffers``.

A state is a tuple (owner, step, history). ``history`` is a hash over all steps that led to it, with the epoch of each,
so that a state restored from the wrong owner, or from a step that was rolled back, is recognized by its value.
"""

from dataclasses import dataclass, field
from typing import Any

EMPTY, STAGING, COMPLETE = range(3)


@dataclass(slots=True)
class Slot:
    """One buffer.

    Attributes:
        status: EMPTY, STAGING or COMPLETE.
        step: step of the snapshot.
        epoch: epoch in which it was taken.
        value: the states in it.
        damaged: its checksums do not match.
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
        slot = min(
            self.slots,
            key=lambda s: (not (own and s.step == step), s.status == COMPLETE, s.step <= step, s.step, s.epoch),
        )
        slot.status, slot.step, slot.epoch, slot.value, slot.damaged = STAGING, step, epoch, value, False
        return slot

    def drop_after(self, step: int) -> None:
        for slot in self.slots:
            if slot.status == COMPLETE and slot.step > step:
                slot.status = EMPTY

    def find(self, step: int) -> Slot | None:
        found = [s for s in self.slots if s.status == COMPLETE and s.step == step]
        return max(found, key=lambda s: s.epoch, default=None)

    def steps(self) -> list[int]:
        return sorted({slot.step for slot in self.slots if slot.status == COMPLETE})


@dataclass(slots=True)
class CopyStore:
    """A worker's own snapshots, and the copies it holds for other logical ranks, by owner."""

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
        """Return (own steps, owner -> steps), as in ``ft.job.messages.Holdings``."""
        copies = {str(owner): steps for owner, pair in sorted(self.copies.items()) if (steps := pair.steps())}
        return self.own.steps(), copies
