"""Align executed operators with those of a DMR plan.

DMR (dual modular redundancy, SpareTrain) looks up in the plan how an executed operator is to be verified. The operators
of a *unit* (one phase of one microbatch on one model chunk) may differ from the profiled ones: experts without tokens
are left out, and a mask that already exists is not created again.
"""

from collections.abc import Sequence

_SURE = 3
"""After a deviation: number of consecutive operators whose names must match the plan until the position is known."""

_REACH = 256
"""After a deviation: maximum distance from the expected position in the plan at which a match is looked for."""


class OperatorAligner:
    """Aligns the operators that are executed in one unit with its planned operators.

    Args:
        names: names of the planned operators of the unit, in order.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._ahead = 0
        self._strange: list[str] = []

    def find(self, index: int, operator: str) -> int | None:
        """Return the position in the plan of the operator that is executed as number ``index`` of the unit. Has to be
        called for each operator, in order.

        Returns:
            The position; None if the plan does not contain the operator, or if after a deviation it is not known yet
                where in the plan the execution continues.
        """
        if index == 0:
            self._ahead, self._strange = 0, []
        expected = index + self._ahead
        if not self._strange and expected < len(self._names) and self._names[expected] == operator:
            return expected
        self._strange = [*self._strange, operator][-_SURE:]
        if len(self._strange) < _SURE:
            return None
        place = self._nearest(expected)
        if place is not None:
            self._ahead, self._strange = place - index, []
        return place

    def _nearest(self, expected: int) -> int | None:
        """Return the position in the plan of the last _SURE executed operators, as near as possible to ``expected``;
        None if they are not found."""
        for far in range(_REACH):
            for place in (expected + far, expected - far):
                first = place - _SURE + 1
                if first >= 0 and list(self._names[first : place + 1]) == self._strange:
                    return place
        return None
