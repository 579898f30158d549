"""The trace of one iteration: what was executed when, which windows were idle, and how much memory was in use.

It comes from a profile of a run or from the estimator. Times are microseconds since the iteration began, sizes bytes.
The file is that of science/dmr.md ("Plan file") with what a planner needs besides: ``stage`` and ``t0_us`` of each
operator, the table of tensors, and the pipeline's schedule.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ft.systems.dmr.plan.schedule import Pipeline

FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER = "forward", "recompute", "backward", "optimizer"
BETWEEN = "between"
"""Outside of all units, and before the optimizer's step: gradients set to zero, scaled, reduced."""
IN_UNITS = (FORWARD, RECOMPUTE, BACKWARD)
PHASES = (*IN_UNITS, BETWEEN, OPTIMIZER)
INTER, INTRA = ("p2p", "dp", "bubble"), ("tp", "ep")
"""Kinds of windows: between nodes (and between a stage's units of work), and inside a unit."""

CLOSE_US = 1e-3
"""Instants this close are one: an operator that ends so little after a window begins has ended before it. Sums of times
are not exact."""

FINGERPRINT = ("model", "tp", "pp", "vpp", "dp", "ep", "micro_batch", "microbatches", "torch", "core", "device")
"""What has to be the same in the run that follows a plan. ``vpp``: model chunks of a stage; ``microbatches``: of an
iteration, on each rank. With others of these, or with another number of data-parallel ranks, windows are elsewhere."""


@dataclass(frozen=True)
class Place:
    """Where an operator belongs. ``chunk``: the stage's model chunk (virtual stage) of an interleaved schedule."""

    stage: int = 0
    microbatch: int = 0
    layer: int = 0
    phase: str = FORWARD
    chunk: int = 0


@dataclass(frozen=True)
class Segment:
    """Membership in an activation-checkpointing segment.

    Args:
        name: the segment's, unique in the iteration.
        last: the operator is its last.
        comm_tail: it ends in communication that a repetition would repeat, and that costs.
    """

    name: str
    last: bool = False
    comm_tail: bool = False


@dataclass(frozen=True)
class Checking:
    """What matters when an operator is verified.

    Args:
        compare_us: what comparing (or digesting) its outputs costs, beside executing it again.
        mutates: tensors it changes in place; it is verified at once, and so is before it whatever uses them.
        rng: it draws random numbers, whose state is kept for its repetition.
        deterministic: executed twice it gives the same bits; else no comparison says anything about it.
        segment: the activation-checkpointing segment that recomputes it, or None.
        defer_us: what putting its verification aside costs at once: it is not deferred where verifying costs no more.
    """

    compare_us: float = 0.0
    mutates: tuple[str, ...] = ()
    rng: bool = False
    deterministic: bool = True
    segment: Segment | None = None
    defer_us: float = 0.0


@dataclass(frozen=True)
class Operator:
    """One execution of an operator: ``start_us`` to ``start_us + t_us`` on its stage. Ids are of tensors."""

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
        """Time that verifying it by itself takes: executing it again, and comparing."""
        return self.t_us + self.checking.compare_us

    @property
    def tensors(self) -> tuple[str, ...]:
        """What a deferred verification keeps: inputs and outputs."""
        return self.in_ids + self.out_ids


@dataclass(frozen=True)
class Tensor:
    """``free_us``: when training itself gives its memory back; None: it lives as long as the iteration (parameters)."""

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
    """Window -> microseconds of it: time that two of a stage's windows have in common is counted once, in the first."""
    found: dict[str, float] = {}
    until: dict[int, float] = {}
    for window in sorted(windows, key=lambda window: window.start_us):
        shared = until.get(window.stage, 0.0) - window.start_us
        found[window.id] = window.dur_us if shared < CLOSE_US else max(0.0, window.dur_us - shared)
        until[window.stage] = max(until.get(window.stage, 0.0), window.end_us)
    return found


@dataclass(frozen=True)
class Memory:
    """Bytes in use on each stage: stage -> ((from when, bytes), ...) in order of time; each holds until the next."""

    timeline: Mapping[int, tuple[tuple[float, float], ...]]
    budget: float | None = None

    def peak(self, stage: int) -> float:
        """The most bytes that training itself has in use there; 0 where nothing is known."""
        return max((live for _, live in self.timeline.get(stage, ())), default=0.0)


@dataclass(frozen=True)
class Trace:
    """One iteration of all stages that are planned together.

    Args:
        fingerprint: what the trace is valid for, by the names of FINGERPRINT.
        ops: in order of their start on each stage. Recomputed ones are listed too, with phase "recompute".
        tensors: by id, all that operators name. What communication delivers is a tensor that no operator writes: a
            replay cannot regenerate it, and keeps it.
        windows: idle times, in order of their start on each stage.
        memory: in use without DMR.
        pipeline: the schedule, from which the whole iteration's time is simulated; None: stages stand alone.
        early_stop: recomputation leaves a segment's last operator out (non-reentrant torch checkpoints do, Megatron's
            reentrant ones do not).
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
        """Those that have operators or windows."""
        return sorted({op.place.stage for op in self.ops} | {window.stage for window in self.windows})

    @property
    def dynamic(self) -> bool:
        """There are windows that only the planner at run time can use."""
        return any(window.dynamic for window in self.windows)
