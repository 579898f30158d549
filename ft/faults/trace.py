"""Trace files: recorded failures of another run, one per line, which are injected again.

An example::

    # seconds since training began, kind, logical rank; kind and rank may be omitted
    12.5
    30   kill  2
    {"time": 41, "kind": "slow", "rank": 3, "for": 5}
"""

from pathlib import Path
from typing import Any

from ft.base import bounded_json, files
from ft.base.errors import UserError
from ft.faults.flip import KEYS as FLIP_KEYS
from ft.faults.spec import ONLY_FOR, FaultSpec, from_values


def read_trace(spec: FaultSpec) -> list[FaultSpec]:
    """Return one entry for each line of the file ``spec.trace``, earliest first. Omitted values are those of ``spec``.

    Raises:
        UserError: the file or a line is not valid; the message names the line number.
    """
    path = Path(spec.trace)
    try:
        lines = files.read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{spec.text!r}: trace {path} cannot be read: {error}", "give a readable text file") from error
    found = []
    for number, line in enumerate(lines, 1):
        line = line.partition("#")[0].strip() if not line.lstrip().startswith("{") else line.strip()
        if line:
            found.append(_with_defaults(_values(line, f"{path}:{number}"), spec, f"{path}:{number}"))
    return sorted(found, key=lambda one: one.time)


def _values(line: str, place: str) -> dict[str, Any]:
    if not line.startswith("{"):
        words = line.replace(",", " ").split()
        if len(words) > 3:
            raise UserError(f"{place}: {line!r} has {len(words)} words", "a line is: TIME [KIND] [RANK]")
        return dict(zip(("time", "kind", "rank"), words, strict=False))
    try:
        return dict(bounded_json.loads(line))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{place} is not a JSON object: {error}", 'for example: {"time": 41, "kind": "kill"}'
        ) from error


def _with_defaults(values: dict[str, Any], spec: FaultSpec, place: str) -> FaultSpec:
    if "time" not in values or {"step", "every", "trace"} & values.keys():
        raise UserError(
            f"{place}: this line of the trace has no time", "TIME [KIND] [RANK], or a JSON object with time"
        )
    if values.setdefault("kind", spec.kind) == spec.kind:
        defaults = {"for": spec.seconds, "factor": spec.factor, "error": spec.error, "copies": spec.copies}
        defaults["value"] = spec.value
        for key, value in defaults.items():
            if spec.kind in ONLY_FOR[key] and value is not None:
                values.setdefault(key, value)
        if spec.flip is not None:
            for key in FLIP_KEYS:
                values.setdefault(key, getattr(spec.flip, key) if key != "bit" or spec.flip.bit is not None else "any")
        if not {"rank", "node"} & values.keys():
            victim = {"rank": spec.rank, "node": spec.node}
            values.update({key: value for key, value in victim.items() if value is not None})
    return from_values(values, place)
