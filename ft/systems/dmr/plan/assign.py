"""What a plan says: for each operator how it is verified, and what all of it costs."""

from collections.abc import Mapping
from dataclasses import dataclass

from ft.systems.dmr.plan.trace import INTER, Trace, Window

PIGGYBACK, NAIVE, UNCHECKED = "P", "naive", "unchecked"
D_INTER, D_INTRA = "D_inter", "D_intra"
SETS = (PIGGYBACK, D_INTER, D_INTRA, NAIVE, UNCHECKED)
"""P: compared with the recomputation. D: executed again in a window. naive: executed again at once. unchecked: it does
not give the same bits twice, so that no comparison can say anything; a plan names these and claims nothing for them."""


def deferred_set(window: Window) -> str:
    """D_inter for windows between units (p2p, dp, bubbles), D_intra for those inside one (tp, ep)."""
    return D_INTER if window.kind in INTER else D_INTRA


@dataclass(frozen=True)
class Assignment:
    """How one operator is verified.

    Args:
        set: one of SETS.
        window: the window in which it is executed again (D sets).
        agc_segment: the AGC segment it is replayed with, in that window.
    """

    set: str
    window: str | None = None
    agc_segment: str | None = None


@dataclass(frozen=True)
class AgcSegment:
    """Operators of one transformer block that are replayed as a unit from their boundary tensors.

    Args:
        ops: their ids, in order of execution.
        window: where they are replayed.
        keeps: the tensors that are kept until then.
        load_us: what that takes: executing and comparing, and regenerating where ``regenerated_us`` says so.
        regenerated_us: the part that executes the block's recomputation once more, for inner activations that are not
            kept.
    """

    id: str
    ops: tuple[str, ...]
    window: str
    keeps: tuple[str, ...]
    load_us: float
    regenerated_us: float = 0.0


@dataclass(frozen=True)
class Predicted:
    """One iteration: microseconds without DMR, with every operator executed again at once, and with the plan.

    ``exposed_us``: verification that no window hides, summed over stages. ``peak_bytes``: of the fullest stage.
    """

    t_none: float
    t_naive: float
    t_plan: float
    exposed_us: float
    peak_bytes: float

    @property
    def overhead(self) -> float:
        """Share by which an iteration becomes longer."""
        return self.t_plan / self.t_none - 1 if self.t_none else 0.0

    @property
    def naive_overhead(self) -> float:
        return self.t_naive / self.t_none - 1 if self.t_none else 0.0

    @property
    def gain(self) -> float:
        """Share of throughput won over naive DMR."""
        return self.t_naive / self.t_plan - 1 if self.t_plan else 0.0


@dataclass(frozen=True)
class Plan:
    """A trace with every operator assigned.

    Args:
        trace: what was planned; its memory has the plan's budget.
        assign: operator -> how it is verified, all of them.
        segments: AGC segments, by id.
        predicted: with all three phases.
        phases: what each number of phases reaches: (naive alone, 1, 1+2, 1+2+3), as far as they were asked for.
    """

    trace: Trace
    assign: Mapping[str, Assignment]
    segments: Mapping[str, AgcSegment]
    predicted: Predicted
    phases: tuple[Predicted, ...] = ()
