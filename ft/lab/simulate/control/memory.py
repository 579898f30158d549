"""A worker's host memory: two buffers for each logical rank's snapshots, as ``ft.state.snapshot.buffers`` has them.

A state is a tuple (whose, step, history): ``history`` is a hash over every step that led to it and the epoch in which
that step was done, so that a state restored from a wrong place, or from an undone step, is known by its value.
"""

from dataclasses import dataclass, field
from typing import Any

EMPTY, STAGING, COMPLETE = range(3)


@dataclass(slots=True)
class Slot:
    """One buffer. ``value``: the states in it; ``damaged``: its checksums do not fit."""

    status: int = EMPTY
    step: int = -1
    epoch: int = -1
    value: Any = None
    damaged: bool = False


class PingPong:
    """Two slots that take turns; the rules of ``ft.state.snapshot.buffers.PingPong``."""

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
    """Own snapshots, and the copies held for others by owner's logical rank."""

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
        """(own steps, owner -> steps) as ``ft.job.messages.Holdings`` has them."""
        copies = {str(owner): steps for owner, pair in sorted(self.copies.items()) if (steps := pair.steps())}
        return self.own.steps(), copies
