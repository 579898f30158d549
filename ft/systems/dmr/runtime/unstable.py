"""A strategy that leaves operators unchecked which compute another result each time on the same inputs."""

from collections.abc import Collection, Mapping

from ft.systems.dmr.runtime.cursor import Unit
from ft.systems.dmr.runtime.strategy import SKIPPED, Decision, Strategy

_LEFT_OUT = Decision(SKIPPED)


class Sparing:
    """As another strategy says, but for operators that are not reproducible: these are left unchecked.

    Args:
        unstable: their names, with overloads ("index_put_", "add_.Tensor").

    Attributes:
        strategy: the other one.
    """

    def __init__(self, strategy: Strategy, unstable: Collection[str]):
        self.strategy, self._unstable = strategy, frozenset(unstable)
        self.name = f"{strategy.name}, unstable left out: {', '.join(sorted(self._unstable))}"

    @property
    def misfits(self) -> Mapping[tuple[str, str], int]:
        return self.strategy.misfits

    def decide(self, unit: Unit, index: int, operator: str, in_segment: bool) -> Decision:
        decision = self.strategy.decide(unit, index, operator, in_segment)
        return _LEFT_OUT if operator in self._unstable else decision
