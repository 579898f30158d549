"""Read, check and write the trace and plan files of DMR: one JSON object with times in microseconds and sizes in bytes.

A trace file has ``version``, and the fields of ``Trace``: ``ops``, ``tensors`` and ``windows`` are lists of the records
in ``ft.systems.dmr.plan.trace``; ``memory.timeline`` is a list of ``stage``, ``t_us`` and ``live`` (bytes in use from
then on) for each change; the pipeline is called ``schedule``. A plan file has the fields of ``Plan`` besides; the AGC
segments are called ``agc_segments``.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, ValidationError, convert, structs
from msgspec.json import encode

from ft.base import bounded_json, files
from ft.base.errors import UserError
from ft.systems.dmr.plan.check import problems
from ft.systems.dmr.plan.trace import (
    FINGERPRINT,
    INTER,
    INTRA,
    PHASES,
    SETS,
    AgcSegment,
    Amount,
    Assignment,
    Count,
    Memory,
    Operator,
    Plan,
    Predicted,
    Tensor,
    Trace,
    Window,
)
from ft.systems.schedule.kinds import Pipeline

VERSION = 2
"""Version of the file format. Files of other versions are refused."""
MOST_UNITS = 10_000_000
"""Number of forward passes of one iteration, over all stages, above which a schedule is refused as a mistake."""

_PROFILE_AGAIN = "profile again: ft dmr profile --out FILE"
_PLAN_AGAIN = "plan again: ft dmr plan PROFILE --memory-budget SIZE --out FILE"

_T = TypeVar("_T")
_CHOICES = {"phase": PHASES, "kind": INTER + INTRA, "set": SETS}


class _Level(Struct):
    t_us: Amount
    live: Amount
    stage: Count = 0


class _Memory(Struct):
    timeline: list[_Level] = []
    budget: Amount | None = None


class _Trace(Struct):
    fingerprint: dict[str, Any]
    ops: list[Operator]
    tensors: list[Tensor]
    windows: list[Window]
    memory: _Memory
    schedule: Pipeline | None = None
    early_stop: bool = False


class _Plan(Struct):
    assign: dict[str, Any]
    predicted: Predicted
    agc_segments: list[AgcSegment] = []
    phases: tuple[Predicted, ...] = ()


class _File:
    """The JSON object of a file, which users may have edited. A field that is null counts as absent. ``fix``: what the
    user can do if the file cannot be used.

    Raises:
        UserError: the file cannot be read, is truncated, is not a JSON object, or has another version.
    """

    def __init__(self, path: Path, fix: str):
        self._path, self._fix = path, fix
        try:
            self.values = bounded_json.loads(files.read_text(path), object_pairs_hook=_once)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}", fix) from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is no text: {error}", fix) from error
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}"
            raise UserError(f"{path} is not JSON, or is truncated: {error.msg} at {where}", fix) from error
        except ValueError as error:
            raise UserError(f"{path} cannot be understood: {error}", fix) from error
        if not isinstance(self.values, dict):
            raise self.error("is not a JSON object")
        if "version" not in self.values:
            raise self.error("has no 'version'")
        if self.values["version"] != VERSION:
            raise self.error(f"has version {self.values['version']}, but this version of the program reads {VERSION}")

    def error(self, problem: str, place: str = "") -> UserError:
        """Return the error to raise: the problem, preceded by the file and the place in it ("prof.json: ops[3]")."""
        return UserError(f"{self._path}{place and f': {place}'} {problem}", self._fix)

    def convert(self, kind: type[_T], values: Any = None, place: str = "") -> _T:
        """Return the values at ``place``, by default all values of the file, as ``kind``.

        Raises:
            UserError: a value is missing, or is not what ``kind`` allows; the message names it.
        """
        values = self.values if values is None else values
        try:
            return convert(values, kind)
        except ValidationError as error:
            raise self._refused(str(error), values, place) from error
        except UserError as error:  # of a schedule that does not exist
            raise self.error(f"is impossible: {error.problem}", "schedule") from error

    def _refused(self, problem: str, values: Any, place: str) -> UserError:
        """Return the error for a message of msgspec such as "Expected `float`, got `str` - at `$.ops[3].t_us`"."""
        said, _, path = problem.rstrip("`").partition(" - at `$.")
        here = ": ".join(part for part in (place, path.replace(".", ": ")) if part)
        if missing := re.search(r"missing required field `(\w+)", said):
            return self.error(f"has no {missing[1]!r}", here)
        if said.startswith("Expected `object`"):
            return self.error("is not a JSON object", here)
        for step in re.findall(r"\w+", path):
            values = values[int(step) if isinstance(values, list) else step]
        place, _, name = here.rpartition(": ")
        if said.startswith("Invalid enum"):
            said = f"which is none of {', '.join(_CHOICES[name])}"
        return self.error(f"has {name} = {values!r}: {said}", place)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from its pairs, without fields that are null; refuse duplicate names, of which Python's reader
    would keep only the last."""
    if len(dict(pairs)) < len(pairs):
        twice = next(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
        raise ValueError(f"an object has {twice!r} twice")
    return {name: value for name, value in pairs if value is not None}


def read_trace(path: Path) -> Trace:
    """Return the trace in a file.

    Raises:
        UserError: the file cannot be read, is truncated, has another version, or describes an impossible trace: a
            field is missing or of another type, an id occurs twice, an operator names an unknown tensor, two operators
            write the same tensor, operators need each other's results in a cycle, or the stage, microbatch or chunk of
            an operator is not in the schedule.
    """
    return _trace(_File(path, _PROFILE_AGAIN))


def _trace(file: _File) -> Trace:
    found = file.convert(_Trace)
    trace = Trace(
        fingerprint=_fingerprint(found.fingerprint, file),
        ops=tuple(sorted(found.ops, key=lambda op: (op.stage, op.start_us))),
        tensors={tensor.id: tensor for tensor in found.tensors},
        windows=tuple(sorted(found.windows, key=lambda one: (one.stage, one.start_us))),
        memory=_memory(found.memory),
        pipeline=found.schedule,
        early_stop=found.early_stop,
    )
    _refuse_twice("tensor", (tensor.id for tensor in found.tensors), file)
    _refuse_inconsistent(trace, file)
    return trace


def _fingerprint(found: dict[str, Any], file: _File) -> dict[str, Any]:
    for name in FINGERPRINT:
        if name not in found:
            raise file.error(f"has no {name!r}", "fingerprint")
    for name, value in found.items():
        if not isinstance(value, str | int | float | bool):
            raise file.error(f"has {name} = {value!r}, which is neither a text nor a number", "fingerprint")
    return found


def _memory(found: _Memory) -> Memory:
    timeline: dict[int, list[tuple[float, float]]] = {}
    for each in found.timeline:
        timeline.setdefault(each.stage, []).append((each.t_us, each.live))
    return Memory({stage: tuple(sorted(points)) for stage, points in timeline.items()}, found.budget)


def _refuse_inconsistent(trace: Trace, file: _File) -> None:
    _refuse_twice("operator", (op.id for op in trace.ops), file)
    _refuse_twice("window", (window.id for window in trace.windows), file)
    producer: dict[str, str] = {}
    for op in trace.ops:
        unknown = [each for each in (*op.tensors, *op.mutates) if each not in trace.tensors]
        if unknown:
            raise file.error(f"has an operator {op.id!r} that uses a tensor {unknown[0]!r} it does not list")
        for each in op.out_ids:
            if each in producer:
                raise file.error(f"has two operators that write tensor {each!r}: {producer[each]!r} and {op.id!r}")
            producer[each] = op.id
    waits = {op.id: {producer[each] for each in op.in_ids if each in producer} - {op.id} for op in trace.ops}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        circle = " <- ".join(map(str, error.args[1]))
        raise file.error(f"has a cycle: operators need each other's results: {circle}") from error
    if trace.pipeline is not None:
        if math.prod(_shape(trace.pipeline)) > MOST_UNITS:
            raise file.error(f"has more than {MOST_UNITS} forwards: {trace.pipeline}", "schedule")
        _fits(trace, trace.pipeline, file)


def _fits(trace: Trace, pipeline: Pipeline, file: _File) -> None:
    for op in trace.ops:
        if op.phase == PHASES[-1] and op.stage < pipeline.stages:
            continue
        here = (op.stage, op.microbatch, op.chunk)
        if any(is_ >= of for is_, of in zip(here, _shape(pipeline), strict=True)):
            said = f"{pipeline.stages} stages, {pipeline.microbatches} microbatches, {pipeline.chunks} chunks"
            where = f"stage {here[0]}, microbatch {here[1]}, chunk {here[2]} (from 0)"
            raise file.error(f"has an operator {op.id!r} on {where}, outside its schedule of {said}")


def _shape(pipeline: Pipeline) -> tuple[int, int, int]:
    return pipeline.stages, pipeline.microbatches, pipeline.chunks


def _refuse_twice(what: str, ids: Iterable[str], file: _File) -> None:
    seen: set[str] = set()
    for each in ids:
        if each in seen:
            raise file.error(f"lists {what} {each!r} twice")
        seen.add(each)


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace to a file.

    Raises:
        UserError: the file cannot be written.
    """
    _write(path, _trace_values(trace))


def read_plan(path: Path) -> Plan:
    """Return the plan in a file.

    Raises:
        UserError: the file cannot be read, is truncated, has another version, is not a plan, or contains a plan that
            cannot be followed: operators are unassigned or unknown, windows or memory are overrun, or
            ``ft.systems.dmr.plan.check`` finds another problem.
    """
    file = _File(path, _PLAN_AGAIN)
    if "assign" not in file.values:
        raise UserError(f"{path} is a profile, not a plan: it assigns no operators", f"plan it: ft dmr plan {path} ...")
    trace, found = _trace(file), file.convert(_Plan)
    assign = {name: file.convert(Assignment, how, f"assign: {name}") for name, how in found.assign.items()}
    _refuse_twice("AGC segment", (segment.id for segment in found.agc_segments), file)
    segments = {segment.id: segment for segment in found.agc_segments}
    plan = Plan(trace, assign, segments, found.predicted, found.phases)
    wrong = list(islice(problems(plan), 4))
    if wrong:
        more = "; and more" if len(wrong) > 3 else ""
        raise file.error("cannot be followed: " + "; ".join(wrong[:3]) + more)
    return plan


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan to a file.

    Raises:
        UserError: the file cannot be written.
    """
    segments = list(plan.segments.values())
    found = _Plan(dict(plan.assign), plan.predicted, segments, plan.phases)
    _write(path, _trace_values(plan.trace) | structs.asdict(found))


def _trace_values(trace: Trace) -> dict[str, Any]:
    """Return the fields of a trace file."""
    points = [_Level(at, live, stage) for stage, level in sorted(trace.memory.timeline.items()) for at, live in level]
    found = _Trace(
        fingerprint=dict(trace.fingerprint),
        ops=list(trace.ops),
        tensors=list(trace.tensors.values()),
        windows=list(trace.windows),
        memory=_Memory(points, trace.memory.budget),
        schedule=trace.pipeline,
        early_stop=trace.early_stop,
    )
    return {"version": VERSION, **structs.asdict(found)}


def _write(path: Path, values: dict[str, Any]) -> None:
    """Write ``values`` as JSON to ``path`` atomically: a crash leaves no incomplete file there.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        files.replace(path, encode(values) + b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}", "choose another path") from error


def differences(planned: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """Return the differences between the fingerprints of a plan and of a run that is to follow it: a text with name,
    planned value and the run's value for each."""
    names = [*FINGERPRINT, *sorted((planned.keys() | run.keys()) - set(FINGERPRINT))]
    return [
        f"{name}: planned for {planned.get(name)!r}, the run has {run.get(name)!r}"
        for name in names
        if planned.get(name) != run.get(name)
    ]


def refuse_plan_of_other_run(plan: Plan, run: Mapping[str, Any]) -> None:
    """Check that the fingerprint of the plan is that of the run which is to follow the plan.

    Raises:
        UserError: the plan was made for another run; the message says what differs.
    """
    found = differences(plan.trace.fingerprint, run)
    if found:
        fix = "profile this run and plan again: ft dmr profile, then ft dmr plan"
        raise UserError("the DMR plan was made for another run: " + "; ".join(found), fix)
