"""Align executed operators with planned ones, in units that do not always execute the same operators: experts without
tokens are left out, and a mask that was made before is not made again."""

from collections.abc import Sequence

_SURE = 3
"""Number of consecutive operators whose names must match the plan before they are taken for the planned ones."""

_REACH = 256
"""Number of operators by which an execution may be behind the plan or ahead of it."""


class Abreast:
    """Aligns the operators that are executed in one unit with its planned operators.

    Args:
        names: names of the planned operators of the unit, in order.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._ahead = 0
        self._strange: list[str] = []

    def find(self, index: int, operator: str) -> int | None:
        """Return the position in the plan of the operator that is executed as number ``index`` of the unit. Call it for
        each operator, in order.

        Returns:
            The position; None if the plan does not contain the operator, or if it is not yet known where the plan
                continues after an operator that was out of place.
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
        """Return the position in the plan of the last operators, as near as possible to ``expected``; None if they are
        not found."""
        for far in range(_REACH):
            for place in (expected + far, expected - far):
                first = place - _SURE + 1
                if first >= 0 and list(self._names[first : place + 1]) == self._strange:
                    return place
        return None
