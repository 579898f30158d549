"""Which planned operator an executed one is, in units that do not always execute the same: experts without tokens are
left out, a mask that was made before is not made again."""

from collections.abc import Sequence

_SURE = 3
"""So many operators in a row are found again by their names before they are taken for the planned ones."""

_REACH = 256
"""Operators by which an execution may be behind the plan, or ahead of it."""


class Abreast:
    """Follows the executions of one unit.

    Args:
        names: of its planned operators, in order.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._ahead = 0
        self._strange: list[str] = []

    def find(self, index: int, operator: str) -> int | None:
        """The place in the plan of the operator that is executed as number ``index`` of the unit; None: it has none, or
        it is not known yet, after one that was out of place, where the plan goes on. Called for each, in order."""
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
        """Where the last operators stand in the plan, as near as possible to where they are expected."""
        for far in range(_REACH):
            for place in (expected + far, expected - far):
                first = place - _SURE + 1
                if first >= 0 and list(self._names[first : place + 1]) == self._strange:
                    return place
        return None
