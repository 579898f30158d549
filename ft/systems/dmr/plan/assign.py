"""The contents of a plan: how each operator is verified, and the predicted costs."""

from collections.abc import Mapping
from dataclasses import dataclass

from ft.systems.dmr.plan.trace import INTER, Trace, Window

PIGGYBACK, NAIVE, UNCHECKED = "P", "naive", "unchecked"
D_INTER, D_INTRA = "D_inter", "D_intra"
SETS = (PIGGYBACK, D_INTER, D_INTRA, NAIVE, UNCHECKED)
"""P: compared with its recomputation. D_inter, D_intra: executed again in a window. naive: executed again immediately.
unchecked: not verified, because the operator does not give the same bits twice; a plan lists these operators and claims
nothing for them."""


def deferred_set(window: Window) -> str:
    """Return D_inter for windows between units (p2p, dp, bubbles), D_intra for windows inside a unit (tp, ep)."""
    return D_INTER if window.kind in INTER else D_INTRA


@dataclass(frozen=True)
class Assignment:
    """How one operator is verified.

    Args:
        set: one of SETS.
        window: (D sets) the window in which it is executed again.
        agc_segment: (D sets) the AGC segment with which it is replayed in that window.
    """

    set: str
    window: str | None = None
    agc_segment: str | None = None


@dataclass(frozen=True)
class AgcSegment:
    """Operators of one transformer block that are replayed as a unit from their boundary tensors.

    Args:
        id: id of the segment.
        ops: ids of the operators, in order of execution.
        window: id of the window in which they are replayed.
        keeps: ids of the tensors that are kept until then.
        load_us: duration of the replay in microseconds: executing, comparing, and regenerating if ``regenerated_us`` is
            not 0.
        regenerated_us: the part of it that executes the block's recomputation once more, for inner activations that are
            not kept.
    """

    id: str
    ops: tuple[str, ...]
    window: str
    keeps: tuple[str, ...]
    load_us: float
    regenerated_us: float = 0.0


@dataclass(frozen=True)
class Predicted:
    """Predicted times of one iteration, in microseconds.

    Attributes:
        t_none: duration without DMR.
        t_naive: duration with every operator executed again immediately.
        t_plan: duration with the plan.
        exposed_us: verification time that no window hides, summed over stages.
        peak_bytes: largest memory use of any stage, in bytes.
    """

    t_none: float
    t_naive: float
    t_plan: float
    exposed_us: float
    peak_bytes: float

    @property
    def overhead(self) -> float:
        """Return the relative increase of the iteration time with the plan."""
        return self.t_plan / self.t_none - 1 if self.t_none else 0.0

    @property
    def naive_overhead(self) -> float:
        return self.t_naive / self.t_none - 1 if self.t_none else 0.0

    @property
    def gain(self) -> float:
        """Return the relative increase of throughput over naive DMR."""
        return self.t_naive / self.t_plan - 1 if self.t_plan else 0.0


@dataclass(frozen=True)
class Plan:
    """A trace with every operator assigned.

    Args:
        trace: what was planned; its memory has the plan's budget.
        assign: operator id -> how the operator is verified, for all operators.
        segments: AGC segments, by id.
        predicted: prediction with all three phases.
        phases: predictions by number of phases: (naive alone, 1, 1+2, 1+2+3), as far as they were requested.
    """

    trace: Trace
    assign: Mapping[str, Assignment]
    segments: Mapping[str, AgcSegment]
    predicted: Predicted
    phases: tuple[Predicted, ...] = ()
