"""What a rank of a model replica holds: its state after some steps, by what it says and by what it is.

``chain`` stands for parameters and optimizer state: a hash over every step that led to it and whose samples were in its
gradient. Two states are equal if, and only if, their chains are.
"""

from dataclasses import dataclass

Contribution = tuple[int, int]
"""(replica, number of its stream's block of samples)."""


@dataclass(frozen=True)
class Held:
    """``step``: committed ones; ``lineage``: number of the quorum that committed the last; ``positions``: blocks of
    each replica's stream that were consumed."""

    step: int
    lineage: int
    chain: int
    positions: tuple[int, ...] = ()

    @property
    def name(self) -> tuple[int, int]:
        return (self.step, self.lineage)


NOTHING = Held(0, -1, 0)


def first(replicas: int) -> Held:
    """What everybody who loads no checkpoint begins with."""
    return Held(0, 0, 1, (0,) * replicas)


def after(held: Held, number: int, contributions: tuple[Contribution, ...], healthy: tuple[int, ...]) -> Held:
    """The state after one more step, committed in quorum ``number``."""
    positions = list(held.positions)
    for replica in healthy:
        positions[replica] += 1
    return Held(held.step + 1, number, hash((held.chain, contributions)), tuple(positions))


def spoiled(held: Held, by: int) -> Held:
    """Overwritten in part, and still under its old name."""
    return Held(held.step, held.lineage, hash((held.chain, -7, by)), held.positions)
