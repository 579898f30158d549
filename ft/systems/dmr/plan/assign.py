"""Data classes of a DMR plan: how each operator of an iteration is verified, and the predicted costs.

DMR (dual modular redundancy, SpareTrain) executes every operator twice and compares the results. The planner decides
for each operator when the second execution takes place. A *window* is a time in which a stage communicates or is idle.
An *AGC segment* (activation-gradient checkpointing, SpareTrain, Method 2) is a sequence of operators that is executed
again as a whole, so that only the tensors at its boundary have to be kept until then.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ft.systems.dmr.plan.trace import INTER, Trace, Window

PIGGYBACK, NAIVE, UNCHECKED = "P", "naive", "unchecked"
D_INTER, D_INTRA = "D_inter", "D_intra"
SETS = (PIGGYBACK, D_INTER, D_INTRA, NAIVE, UNCHECKED)
"""Ways to verify an operator:

- P: compare it with its execution in activation recomputation, which takes place anyway.
- D_inter: execute it again later, in a window between two units (a unit is the forward or backward pass of one
  microbatch through one model chunk).
- D_intra: execute it again later, in a window inside a unit.
- naive: execute it again immediately.
- unchecked: do not verify it, because it does not give the same bits twice. A plan lists these operators.
"""


def deferred_set(window: Window) -> str:
    """Return D_inter for a window between units (kinds p2p, dp, bubble), D_intra for a window inside a unit (kinds tp,
    ep)."""
    return D_INTER if window.kind in INTER else D_INTRA


@dataclass(frozen=True)
class Assignment:
    """How one operator is verified.

    Args:
        set: one of SETS.
        window: for D_inter and D_intra: id of the window in which the operator is executed again; otherwise None.
        agc_segment: for D_inter and D_intra: id of the AGC segment with which the operator is executed again; None if
            it is executed again by itself.
    """

    set: str
    window: str | None = None
    agc_segment: str | None = None


@dataclass(frozen=True)
class AgcSegment:
    """Operators of one transformer block that are executed again (replayed) as a whole from their boundary tensors.

    Args:
        id: id of the segment.
        ops: ids of the operators, in order of execution.
        window: id of the window in which they are replayed.
        keeps: ids of the tensors that are kept until the replay.
        load_us: duration of the replay in microseconds, including comparisons and ``regenerated_us``.
        regenerated_us: microseconds of the replay that are spent on recomputing inner activations that are not kept; 0
            if they are kept.
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
        exposed_us: verification time outside of windows, which lengthens the iteration; summed over stages.
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
    """The DMR plan of one iteration: its trace, with a way of verification for every operator.

    Args:
        trace: the trace of the iteration; ``trace.memory.budget`` is the memory budget of the plan.
        assign: operator id -> how the operator is verified, for all operators.
        segments: AGC segments, by id.
        predicted: prediction for this plan, after the last planning phase.
        phases: predictions after 0 to 3 planning phases, as many as were requested. With 0 phases all operators are
            naive. Phase 1 adds set P, phase 2 adds AGC segments, phase 3 adds single operators in windows.
    """

    trace: Trace
    assign: Mapping[str, Assignment]
    segments: Mapping[str, AgcSegment]
    predicted: Predicted
    phases: tuple[Predicted, ...] = ()
