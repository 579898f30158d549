"""Data classes of a trace, the input of the DMR planner: the operators of one iteration, idle windows, and memory use.

DMR (dual modular redundancy, SpareTrain) verifies operators by executing them a second time, if possible in a *window*,
a time in which a pipeline stage communicates or is idle. A *unit* is the forward or backward pass of one microbatch
through one model chunk of a stage.

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
"""Kinds of windows. INTER: between two units of a stage (pipeline messages, data-parallel reductions, bubbles). INTRA:
inside a unit (tensor-parallel and expert-parallel communication)."""

CLOSE_US = 1e-3
"""Tolerance for comparing times, in microseconds, because sums of times are not exact. An operator that ends at most
this long after a window begins counts as executed before the window."""

FINGERPRINT = ("model", "tp", "pp", "vpp", "dp", "ep", "micro_batch", "microbatches", "torch", "core", "device")
"""Names of the properties that have to be the same in the profiled run and in the run that follows the plan, because
otherwise its operators or windows are different. ``vpp`` is the number of model chunks per stage; ``microbatches`` is
the number per iteration on each rank."""


@dataclass(frozen=True)
class Place:
    """The place of an operator in the iteration.

    Attributes:
        stage: pipeline stage, from 0.
        microbatch: number of the microbatch, from 0.
        layer: number of the transformer layer in the model. Profiles count from 1, with 0 outside of all layers.
        phase: one of PHASES.
        chunk: model chunk (virtual stage) of the stage, from 0.
    """

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
        last: True if the operator is the last of the segment.
        comm_tail: True if the operator ends in communication, so that executing it again would repeat costly
            communication.
    """

    name: str
    last: bool = False
    comm_tail: bool = False


@dataclass(frozen=True)
class Checking:
    """Properties of an operator that matter for its verification.

    Args:
        compare_us: cost of comparing (or digesting) its outputs, beyond executing it again, in microseconds.
        mutates: ids of tensors that it changes in place. The operator is verified immediately; deferred operators that
            use these tensors are verified before it runs.
        rng: True if it draws random numbers; the generator state is then kept for its second execution.
        deterministic: True if two executions give the same bits; otherwise no comparison is meaningful.
        segment: the activation-checkpointing segment that recomputes it, or None.
        defer_us: immediate cost of deferring its verification, in microseconds. The operator is not deferred if
            verifying it costs no more than this.
    """

    compare_us: float = 0.0
    mutates: tuple[str, ...] = ()
    rng: bool = False
    deterministic: bool = True
    segment: Segment | None = None
    defer_us: float = 0.0


@dataclass(frozen=True)
class Operator:
    """One execution of an operator on its stage.

    Attributes:
        id: id of the execution, unique in the trace.
        name: name of the operator, with overload.
        place: its place in the iteration.
        start_us: start, in microseconds since the iteration began.
        t_us: duration, in microseconds.
        in_ids: ids of the tensors that it reads.
        out_ids: ids of the tensors that it produces.
        checking: properties that matter for its verification.
    """

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
        """Return the ids of the tensors that a deferred verification keeps: inputs and outputs."""
        return self.in_ids + self.out_ids


@dataclass(frozen=True)
class Tensor:
    """One tensor.

    Attributes:
        id: id of the tensor, unique in the trace.
        bytes: size, in bytes.
        free_us: time at which training itself frees it; None if it outlives the iteration, as parameters do.
    """

    id: str
    bytes: float
    free_us: float | None = None


@dataclass(frozen=True)
class Window:
    """A time in which a stage computes nothing, so that operators can be verified.

    Attributes:
        id: id of the window, unique in the trace.
        stage: pipeline stage.
        start_us: start, in microseconds since the iteration began.
        dur_us: duration, in microseconds.
        kind: one of INTER or INTRA.
        dynamic: True if the duration differs from iteration to iteration.
    """

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
    is counted only in the window that begins first."""
    found: dict[str, float] = {}
    until: dict[int, float] = {}
    for window in sorted(windows, key=lambda window: window.start_us):
        shared = until.get(window.stage, 0.0) - window.start_us
        found[window.id] = window.dur_us if shared < CLOSE_US else max(0.0, window.dur_us - shared)
        until[window.stage] = max(until.get(window.stage, 0.0), window.end_us)
    return found


@dataclass(frozen=True)
class Memory:
    """Memory in use without DMR.

    Attributes:
        timeline: stage -> ((time in microseconds, bytes in use from then on), ...), in order of time.
        budget: bytes that a stage may use; None if unknown.
    """

    timeline: Mapping[int, tuple[tuple[float, float], ...]]
    budget: float | None = None

    def peak(self, stage: int) -> float:
        """Return the largest number of bytes that training itself uses on ``stage``; 0 if nothing is known."""
        return max((live for _, live in self.timeline.get(stage, ())), default=0.0)


@dataclass(frozen=True)
class Trace:
    """One iteration of all stages that are planned together.

    Args:
        fingerprint: the properties of the run, by the names of FINGERPRINT.
        ops: operators in order of their start on each stage. Activation recomputation is listed too, with phase
            "recompute".
        tensors: all tensors that operators name, by id. A tensor that no operator writes was received by
            communication: executing operators again cannot regenerate it, so it has to be kept.
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
        """Return whether there are windows of varying duration, which only decisions at run time can fill."""
        return any(window.dynamic for window in self.windows)
