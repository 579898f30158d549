"""A DMR strategy that leaves non-reproducible operators unverified.

DMR (dual modular redundancy, SpareTrain) executes every operator twice and compares the results; a strategy decides how
each operator is verified. Operators that compute a different result each time cannot be compared.
"""

from collections.abc import Collection, Mapping

from ft.systems.dmr.runtime.cursor import Unit
from ft.systems.dmr.runtime.strategy import SKIPPED, Decision, Strategy

_LEFT_OUT = Decision(SKIPPED)


class ExcludeUnstable:
    """Strategy that follows another strategy, except that non-reproducible operators are left unverified.

    Args:
        strategy: the other strategy.
        unstable: names of the non-reproducible operators, with overloads ("index_put_", "add_.Tensor").

    Attributes:
        strategy: the other strategy.
    """

    def __init__(self, strategy: Strategy, unstable: Collection[str]):
        self.strategy, self._unstable = strategy, frozenset(unstable)
        self.uses_recomputation = strategy.uses_recomputation
        self.name = f"{strategy.name}, unstable left out: {', '.join(sorted(self._unstable))}"

    @property
    def misfits(self) -> Mapping[tuple[str, str], int]:
        return self.strategy.misfits

    def decide(self, unit: Unit, index: int, operator: str, in_segment: bool) -> Decision:
        decision = self.strategy.decide(unit, index, operator, in_segment)
        return _LEFT_OUT if operator in self._unstable else decision
