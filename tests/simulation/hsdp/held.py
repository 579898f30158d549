"""Model of the training state of a rank: its name in the protocol, and its content.

The name is (step, lineage); the lineage is the number of the quorum that committed the last step. The content,
parameters and optimizer state, is represented by ``chain``: a hash over all steps that led to the state, with the
samples in the gradient of each step. Two states have equal content if and only if their chains are equal.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.hsdp.shape import Shape

Contribution = tuple[int, int]
"""What a replica adds to a gradient: (replica, index of the block of samples in the replica's data stream)."""


@dataclass(frozen=True)
class Held:
    """The training state of a rank.

    Attributes:
        step: number of committed steps.
        lineage: number of the quorum that committed the last step, -1 if there is no state.
        chain: hash that represents the content.
        positions: number of consumed sample blocks of each replica's data stream.
    """

    step: int
    lineage: int
    chain: int
    positions: tuple[int, ...] = ()

    @property
    def name(self) -> tuple[int, int]:
        """Return (step, lineage), by which the protocol identifies the state."""
        return (self.step, self.lineage)


NOTHING = Held(0, -1, 0)
"""The state of a rank that has neither initialized nor loaded nor fetched a state."""


def first(shape: "Shape") -> Held:
    """Return the initial state of a run: a new one, or the checkpoint of an earlier run."""
    return Held(*shape.begins_at, 1, (0,) * shape.replicas)


def after(held: Held, contributions: tuple[Contribution, ...]) -> int:
    """Return the content of the state after an update with the gradient of ``contributions``."""
    return hash((held.chain, contributions))


def spoiled(held: Held, by: int) -> Held:
    """Return a partly overwritten state that still has its old name; ``by`` distinguishes different overwrites."""
    return Held(held.step, held.lineage, hash((held.chain, -7, by)), held.positions)
