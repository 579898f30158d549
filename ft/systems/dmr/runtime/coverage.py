"""How many of a step's operators DMR (SpareTrain) has verified, and whether it has become fewer."""

from collections.abc import Mapping

from ft.systems.dmr.plan.assign import SETS, UNCHECKED
from ft.systems.dmr.runtime.opaque import OPAQUE

UNVERIFIED = "unverified"
PARTS = 1_000_000
_TOLERANCE = PARTS // 1000
"""A change by less than a thousandth is not told: operators differ a little from step to step, as with experts."""


def missing(counts: Mapping[str, int]) -> int:
    """Return the share of the executed operators that nothing verifies, in millionths.

    Args:
        counts: way of verification -> number of operators (``engine.Engine.coverage``).
    """
    executed = sum(counts.get(name, 0) for name in (*SETS, OPAQUE))
    left_out = counts.get(UNCHECKED, 0) + counts.get(UNVERIFIED, 0)
    return min(PARTS, round(PARTS * left_out / executed)) if executed else 0


class Coverage:
    """The coverage of steps, one after the other.

    Attributes:
        share: share of the last step's operators that were verified, on the rank with the least; 1.0 before the first.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._told: float | None = None

    def note(self, missing: int) -> float | None:
        """Note the coverage of a step.

        Args:
            missing: millionths of the operators that nothing verifies, on the rank with the most.

        Returns:
            The coverage that was usual before if this one is lower, otherwise None. A fall is told once.
        """
        self.share = 1.0 - missing / PARTS
        before, has_moved = self._told, self._told is None or abs(self.share - self._told) * PARTS >= _TOLERANCE
        if has_moved:
            self._told = self.share
        return before if has_moved and before is not None and self.share < before else None
