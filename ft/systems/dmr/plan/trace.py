"""The trace of one iteration: the executed operators with their times, the idle windows, and the memory in use.

A trace comes from a profile of a run or from the estimator. Times are microseconds since the iteration began, sizes are
bytes. ``ft.systems.dmr.plan.trace_file`` describes the file format.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ft.systems.dmr.plan.schedule import Pipeline

FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER = "forward", "recompute", "backward", "optimizer"
BETWEEN = "between"
"""Phase of operators outside of all units and before the optimizer step: zeroing, scaling and reducing gradients."""
IN_UNITS = (FORWARD, RECOMPUTE, BACKWARD)
PHASES = (*IN_UNITS, BETWEEN, OPTIMIZER)
INTER, INTRA = ("p2p", "dp", "bubble"), ("tp", "ep")
"""Kinds of windows: inter-node windows, between a stage's units of work; and intra-node windows, inside a unit."""

CLOSE_US = 1e-3
"""Tolerance for comparing instants, in microseconds: an operator that ends at most this long after a window begins has
ended before it. Sums of times are not exact."""

FINGERPRINT = ("model", "tp", "pp", "vpp", "dp", "ep", "micro_batch", "microbatches", "torch", "core", "device")
"""Properties that have to be the same in the run that follows a plan. ``vpp``: model chunks per stage;
``microbatches``: per iteration, on each rank. If any of them differs, or the number of data-parallel ranks, the windows
are elsewhere."""


@dataclass(frozen=True)
class Place:
    """The place of an operator in the iteration. ``chunk``: the model chunk (virtual stage) on its stage."""

    stage: int = 0
    microbatch: int = 0
    layer: int = 0
    phase: str = FORWARD
    chunk: int = 0


@dataclass(frozen=True)
class Segment:
    """Membership of an operator in an activation-checkpointing segment.

    Args:
        name: name of the segment, unique in the iteration.
        last: the operator is the last of the segment.
        comm_tail: the operator ends in communication, which executing it again would repeat at a cost.
    """

    name: str
    last: bool = False
    comm_tail: bool = False


@dataclass(frozen=True)
class Checking:
    """Properties of an operator that matter for its verification.

    Args:
        compare_us: cost of comparing (or digesting) its outputs, beyond executing it again, in microseconds.
        mutates: tensors that it changes in place. The operator is verified immediately, and before it whatever uses
            these tensors.
        rng: it draws random numbers; the generator state is kept for its second execution.
        deterministic: executed twice, it gives the same bits; otherwise no comparison is meaningful.
        segment: the activation-checkpointing segment that recomputes it, or None.
        defer_us: immediate cost of deferring its verification, in microseconds; it is not deferred if verifying costs
            no more.
    """

    compare_us: float = 0.0
    mutates: tuple[str, ...] = ()
    rng: bool = False
    deterministic: bool = True
    segment: Segment | None = None
    defer_us: float = 0.0


@dataclass(frozen=True)
class Operator:
    """One execution of an operator on its stage, from ``start_us`` to ``start_us + t_us``. ``in_ids`` and ``out_ids``
    are ids of tensors."""

    id: str
    name: str
    place: Place
    start_us: float
    t_us: float
    in_ids: tuple[str, ...] = ()
    out_ids: tuple[str, ...] = ()
    checking: Checking = field(default_factory=Checking)

    @property
    def end_us(self) -> float:
        return self.start_us + self.t_us

    @property
    def check_us(self) -> float:
        """Return the time in microseconds of verifying the operator by itself: executing it again and comparing."""
        return self.t_us + self.checking.compare_us

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the tensors that a deferred verification keeps: inputs and outputs."""
        return self.in_ids + self.out_ids


@dataclass(frozen=True)
class Tensor:
    """One tensor. ``free_us``: when training itself frees it; None if it outlives the iteration (parameters)."""

    id: str
    bytes: float
    free_us: float | None = None


@dataclass(frozen=True)
class Window:
    """Time in which a stage computes nothing. ``dynamic``: its duration differs from iteration to iteration."""

    id: str
    stage: int
    start_us: float
    dur_us: float
    kind: str
    dynamic: bool = False

    @property
    def end_us(self) -> float:
        return self.start_us + self.dur_us


def rooms(windows: Iterable[Window]) -> dict[str, float]:
    """Return window id -> usable duration in microseconds. Where windows of a stage overlap, the time that they share
    is counted only in the earliest."""
    found: dict[str, float] = {}
    until: dict[int, float] = {}
    for window in sorted(windows, key=lambda window: window.start_us):
        shared = until.get(window.stage, 0.0) - window.start_us
        found[window.id] = window.dur_us if shared < CLOSE_US else max(0.0, window.dur_us - shared)
        until[window.stage] = max(until.get(window.stage, 0.0), window.end_us)
    return found


@dataclass(frozen=True)
class Memory:
    """Bytes in use: stage -> ((from when, bytes), ...) in order of time; each value holds until the next."""

    timeline: Mapping[int, tuple[tuple[float, float], ...]]
    budget: float | None = None

    def peak(self, stage: int) -> float:
        """Return the largest number of bytes that training itself uses on ``stage``; 0 if nothing is known."""
        return max((live for _, live in self.timeline.get(stage, ())), default=0.0)


@dataclass(frozen=True)
class Trace:
    """One iteration of all stages that are planned together.

    Args:
        fingerprint: what the trace is valid for, by the names of FINGERPRINT.
        ops: operators in order of their start on each stage. Recomputed ones are listed too, with phase "recompute".
        tensors: all tensors that operators name, by id. What communication delivers is a tensor that no operator
            writes: a replay cannot regenerate it, and keeps it.
        windows: idle times, in order of their start on each stage.
        memory: memory in use without DMR.
        pipeline: the schedule, from which the duration of the whole iteration is simulated; None if stages do not wait
            for each other.
        early_stop: recomputation leaves out the last operator of a segment (torch's non-reentrant checkpoints do,
            Megatron's reentrant ones do not).
    """

    fingerprint: Mapping[str, object]
    ops: tuple[Operator, ...]
    tensors: Mapping[str, Tensor]
    windows: tuple[Window, ...]
    memory: Memory
    pipeline: Pipeline | None = None
    early_stop: bool = False

    @property
    def stages(self) -> list[int]:
        """Return the stages that have operators or windows."""
        return sorted({op.place.stage for op in self.ops} | {window.stage for window in self.windows})

    @property
    def dynamic(self) -> bool:
        """Return whether there are windows that only the planner at run time can use."""
        return any(window.dynamic for window in self.windows)
