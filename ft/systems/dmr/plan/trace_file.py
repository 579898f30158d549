"""Read, check and write the trace files of DMR: one JSON object with times in microseconds and sizes in bytes.

DMR (dual modular redundancy, SpareTrain) verifies the operators of a training iteration by executing them a second
time. A trace lists these operators, the idle times (windows) of each pipeline stage, and the memory in use. The fields
of a trace file:

- ``version``, and ``fingerprint`` with the properties of the run (FINGERPRINT).
- ``ops``: each has ``id``, ``name``, ``phase``, ``t0_us`` and ``t_us``, and optionally ``stage``, ``microbatch``,
  ``layer``, ``chunk``, ``in_ids``, ``out_ids``, ``mutates``, ``rng``, ``deterministic``, ``compare_us``, ``defer_us``,
  ``ac_segment``, ``is_segment_last`` and ``comm_tail`` (``Operator``, ``Checking``, ``Segment``).
- ``tensors``: each has ``id``, ``bytes``, and ``free_us`` unless it outlives the iteration.
- ``windows``: each has ``id``, ``t0_us``, ``dur_us`` and ``kind``, and optionally ``stage`` and ``dynamic``.
- ``memory``: ``budget``, and ``timeline`` with ``stage``, ``t_us`` and ``live`` (bytes in use from then on) for each
  change.
- ``schedule``: the fields of ``Pipeline``, or null. ``early_stop``: as in ``Trace``.
"""

import math
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from ft.systems.dmr.plan.fields import Fields, read_object, write_object
from ft.systems.dmr.plan.schedule import Pipeline
from ft.systems.dmr.plan.trace import (
    FINGERPRINT,
    INTER,
    INTRA,
    PHASES,
    Checking,
    Memory,
    Operator,
    Place,
    Segment,
    Tensor,
    Trace,
    Window,
)

VERSION = 2
"""Version of the file format. Files of other versions are refused."""
MOST_UNITS = 10_000_000
"""Number of forward passes of one iteration, over all stages, above which a schedule is refused as a mistake."""

FIX = "profile again: ft dmr profile --out FILE"


def read_trace(path: Path) -> Trace:
    """Return the trace in a file.

    Raises:
        UserError: the file cannot be read, is truncated, has another version, or describes an impossible trace (see
            ``checked``).
    """
    return from_values(read_object(path, VERSION, FIX))


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace to a file.

    Raises:
        UserError: the file cannot be written.
    """
    write_object(path, {"version": VERSION, **to_values(trace)})


def from_values(found: Fields) -> Trace:
    """Return the trace that a JSON object describes.

    Raises:
        UserError: as ``read_trace``.
    """
    tensors = [
        Tensor(each.text("id"), each.amount("bytes"), each.amount("free_us", None)) for each in found.objects("tensors")
    ]
    trace = Trace(
        fingerprint=_fingerprint(found.object("fingerprint")),
        ops=tuple(sorted(map(_operator, found.objects("ops")), key=lambda op: (op.place.stage, op.start_us))),
        tensors={tensor.id: tensor for tensor in tensors},
        windows=tuple(sorted(map(_window, found.objects("windows")), key=lambda one: (one.stage, one.start_us))),
        memory=_memory(found.object("memory")),
        pipeline=_pipeline(found.object("schedule")) if found.take("schedule", None) is not None else None,
        early_stop=found.flag("early_stop", False),
    )
    refuse_twice("tensor", [tensor.id for tensor in tensors], found)
    return checked(trace, found)


def checked(trace: Trace, found: Fields) -> Trace:
    """Return the trace if it is consistent. ``found`` provides the position in the file for error messages.

    Raises:
        UserError: an id occurs twice, an operator names an unknown tensor, two operators write the same tensor,
            operators need each other's results in a cycle, or the stage, microbatch or chunk of an operator is not in
            the schedule.
    """
    refuse_twice("operator", [op.id for op in trace.ops], found)
    refuse_twice("window", [window.id for window in trace.windows], found)
    producer: dict[str, str] = {}
    for op in trace.ops:
        unknown = [each for each in (*op.tensors, *op.checking.mutates) if each not in trace.tensors]
        if unknown:
            raise found.error(f"has an operator {op.id!r} that uses a tensor {unknown[0]!r} it does not list")
        for each in op.out_ids:
            if each in producer:
                raise found.error(f"has two operators that write tensor {each!r}: {producer[each]!r} and {op.id!r}")
            producer[each] = op.id
    waits = {op.id: {producer[each] for each in op.in_ids if each in producer} - {op.id} for op in trace.ops}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        circle = " <- ".join(map(str, error.args[1]))
        raise found.error(f"has a cycle: operators need each other's results: {circle}") from error
    if trace.pipeline is not None:
        _fits(trace, trace.pipeline, found)
    return trace


def _fits(trace: Trace, pipeline: Pipeline, found: Fields) -> None:
    for op in trace.ops:
        place = op.place
        if place.phase == PHASES[-1] and place.stage < pipeline.stages:
            continue
        here = (place.stage, place.microbatch, place.chunk)
        if any(is_ >= of for is_, of in zip(here, _shape(pipeline), strict=True)):
            said = f"{pipeline.stages} stages, {pipeline.microbatches} microbatches, {pipeline.chunks} chunks"
            where = f"stage {here[0]}, microbatch {here[1]}, chunk {here[2]} (from 0)"
            raise found.error(f"has an operator {op.id!r} on {where}, outside its schedule of {said}")


def _shape(pipeline: Pipeline) -> tuple[int, int, int]:
    return pipeline.stages, pipeline.microbatches, pipeline.chunks


def refuse_twice(what: str, ids: list[str], found: Fields) -> None:
    """Check that no id occurs twice.

    Raises:
        UserError: an id occurs twice.
    """
    seen: set[str] = set()
    for each in ids:
        if each in seen:
            raise found.error(f"lists {what} {each!r} twice")
        seen.add(each)


def _fingerprint(found: Fields) -> dict[str, Any]:
    for name in FINGERPRINT:
        found.take(name)
    for name, value in found.values.items():
        if not isinstance(value, str | int | float | bool):
            raise found.error(f"has {name} = {value!r}, which is neither a text nor a number")
    return dict(found.values)


def _one_of(found: Fields, name: str, allowed: tuple[str, ...]) -> str:
    value = found.text(name)
    if value not in allowed:
        raise found.error(f"has {name} = {value!r}, which is none of {', '.join(allowed)}")
    return value


def _operator(found: Fields) -> Operator:
    phase = _one_of(found, "phase", PHASES)
    place = Place(*(found.count(name, 0) for name in ("stage", "microbatch", "layer")), phase, found.count("chunk", 0))
    segment = None
    if found.text("ac_segment", None) is not None:
        segment = Segment(
            found.text("ac_segment"), found.flag("is_segment_last", False), found.flag("comm_tail", False)
        )
    checking = Checking(
        compare_us=found.amount("compare_us", 0.0),
        mutates=found.texts("mutates", []),
        rng=found.flag("rng", False),
        deterministic=found.flag("deterministic", True),
        segment=segment,
        defer_us=found.amount("defer_us", 0.0),
    )
    return Operator(
        id=found.text("id"),
        name=found.text("name"),
        place=place,
        start_us=found.amount("t0_us"),
        t_us=found.amount("t_us"),
        in_ids=found.texts("in_ids", []),
        out_ids=found.texts("out_ids", []),
        checking=checking,
    )


def _window(found: Fields) -> Window:
    return Window(
        id=found.text("id"),
        stage=found.count("stage", 0),
        start_us=found.amount("t0_us"),
        dur_us=found.amount("dur_us"),
        kind=_one_of(found, "kind", INTER + INTRA),
        dynamic=found.flag("dynamic", False),
    )


def _memory(found: Fields) -> Memory:
    timeline: dict[int, list[tuple[float, float]]] = {}
    for each in found.objects("timeline", []):
        timeline.setdefault(each.count("stage", 0), []).append((each.amount("t_us"), each.amount("live")))
    return Memory({stage: tuple(sorted(points)) for stage, points in timeline.items()}, found.amount("budget", None))


def _pipeline(found: Fields) -> Pipeline:
    pipeline = Pipeline(
        stages=found.count("stages", least=1),
        microbatches=found.count("microbatches", least=1),
        chunks=found.count("chunks", 1, least=1),
        comm_us=found.amount("comm_us", 0.0),
        blocking=found.flag("blocking", True),
        group=found.count("group", 0),
    )
    if pipeline.stages * pipeline.microbatches * pipeline.chunks > MOST_UNITS:
        raise found.error(f"has more than {MOST_UNITS} forwards: {pipeline}")
    return pipeline


def to_values(trace: Trace) -> dict[str, Any]:
    """Return the trace as JSON values."""
    pipeline = trace.pipeline
    return {
        "fingerprint": dict(trace.fingerprint),
        "ops": [operator_values(op) for op in trace.ops],
        "tensors": [_without({"id": one.id, "bytes": one.bytes, "free_us": one.free_us}) for one in _listed(trace)],
        "windows": [window_values(window) for window in trace.windows],
        "memory": {
            "budget": trace.memory.budget,
            "timeline": [
                {"stage": stage, "t_us": at, "live": live}
                for stage, points in sorted(trace.memory.timeline.items())
                for at, live in points
            ],
        },
        "schedule": None if pipeline is None else vars(pipeline),
        "early_stop": trace.early_stop,
    }


def _listed(trace: Trace) -> list[Tensor]:
    return [
        tensor if tensor.free_us is None or math.isfinite(tensor.free_us) else Tensor(tensor.id, tensor.bytes)
        for tensor in trace.tensors.values()
    ]


def operator_values(op: Operator) -> dict[str, Any]:
    """Return one operator as JSON values; defaults are left out."""
    segment, checking = op.checking.segment, op.checking
    required = {"id": op.id, "name": op.name, "phase": op.place.phase, "t0_us": op.start_us, "t_us": op.t_us}
    place = {name: getattr(op.place, name) for name in ("stage", "microbatch", "layer", "chunk")}
    optional = {
        "in_ids": list(op.in_ids),
        "out_ids": list(op.out_ids),
        "compare_us": checking.compare_us,
        "defer_us": checking.defer_us,
        "mutates": list(checking.mutates),
        "rng": checking.rng,
        "ac_segment": segment and segment.name,
        "is_segment_last": segment is not None and segment.last,
        "comm_tail": segment is not None and segment.comm_tail,
    }
    given = {name: value for name, value in optional.items() if value}
    return {**required, **place, **given, **({} if checking.deterministic else {"deterministic": False})}


def window_values(window: Window) -> dict[str, Any]:
    """Return one window as JSON values."""
    times = {"t0_us": window.start_us, "dur_us": window.dur_us}
    return {"id": window.id, "stage": window.stage, **times, "kind": window.kind, "dynamic": window.dynamic}


def _without(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
