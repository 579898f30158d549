"""Where a rank stands in an iteration: the unit of work, the layer, the number of the operator in it."""

from dataclasses import dataclass

from ft.systems.dmr.plan.trace import BACKWARD, BETWEEN, FORWARD, OPTIMIZER, RECOMPUTE

NO_LAYER = 0


@dataclass(slots=True)
class Unit:
    """Operators of one phase of one microbatch on one model chunk; ``index``: of the next one."""

    phase: str
    chunk: int = 0
    microbatch: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class At:
    """One execution of an operator. ``layer``: 1 is the first of the model; 0: outside of all layers."""

    operator: str
    phase: str
    chunk: int
    microbatch: int
    layer: int
    index: int


def operator_id(stage: int, phase: str, chunk: int, microbatch: int, index: int) -> str:
    """The name by which profiles and plans know an operator."""
    return f"s{stage}.{phase}.{chunk}.{microbatch}.{index}"


class ExecutionCursor:
    """Follows a rank through its units. What is outside of all of them lies between them, or is the optimizer's.

    Attributes:
        unit: the one under way. layer: the transformer layer under way. executed: operators of this iteration so far.
    """

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        """An iteration begins."""
        self._units: dict[tuple[str, int, int], Unit] = {}
        self._forwards: dict[int, int] = {}
        self._made: dict[int, tuple[int, int]] = {}
        self.layer = NO_LAYER
        self.executed = 0
        self.unit = self._outside = self._of(BETWEEN, 0, 0)

    def count(self) -> tuple[Unit, int]:
        """One more operator is executed: the unit that it belongs to, and its number there."""
        unit = self.unit
        index = unit.index
        unit.index = index + 1
        self.executed += 1
        return unit, index

    def forward(self, chunk: int) -> int:
        """The forward of a chunk's next microbatch begins; its number."""
        microbatch = self._forwards.get(chunk, 0)
        self._forwards[chunk] = microbatch + 1
        self.unit, self.layer = self._of(FORWARD, chunk, microbatch), NO_LAYER
        return microbatch

    def made(self, output: object, chunk: int, microbatch: int) -> None:
        """``output`` is what the backward of that microbatch will begin from."""
        self._made[id(output)] = (chunk, microbatch)

    def backward(self, output: object) -> tuple[int, int]:
        """The backward from ``output`` begins; (chunk, microbatch)."""
        chunk, microbatch = self._made.pop(id(output), (0, 0))
        self.unit, self.layer = self._of(BACKWARD, chunk, microbatch), NO_LAYER
        return chunk, microbatch

    def update(self) -> None:
        """The optimizer's step begins."""
        self.unit = self._outside = self._of(OPTIMIZER, 0, 0)

    def outside(self) -> None:
        """A unit has ended."""
        self.unit, self.layer = self._outside, NO_LAYER

    def recompute(self) -> Unit:
        """Recomputation begins within a backward; returns the unit to go ``back`` to."""
        before = self.unit
        self.unit = self._of(RECOMPUTE, before.chunk, before.microbatch)
        return before

    def back(self, unit: Unit) -> None:
        self.unit = unit

    def at(self, operator: str, index: int) -> At:
        unit = self.unit
        return At(operator, unit.phase, unit.chunk, unit.microbatch, self.layer, index)

    def _of(self, phase: str, chunk: int, microbatch: int) -> Unit:
        return self._units.setdefault((phase, chunk, microbatch), Unit(phase, chunk, microbatch))
