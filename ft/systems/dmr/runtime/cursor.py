"""Follow a rank's execution position in an iteration: phase, microbatch, model chunk, layer and number of the operator.

Profiles, plans and mismatches identify an operator by this position.
"""

import math
from dataclasses import dataclass

from ft.systems.dmr.plan.trace import BACKWARD, BETWEEN, FORWARD, OPTIMIZER, RECOMPUTE

NO_LAYER = 0
"""Layer number of operators outside of all transformer layers."""


@dataclass(slots=True)
class ExecutedUnit:
    """The operators of one phase of one microbatch on one model chunk of this rank. ``index``: number of the next
    operator in the unit, from 0."""

    phase: str
    chunk: int = 0
    microbatch: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """Identity of one execution of an operator.

    Attributes:
        layer: number of the transformer layer, from 1; 0 outside of all layers.
        index: number of the operator in its unit (phase, chunk, microbatch), from 0. A call that is verified as a whole
            has the number of the operator after it.
        call: number of such a call in the iteration, from 1; 0 for an operator.
        part: of such a call, what it has sent for the ``part``-th time to other ranks, from 1; 0: its results.
    """

    operator: str
    phase: str
    chunk: int
    microbatch: int
    layer: int
    index: int
    call: int = 0
    part: int = 0

    @property
    def unit(self) -> tuple[str, int, int]:
        """Return phase, chunk and microbatch."""
        return self.phase, self.chunk, self.microbatch

    @property
    def position(self) -> tuple[int, float, float]:
        """Return the position within the unit, by which executions are ordered. Ranks of a tensor-parallel group
        execute the same operators in the same order."""
        return self.index, self.call or math.inf, self.part or math.inf


def operator_id(stage: int, phase: str, chunk: int, microbatch: int, index: int) -> str:
    """Return the identifier in profiles and plans of operator number ``index`` of a phase, chunk and microbatch of a
    stage, all from 0."""
    return f"s{stage}.{phase}.{chunk}.{microbatch}.{index}"


class ExecutionCursor:
    """Follows a rank through the units of an iteration. The DMR engine calls it where units begin and end. Operators
    outside of all forward and backward passes belong to one unit with phase BETWEEN, or to one with phase OPTIMIZER
    from the optimizer step on. ``executed``: number of operators of this iteration so far."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        """Begin an iteration."""
        self._units: dict[tuple[str, int, int], ExecutedUnit] = {}
        self._forwards: dict[int, int] = {}
        self._made: dict[int, tuple[int, int]] = {}
        self.layer = NO_LAYER
        self.executed = 0
        self.unit = self._outside = self._of(BETWEEN, 0, 0)

    def count(self) -> tuple[ExecutedUnit, int]:
        """Count an operator that is about to be executed; return its unit and its number in that unit."""
        unit = self.unit
        index = unit.index
        unit.index = index + 1
        self.executed += 1
        return unit, index

    def forward(self, chunk: int, number: int | None = None) -> int:
        """Begin the forward pass of microbatch ``number`` of ``chunk``; None: of the next one. Return its number."""
        microbatch = self._forwards.get(chunk, 0) if number is None else number
        self._forwards[chunk] = microbatch + 1
        self.unit, self.layer = self._of(FORWARD, chunk, microbatch), NO_LAYER
        return microbatch

    def made(self, output: object, chunk: int, microbatch: int) -> None:
        """Record ``output`` as the tensor from which the backward pass of that microbatch will begin."""
        self._made[id(output)] = (chunk, microbatch)

    def backward(self, output: object) -> tuple[int, int]:
        """Begin the backward pass from ``output``; return (chunk, microbatch)."""
        chunk, microbatch = self._made.pop(id(output), (0, 0))
        self.unit, self.layer = self._of(BACKWARD, chunk, microbatch), NO_LAYER
        return chunk, microbatch

    def update(self) -> None:
        """Begin the optimizer step."""
        self.unit = self._outside = self._of(OPTIMIZER, 0, 0)

    def outside(self) -> None:
        """End the current unit."""
        self.unit, self.layer = self._outside, NO_LAYER

    def recompute(self) -> ExecutedUnit:
        """Begin a recomputation within a backward pass; return the unit to be passed to ``back`` at its end."""
        before = self.unit
        self.unit = self._of(RECOMPUTE, before.chunk, before.microbatch)
        return before

    def back(self, unit: ExecutedUnit) -> None:
        """Return to ``unit`` at the end of a recomputation."""
        self.unit = unit

    def at(self, operator: str, index: int) -> OperatorCall:
        """Return the identity of operator number ``index`` of the current unit. ``operator``: its name."""
        unit = self.unit
        return OperatorCall(operator, unit.phase, unit.chunk, unit.microbatch, self.layer, index)

    def _of(self, phase: str, chunk: int, microbatch: int) -> ExecutedUnit:
        return self._units.setdefault((phase, chunk, microbatch), ExecutedUnit(phase, chunk, microbatch))
