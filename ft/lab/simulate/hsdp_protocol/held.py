"""The state that a model rank holds: the name under which it is known, and its actual content.

``chain`` stands for parameters and optimizer state: a hash over all steps that led to it, with the samples in the
gradient of each. Two states are equal if and only if their chains are.
"""

from dataclasses import dataclass

Contribution = tuple[int, int]
"""(replica, index of the block of samples in its stream)."""


@dataclass(frozen=True)
class Held:
    """A state.

    Attributes:
        step: number of committed steps.
        lineage: number of the quorum that committed the last step.
        chain: hash that stands for the content.
        positions: number of consumed blocks of each replica's stream.
    """

    step: int
    lineage: int
    chain: int
    positions: tuple[int, ...] = ()

    @property
    def name(self) -> tuple[int, int]:
        return (self.step, self.lineage)


NOTHING = Held(0, -1, 0)


def first(replicas: int) -> Held:
    """Return the initial state of a run that loads no checkpoint."""
    return Held(0, 0, 1, (0,) * replicas)


def after(held: Held, number: int, contributions: tuple[Contribution, ...], healthy: tuple[int, ...]) -> Held:
    """Return the state after one more step, committed in quorum ``number``."""
    positions = list(held.positions)
    for replica in healthy:
        positions[replica] += 1
    return Held(held.step + 1, number, hash((held.chain, contributions)), tuple(positions))


def spoiled(held: Held, by: int) -> Held:
    """Return a partly overwritten state that still has its old name."""
    return Held(held.step, held.lineage, hash((held.chain, -7, by)), held.positions)
