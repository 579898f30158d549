"""Read, check and write the files of DMR: traces, plans, and operators that are not reproducible.

Each is one JSON object: ``version``, and the fields of ``Trace``, ``Plan`` (``ft.systems.dmr.plan.trace``) or
``Unstable``, with times in microseconds and sizes in bytes.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, ValidationError, convert
from msgspec.json import encode, format
from msgspec.structs import asdict, replace

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
    Assignment,
    Plan,
    Tensor,
    Trace,
)
from ft.systems.schedule.kinds import Pipeline, orders

VERSION = 3
"""Version of the format of traces and plans. Files of other versions are refused."""
MOST_UNITS = 10_000_000
"""Number of forward passes of one iteration, over all stages, above which a schedule is refused as a mistake."""

_PROFILE_AGAIN = "profile again: ft dmr profile --out FILE"
_PLAN_AGAIN = "plan again: ft dmr plan PROFILE --memory-budget SIZE --out FILE"

_T = TypeVar("_T")
_CHOICES = {"phase": PHASES, "kind": INTER + INTRA, "set": SETS}


class _File:
    """The JSON object of a file, which users may have edited. A field that is null counts as absent.

    Args:
        fix: what the user can do if the file cannot be used.
        version: the version of the format that can be read.
        default: the version of a file that names none; None: such a file is refused.

    Raises:
        UserError: the file cannot be read, is truncated, is not a JSON object, or has another version.
    """

    def __init__(self, path: Path, fix: str, version: int = VERSION, default: int | None = None):
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
        found = self.values.get("version", default)
        if found is None:
            raise self.error("has no 'version'")
        if found != version:
            raise self.error(f"has version {found}, but this version of the program reads {version}")

    def error(self, problem: str, place: str = "") -> UserError:
        """Return the error to raise: the problem, preceded by the file and the place in it ("prof.json: ops[3]")."""
        return UserError(f"{self._path}{place and f': {place}'} {problem}", self._fix)

    def convert(self, kind: type[_T], values: Any, place: str = "") -> _T:
        """Return the values at ``place`` as ``kind``.

        Raises:
            UserError: a value is missing, or is not what ``kind`` allows; the message names it.
        """
        try:
            return convert(values, kind, str_keys=True)
        except ValidationError as error:
            raise self._refused(str(error), values, place) from error
        except UserError as error:  # of a schedule that does not exist
            raise self.error(f"is impossible: {error.problem}", "pipeline") from error

    def named(self, kind: type[_T], values: Any, place: str) -> None:
        """Convert the values of the object ``values[place]`` one by one, so that a message names the one it is about.

        Raises:
            UserError: as ``convert``.
        """
        found = values.get(place) if isinstance(values, dict) else None
        if isinstance(found, dict):
            values[place] = {name: self.convert(kind, one, f"{place}: {name}") for name, one in found.items()}

    def _refused(self, problem: str, values: Any, place: str) -> UserError:
        """Return the error for a message of msgspec such as "Expected `float`, got `str` - at `$.ops[3].t_us`"."""
        said, _, path = problem.rstrip("`").partition(" - at `$.")
        here = ": ".join(part for part in (place, path.replace(".", ": ")) if part)
        if missing := re.search(r"missing required field `(\w+)", said):
            return self.error(f"has no {missing[1]!r}", here)
        if said.startswith("Expected `object`"):
            return self.error("is not a JSON object", here)
        if "..." in path or not path:
            return self.error(f"has a value that cannot be: {said}", here)
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
    file = _File(path, _PROFILE_AGAIN)
    return _trace(file, file.values.get("trace", file.values))


def _trace(file: _File, values: Any) -> Trace:
    file.named(Tensor, values, "tensors")
    trace = file.convert(Trace, values)
    for name in FINGERPRINT:
        if name not in trace.fingerprint:
            raise file.error(f"has no {name!r}", "fingerprint")
    timeline = {stage: tuple(sorted(points)) for stage, points in trace.memory.timeline.items()}
    trace = replace(
        trace,
        memory=replace(trace.memory, timeline=timeline),
        ops=tuple(sorted(trace.ops, key=lambda op: (op.stage, op.start_us))),
        windows=tuple(sorted(trace.windows, key=lambda one: (one.stage, one.start_us))),
    )
    _refuse_inconsistent(trace, file)
    return trace


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
            raise file.error(f"has more than {MOST_UNITS} forwards: {trace.pipeline}", "pipeline")
        _fits(trace, trace.pipeline, file)
        if set(chain(*orders(trace.pipeline))) != {unit for unit, _, _ in trace.units}:
            raise file.error("has other units than its schedule", "units")


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
    _write(path, encode({"version": VERSION, **asdict(trace)}))


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
    file.values["trace"] = _trace(file, file.values.get("trace", {}))
    file.named(Assignment, file.values, "assign")
    file.named(AgcSegment, file.values, "segments")
    plan = file.convert(Plan, file.values)
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
    _write(path, encode({"version": VERSION, **asdict(plan)}))


def _write(path: Path, text: bytes) -> None:
    """Write ``text`` to ``path`` atomically: a crash leaves no incomplete file there.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        files.replace(path, text + b"\n")
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


class Unstable(Struct, frozen=True):
    """Operators that are not reproducible: they compute a different result each time on the same inputs, so that
    comparing two executions is meaningless. ``ft dmr selftest --out`` writes their names; a run with
    ``--ft-dmr-unstable`` leaves them unverified. ``torch`` and ``device``: with which they were found."""

    operators: tuple[str, ...]
    torch: str = ""
    device: str = ""
    version: int = 1


def write_unstable(path: Path, found: Unstable) -> None:
    """Write ``found`` to ``path``.

    Raises:
        UserError: the file cannot be written.
    """
    _write(path, format(encode(found), indent=1))


def read_unstable(path: Path) -> Unstable:
    """Read a file that ``write_unstable`` wrote.

    Raises:
        UserError: the file cannot be read, is not JSON, has no list of names, or has an unknown version.
    """
    file = _File(path, "write the file with ft dmr selftest --out", version=1, default=1)
    return file.convert(Unstable, file.values)
