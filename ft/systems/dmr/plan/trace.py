"""Records of the DMR planner: its input, a trace (the operators of one iteration, idle windows, memory use), and its
output, a plan that says for each operator how and when it is verified.

A *unit* is the forward or backward pass of one microbatch through one model chunk of a stage. A *window* is a time in
which a stage communicates or is idle. An *AGC segment* (activation-gradient checkpointing, SpareTrain, Method 2) is a
sequence of operators that is executed again as a whole, so that only the tensors at its boundary have to be kept until
then. A trace comes from a profile of a run or from the estimator. Times are microseconds since the iteration began,
sizes are bytes.

The files (``ft.systems.dmr.plan.file``) have these records as they are. What their types allow is checked when a file
is read.
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta, Struct

from ft.systems.schedule.kinds import Pipeline
from ft.systems.schedule.program import Unit

Amount = Annotated[float, Meta(ge=0, le=1e300)]
"""A time in microseconds or a size in bytes, in a file."""
Count = Annotated[int, Meta(ge=0)]
"""A number, in a file."""

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


class Operator(Struct, frozen=True, omit_defaults=True):
    """One execution of an operator on its stage, and the properties that matter for its verification.

    Attributes:
        id: id of the execution, unique in the trace.
        name: name of the operator, with overload.
        start_us: start, in microseconds since the iteration began.
        t_us: duration, in microseconds.
        in_ids, out_ids: ids of the tensors that it reads and returns.
        stage: pipeline stage, from 0, as are microbatch and chunk (virtual stage).
        layer: number of the transformer layer in the model. Profiles count from 1, with 0 outside of all layers.
        compare_us: cost of comparing (or digesting) its outputs, beyond executing it again, in microseconds.
        defer_us: immediate cost of deferring its verification, in microseconds. The operator is not deferred if
            verifying it costs no more than this.
        mutates: ids of tensors that it changes in place. The operator is verified immediately; deferred operators that
            use these tensors are verified before it runs.
        rng: True if it draws random numbers; the generator state is then kept for its second execution.
        deterministic: True if two executions give the same bits; otherwise no comparison is meaningful.
        ac_segment: name of the activation-checkpointing segment that recomputes it, unique in the iteration; None:
            nothing recomputes it.
        comm_tail: True if it ends in communication, so that executing it again would repeat costly communication.
    """

    id: str
    name: str
    phase: Literal[PHASES]
    start_us: Amount
    t_us: Amount
    in_ids: tuple[str, ...] = ()
    out_ids: tuple[str, ...] = ()
    stage: Count = 0
    microbatch: Count = 0
    layer: Count = 0
    chunk: Count = 0
    compare_us: Amount = 0.0
    defer_us: Amount = 0.0
    mutates: tuple[str, ...] = ()
    rng: bool = False
    deterministic: bool = True
    ac_segment: str | None = None
    is_segment_last: bool = False
    comm_tail: bool = False

    @property
    def end_us(self) -> float:
        return self.start_us + self.t_us

    @property
    def check_us(self) -> float:
        """Return the time in microseconds of verifying the operator by itself: executing it again and comparing."""
        return self.t_us + self.compare_us

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the ids of the tensors that a deferred verification keeps: inputs and outputs."""
        return self.in_ids + self.out_ids

    @property
    def is_verified_at_once(self) -> bool:
        """Return whether its verification cannot be deferred, because it changes its inputs or belongs to the optimizer
        step."""
        return bool(self.mutates) or self.phase == OPTIMIZER


class Tensor(Struct, frozen=True, omit_defaults=True):
    """One tensor.

    Attributes:
        bytes: its size.
        free_us: time at which training itself frees it; None if it outlives the iteration, as parameters do.
    """

    bytes: Amount
    free_us: Amount | None = None


class Window(Struct, frozen=True):
    """A time in which a stage computes nothing, so that operators can be verified.

    Attributes:
        start_us: start, in microseconds since the iteration began.
        dur_us: duration, in microseconds.
        dynamic: True if the duration differs from iteration to iteration.
    """

    id: str
    start_us: Amount
    dur_us: Amount
    kind: Literal[INTER + INTRA]
    stage: Count = 0
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


class Changes:
    """The times at which tensors are changed in place, on each stage. "" stands for the parameters, which change when
    the optimizer step of the stage begins."""

    def __init__(self, ops: Iterable[Operator]):
        self._times: dict[tuple[int, str], list[float]] = defaultdict(list)
        for op in ops:
            for name in (*op.mutates, *([""] if op.phase == OPTIMIZER else [])):
                self._times[op.stage, name].append(op.start_us)
        for times in self._times.values():
            times.sort()

    def next(self, op: Operator) -> tuple[float, str]:
        """Return when a tensor of ``op``, or a parameter, is first changed after it, in microseconds, and the name of
        the tensor; infinity if none is."""
        found = math.inf, ""
        for name in (*op.tensors, ""):
            times = self._times.get((op.stage, name), ())
            place = bisect.bisect_left(times, op.end_us - CLOSE_US)
            if place < len(times):
                found = min(found, (times[place], name))
        return found


class MemoryInUse(Struct, frozen=True):
    """Memory in use without DMR.

    Attributes:
        timeline: stage -> ((time in microseconds, bytes in use from then on), ...), in order of time.
        budget: number of bytes that a stage may use; None if unknown.
    """

    timeline: Mapping[int, tuple[tuple[Amount, Amount], ...]]
    budget: Amount | None = None

    def peak(self, stage: int) -> float:
        """Return the largest number of bytes that training itself uses on ``stage``; 0 if nothing is known."""
        return max((live for _, live in self.timeline.get(stage, ())), default=0.0)


class Trace(Struct, frozen=True, dict=True):
    """One iteration of all stages that are planned together.

    Attributes:
        fingerprint: the properties of the run, by the names of FINGERPRINT.
        ops: operators in order of their start on each stage. Activation recomputation is listed too, with phase
            "recompute".
        tensors: all tensors that operators name, by id. A tensor that no operator writes was received by communication:
            executing operators again cannot regenerate it, so it has to be kept.
        windows: idle times, in order of their start on each stage.
        pipeline: the schedule, from which the duration of the whole iteration is simulated; None if stages do not wait
            for each other.
        early_stop: recomputation leaves out the last operator of a segment (torch's non-reentrant checkpoints do,
            Megatron's reentrant ones do not).
        units: the units with start and end, in microseconds, including communication inside them.
    """

    fingerprint: Mapping[str, str | int | float | bool]
    ops: tuple[Operator, ...]
    tensors: Mapping[str, Tensor]
    windows: tuple[Window, ...]
    memory: MemoryInUse
    pipeline: Pipeline | None = None
    early_stop: bool = False
    units: tuple[tuple[Unit, Amount, Amount], ...] = ()

    @cached_property
    def op_by_id(self) -> dict[str, Operator]:
        return {op.id: op for op in self.ops}

    @cached_property
    def window_by_id(self) -> dict[str, Window]:
        return {window.id: window for window in self.windows}

    @property
    def stages(self) -> list[int]:
        """Return the stages that have operators or windows."""
        return sorted({op.stage for op in self.ops} | {window.stage for window in self.windows})

    @property
    def dynamic(self) -> bool:
        """Return whether there are windows of varying duration, which only decisions at run time can fill."""
        return any(window.dynamic for window in self.windows)


PIGGYBACK, NAIVE, UNCHECKED = "P", "naive", "unchecked"
D_INTER, D_INTRA = "D_inter", "D_intra"
SETS = (PIGGYBACK, D_INTER, D_INTRA, NAIVE, UNCHECKED)
"""Ways to verify an operator:

- P: compare it with its execution in activation recomputation, which takes place anyway.
- D_inter: execute it again later, in a window between two units.
- D_intra: execute it again later, in a window inside a unit.
- naive: execute it again immediately.
- unchecked: do not verify it, because it does not give the same bits twice. A plan lists these operators.
"""


def deferred_set(window: Window) -> str:
    """Return D_inter for a window between units (kinds p2p, dp, bubble), D_intra for a window inside a unit (kinds tp,
    ep)."""
    return D_INTER if window.kind in INTER else D_INTRA


class Assignment(Struct, frozen=True, omit_defaults=True):
    """How one operator is verified.

    Attributes:
        set: the way to verify it.
        window: id of the window in which it is executed again, for D_inter and D_intra.
        agc_segment: id of the AGC segment that it is executed again with; None: it is executed again by itself.
    """

    set: Literal[SETS]
    window: str | None = None
    agc_segment: str | None = None


class AgcSegment(Struct, frozen=True):
    """Operators of one transformer block that are executed again (replayed) as a whole from their boundary tensors.

    Attributes:
        ops: ids of the operators, in order of execution.
        keeps: ids of the tensors that are kept until the replay.
        load_us: duration of the replay in microseconds, including comparisons and ``again``.
        again: ids of the operators of the block's activation recomputation that the replay executes first, because
            activations that they make are not kept. They are not compared.
    """

    ops: tuple[str, ...]
    window: str
    keeps: tuple[str, ...]
    load_us: Amount
    again: tuple[str, ...] = ()


class Predicted(Struct, frozen=True):
    """Prediction for one iteration.

    Attributes:
        t_none: its duration without DMR, in microseconds.
        t_naive: its duration if every operator is executed again immediately.
        t_plan: its duration with the plan.
        exposed_us: verification time outside of windows, which lengthens the iteration, summed over stages.
        peak_bytes: the largest memory use of any stage.
    """

    t_none: Amount
    t_naive: Amount
    t_plan: Amount
    exposed_us: Amount
    peak_bytes: Amount

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


class Plan(Struct, frozen=True):
    """The DMR plan of one iteration: its trace, with a way of verification for every operator.

    Attributes:
        trace: the trace of the iteration; ``trace.memory.budget`` is the memory budget of the plan.
        assign: operator id -> how the operator is verified, for all operators.
        segments: AGC segments, by id.
        predicted: prediction for this plan, after the last planning phase.
        phases: predictions after 0 to 3 planning phases, as many as were requested.
    """

    trace: Trace
    assign: Mapping[str, Assignment]
    segments: Mapping[str, AgcSegment]
    predicted: Predicted
    phases: tuple[Predicted, ...] = ()
