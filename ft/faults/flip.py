"""Bit flips in the results of operators and in received messages: which results, which bit, and how often.

The runtime of DMR (``ft.systems.dmr.runtime.injection``) carries a flip out, because every operator passes through it.
So bit flips can be injected only in runs with DMR.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ft.base.errors import UserError
from ft.base.quantities import between, whole

BIT_FLIP = "bit-flip"
ANY = "any"
ONCE, REPEAT, STUCK = "once", "repeat", "stuck"
PHASES = ("forward", "recompute", "backward", "between", "optimizer")
PRIMARY, CHECKER = "primary", "checker"
P2P, ALL_REDUCE = "p2p", "all-reduce"
PAYLOADS = (P2P, ALL_REDUCE)
"""Values of ``operator`` for received messages instead of results of operators."""


@dataclass(frozen=True)
class FaultKey:
    """A key with which a fault is described.

    Attributes:
        read: returns the value, from text or a JSON value; raises ValueError or TypeError.
        says: what the key says, as a sentence.
        kinds: the kinds of faults that accept it; empty: all.
    """

    read: Callable[[Any], Any]
    allowed: str
    says: str
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Flip:
    """Which results get a flipped bit, and how.

    Attributes:
        operator: torch's name of the operator: "mm"; "add_" matches all its overloads, "add_.Tensor" one; * and ? are
            wildcards. Or one of ``PAYLOADS``: data from another pipeline stage, or the result of an all-reduce.
        execution: PRIMARY (the execution whose result is used), CHECKER (the one that is compared with it), or ANY.
        bit: bit number, counted from the lowest; None: a random bit each time.
        mode: ONCE: only the first matching result. REPEAT: every matching result. STUCK: from the first hit on, the
            same bit of the same element has a constant value, in one execution of each operator. This models one
            defective unit of the device; a random draw decides which of the two executions runs on it. (DMR cannot
            detect a bit that is stuck in both executions.)
        nth: number of the first matching result that may be hit, counted from 1.
    """

    operator: str = ANY
    phase: str = ANY
    execution: str = ANY
    bit: int | None = None
    mode: str = ONCE
    nth: int = 1
    probability: float = 1.0
    seed: int = 0

    @property
    def is_payload(self) -> bool:
        """Return whether the flip changes received messages instead of results of operators."""
        return self.operator in PAYLOADS

    def fits(self, operator: str, phase: str, execution: str | None) -> bool:
        """Return whether a result may be hit.

        Args:
            operator: name of the operator, such as ``add_.Tensor``; of a received message, its kind.
            execution: which of the two executions this is; None for a received message.
        """
        if self.phase not in (ANY, phase):
            return False
        if self.is_payload or execution is None:
            return execution is None and self.operator == operator
        if self.execution not in (ANY, execution):
            return False
        return self.operator == ANY or any(
            fnmatchcase(name, self.operator) for name in (operator, operator.split(".")[0])
        )

    def __str__(self) -> str:
        differing = {key: value for key, value in vars(self).items() if value != getattr(_PLAIN, key) and key != "seed"}
        return " ".join(f"{key}={value}" for key, value in differing.items())


_PLAIN = Flip()


def read_flip(values: Mapping[str, Any], text: str) -> Flip:
    """Return the flip that its keys describe, as texts or JSON values.

    Args:
        text: origin of the values, for messages.

    Raises:
        UserError: a value is not valid.
    """
    flip = Flip(**read_values({**KEYS, "phase": _PHASE}, values, text))
    if flip.is_payload and flip.execution != ANY:
        raise UserError(
            f"{text!r}: {flip.operator} is sent once and has no {flip.execution} execution", "remove execution"
        )
    if flip.mode == STUCK and flip.execution != ANY:
        raise UserError(
            f"{text!r}: a stuck bit hits one of the two executions at random", "remove execution, or give mode=repeat"
        )
    if flip.mode == STUCK and flip.probability != 1.0:
        raise UserError(f"{text!r}: a stuck bit is stuck in every execution", "remove probability, or give mode=repeat")
    return flip


def read_values(keys: Mapping[str, FaultKey], values: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the values of the keys, read.

    Raises:
        UserError: a value is not valid; ``text`` is the origin of the values, for the message.
    """
    found = {}
    for name, value in values.items():
        try:
            found[name] = keys[name].read(value)
        except (ValueError, TypeError) as error:
            raise UserError(f"{text!r}: {name}={value} is wrong: {error}", keys[name].allowed) from error
    return found


def _word(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("no name")
    return value


def one_of(*choices: str):
    """Return a reader that accepts these values; it raises ValueError for any other."""

    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError("this is not a valid value")
        return value

    return read


def _bit(value: Any) -> int | None:
    return None if value == ANY else whole(0, 63)(value)


_OF_FLIPS = (BIT_FLIP,)
KEYS = {
    "operator": FaultKey(
        _word,
        f"an operator name of torch, such as mm, add_ or *norm*, or one of: {ANY}, {', '.join(PAYLOADS)}",
        "for bit-flip: torch's name of the operator whose results are hit, such as mm; or p2p; or all-reduce.",
        _OF_FLIPS,
    ),
    "execution": FaultKey(
        one_of(ANY, PRIMARY, CHECKER),
        f"one of: {ANY}, {PRIMARY}, {CHECKER}",
        "for bit-flip: which of DMR's two executions is hit, primary or checker.",
        _OF_FLIPS,
    ),
    "bit": FaultKey(
        _bit,
        f"a number from 0, the lowest, or {ANY}",
        "for bit-flip: number of the bit, counted from the lowest; any: a random bit each time.",
        _OF_FLIPS,
    ),
    "mode": FaultKey(
        one_of(ONCE, REPEAT, STUCK),
        f"one of: {ONCE}, {REPEAT}, {STUCK}",
        "for bit-flip: once, repeat (every matching result) or stuck (the same bit from then on).",
        _OF_FLIPS,
    ),
    "nth": FaultKey(
        whole(1),
        "a number from 1",
        "for bit-flip: number of the first matching result that may be hit, counted from 1.",
        _OF_FLIPS,
    ),
    "probability": FaultKey(
        between(math.ulp(0.0), 1.0),
        "a number above 0 and at most 1",
        "for bit-flip: probability with which each matching result is hit.",
        _OF_FLIPS,
    ),
}
"""The keys that only bit flips have."""
_PHASE = FaultKey(one_of(ANY, *PHASES), f"one of: {ANY}, {', '.join(PHASES)}", "")
