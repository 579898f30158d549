"""Parser of the ``--inject`` flag, which lists faults: ``kill@step=20:rank=3,slow@time=30s:rank=random:for=5s``.

The format is ``KIND@KEY=VALUE[:KEY=VALUE...]``; several faults are separated by commas. Examples of the keys::

    when       step=20 | time=90s | trace=FILE (recorded failures)
               every=exponential(mean=60s) | every=weibull(shape=0.7,scale=90s)
               every=exponential(mean=20steps) | every=weibull(shape=0.7,scale=30steps)
    where      rank=3 | rank=random | node=n1 | node=random
               in runs with replicas (FT-HSDP) also: replica=1 | replica=random
    how        phase=backward  for=5s  factor=3  error=software  copies=peer  value=nan
               kind bit-flip: operator=mm  phase=backward  execution=checker  bit=30  mode=stuck  nth=3  probability=0.1
    how often  count=10  until=10m (only with every or trace)
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ft.base.errors import UserError
from ft.faults.distributions import Distribution, parse_distribution, parse_duration
from ft.faults.faults import COPIES, ERRORS, OF_CONTROL, OF_NODE, PHASES, RECOVERY_PHASES, VALUES
from ft.faults.flip import BIT_FLIP, Flip, one_of, read_flip, whole
from ft.faults.flip import KEYS as FLIP_KEYS
from ft.faults.table import NAMES

KEYS = ("step", "time", "every", "trace", "rank", "node", "phase", "for", "factor", "error", "copies", "value")
KEYS += ("count", "until", "replica", *(key for key in FLIP_KEYS if key != "phase"))
_WHEN = ("step", "time", "every", "trace")
_LASTING = {
    "slow": 10.0,
    "partition": 10.0,
    "disk-full": 10.0,
    "delay-frames": 0.5,
    "lose-reports": 0.5,
    "duplicate-reports": 2.0,
    "reorder-reports": 2.0,
    "delay-reports": 2.0,
}
"""Kind of a fault that ends by itself -> its duration in seconds if the key ``for`` is not given."""

ONLY_FOR = {
    "for": tuple(kind for kind in NAMES if kind in (*_LASTING, "hang", "gil", "stall")),
    "factor": ("slow",),
    "error": ("exception",),
    "copies": ("corrupt-snapshot",),
    "value": ("corrupt-tensor",),
    **{key: (BIT_FLIP,) for key in FLIP_KEYS if key != "phase"},
}
"""Key -> the kinds of faults that accept it, for the keys that only some kinds accept."""


@dataclass(frozen=True)
class FaultSpec:
    """One entry of ``--inject`` as the user wrote it. Random victims and times are drawn later, by the fault schedule.

    Exactly one of ``step``, ``time``, ``every`` and ``trace`` is not None.

    Attributes:
        text: the entry as written, for messages.
        kind: kind of the fault, as in ``Fault``.
        step: step in which the fault happens, counted from 1.
        time: seconds from the beginning of training to the fault.
        every: distribution of the times between faults.
        trace: path of a file of recorded failures.
        rank: logical rank that is hit, "random", or None.
        node: node that is hit, "random", or None.
        phase: point of the step or of the recovery at which the fault happens, as in ``Fault``.
        seconds: duration of the fault in seconds, as in ``Fault``.
        factor: slowdown of a step, as in ``Fault``.
        error: kind of exception, as in ``Fault``.
        copies: which snapshots are corrupted, as in ``Fault``.
        value: how a tensor is corrupted, as in ``Fault``.
        count: maximum number of faults of a distribution or trace.
        until: seconds from the beginning of training after which a distribution or trace causes no more faults.
        replica: replica to which ``rank`` or ``node`` belongs, or "random". None: ranks and nodes are numbered over all
            replicas.
        flip: options of a bit flip; None for other kinds.
    """

    text: str
    kind: str
    step: int | None = None
    time: float | None = None
    every: Distribution | None = None
    trace: str | None = None
    rank: int | str | None = None
    node: str | None = None
    phase: str = "between"
    seconds: float | None = None
    factor: float = 3.0
    error: str = "recoverable"
    copies: str = "own"
    value: str = "bit"
    count: int | None = None
    until: float | None = None
    replica: int | str | None = None
    flip: Flip | None = None


def parse(text: str) -> list[FaultSpec]:
    """Parse the value of ``--inject`` and return its faults.

    Raises:
        UserError: the value is empty, or a part of it is invalid; the message names that part.
    """
    parts = [part for part in _split(text, ",") if part.strip()]
    if not parts:
        raise UserError("--inject names no fault", "for example: --inject kill@step=20:rank=3")
    return [_parse_one(part.strip()) for part in parts]


def from_values(values: Mapping[str, Any], text: str) -> FaultSpec:
    """Return the fault that a kind and keys describe.

    Args:
        values: "kind" and the keys of the fault, as text or as JSON values.
        text: origin of the values, for messages.

    Raises:
        UserError: a key or value is invalid, or keys contradict each other.
    """
    keys = dict(values)
    kind = str(keys.pop("kind", ""))
    if kind not in NAMES:
        raise UserError(f"{text!r}: there is no fault named {kind!r}", f"one of: {', '.join(NAMES)}")
    for key in keys:
        if key not in KEYS:
            raise UserError(f"{text!r}: there is no key named {key!r}", f"one of: {', '.join(KEYS)}")
    flip = None
    if kind == BIT_FLIP:
        # For a bit flip, ``phase`` selects the operators that are hit, not a point of the step. The flip is active from
        # the beginning of its step, so FaultSpec.phase keeps its default.
        flip = read_flip({key: keys.pop(key) for key in FLIP_KEYS if key in keys}, text)
    _check_combination(kind, keys, text)
    read = {_FIELDS.get(key, key): _read(key, value, text) for key, value in keys.items()}
    read.setdefault("seconds", _LASTING.get(kind))
    return FaultSpec(text=text, kind=kind, flip=flip, **read)


def _parse_one(text: str) -> FaultSpec:
    kind, at, rest = text.partition("@")
    values: dict[str, str] = {"kind": kind.strip()}
    for part in _split(rest, ":") if at else []:
        key, equals, value = part.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not value:
            raise UserError(f"{text!r}: {part!r} is not KEY=VALUE", f"keys: {', '.join(KEYS)}")
        if key in values:
            raise UserError(f"{text!r}: {key} is given twice", "give it once")
        values[key] = value
    return from_values(values, text)


def _split(text: str, separator: str) -> list[str]:
    """Split ``text`` at every ``separator`` that is not inside parentheses."""
    return re.split(re.escape(separator) + r"(?![^(]*\))", text)


def _check_combination(kind: str, keys: Mapping[str, Any], text: str) -> None:
    given = [key for key in _WHEN if key in keys]
    if len(given) != 1:
        says = " and ".join(given) or "nothing"
        raise UserError(
            f"{text!r}: exactly one key must say when the fault happens, and there is {says}",
            f"exactly one of: {', '.join(_WHEN)}",
        )
    for key, kinds in ONLY_FOR.items():
        if key in keys and kind not in kinds:
            raise UserError(f"{text!r}: {key} has no meaning for {kind}", f"{key} goes with: {', '.join(kinds)}")
    for key in ("count", "until"):
        if key in keys and given[0] not in ("every", "trace"):
            raise UserError(f"{text!r}: {key} has no meaning with {given[0]}", f"use {key} only with every or trace")
    if "until" in keys and "steps" in str(keys.get("every")):
        raise UserError(f"{text!r}: until is a time, but every counts steps", "give count, or every with a time")
    if "rank" in keys and "node" in keys:
        raise UserError(f"{text!r}: it can hit a rank or a node, not both", "give rank or node")
    if "phase" in keys and given[0] != "step":
        raise UserError(f"{text!r}: a phase needs a step", "give step=NUMBER, or remove phase")
    if "phase" in keys and ("node" in keys or kind == "partition"):
        raise UserError(f"{text!r}: only the fault of one rank can happen inside a phase", "remove phase")
    if kind == "partition" and "rank" in keys:
        raise UserError(f"{text!r}: a network belongs to a node", "give node=NAME or node=random")
    if kind in (*OF_CONTROL, *OF_NODE) and "rank" in keys and keys.get("phase") not in RECOVERY_PHASES:
        what = "there is one control plane" if kind in OF_CONTROL else "an agent belongs to a node"
        fix = f"remove rank, or give the phase of a recovery in which the worker of that rank kills it: {_RECOVERY}"
        raise UserError(f"{text!r}: {what}", fix)
    if kind in (*OF_CONTROL, *OF_NODE) and "phase" in keys and "rank" not in keys:
        raise UserError(
            f"{text!r}: a phase belongs to one worker", "give the rank of the worker that carries the fault out"
        )
    if kind in OF_CONTROL and "node" in keys:
        raise UserError(f"{text!r}: there is one control plane", "remove node")


_RECOVERY = ", ".join(RECOVERY_PHASES)
_FIELDS = {"for": "seconds"}


def _read(key: str, value: Any, text: str) -> Any:
    try:
        return _READERS[key](value)
    except (ValueError, TypeError) as error:
        raise UserError(f"{text!r}: {key}={value} is wrong: {error}", _ALLOWED[key]) from error


def _rank(value: Any) -> int | str:
    return "random" if value == "random" else whole(0)(value)


def _factor(value: Any) -> float:
    number = float(value)
    if not 1.0 < number <= 1000.0:
        raise ValueError("not above 1 and at most 1000")
    return number


_READERS = {
    "step": whole(1),
    "time": lambda value: parse_duration(value, least=0.0),
    "every": parse_distribution,
    "trace": str,
    "rank": _rank,
    "replica": _rank,
    "node": str,
    "phase": one_of(*PHASES),
    "for": parse_duration,
    "factor": _factor,
    "error": one_of(*ERRORS),
    "copies": one_of(*COPIES),
    "value": one_of(*VALUES),
    "count": whole(1),
    "until": parse_duration,
}
_DURATION = "seconds, or a number with ms, s, m or h: 500ms, 90s, 2m"
_ALLOWED = {
    "step": "a step number from 1",
    "time": _DURATION,
    "every": "exponential(mean=60s) or weibull(shape=0.7,scale=90s), or with steps: exponential(mean=20steps)",
    "trace": "the path of a file",
    "rank": "a logical rank from 0, or random",
    "replica": "a replica from 0, or random",
    "node": "a node's name (n0, n1, ...), its number, or random",
    "phase": f"one of: {', '.join(PHASES)}",
    "for": _DURATION,
    "factor": "a number above 1 and at most 1000",
    "error": f"one of: {', '.join(ERRORS)}",
    "copies": f"one of: {', '.join(COPIES)}",
    "value": f"one of: {', '.join(VALUES)}",
    "count": "a number from 1",
    "until": _DURATION,
}
