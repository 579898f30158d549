"""Bit flips in what operators compute and in what reaches other ranks: which results, which bit, how often.

A flip is done by DMR's runtime (``ft.systems.dmr.runtime.falsify``), which every operator goes through; without DMR
there is nobody to do it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ft.base.errors import UserError

BIT_FLIP = "bit-flip"
ANY = "any"
ONCE, REPEAT, STUCK = "once", "repeat", "stuck"
PHASES = ("forward", "recompute", "backward", "between", "optimizer")
PRIMARY, CHECKER = "primary", "checker"
P2P, ALL_REDUCE = "p2p", "all-reduce"
PAYLOADS = (P2P, ALL_REDUCE)

KEYS = ("operator", "phase", "execution", "bit", "mode", "nth", "probability")


@dataclass(frozen=True)
class Flip:
    """Which results are hit, and how.

    Attributes:
        operator: torch's name: "mm"; "add_" with any overload, "add_.Tensor" with that one; * and ? as in names of
            files. Or one of ``PAYLOADS``: what is received from another stage, the result of an all-reduce.
        phase: of ``PHASES``. execution: PRIMARY, whose result is used, or CHECKER. Both may be ANY.
        bit: counted from the lowest; None: another one each time.
        mode: ONCE: the first result that is hit. REPEAT: every one. STUCK: the same bit of the same element has the
            same value from then on, in one of the two executions of each operator: one unit of the device is broken,
            and which of the two it gets is drawn. (A bit that is stuck in both is no difference, and DMR is blind to
            it.)
        nth: results that fit are counted from 1; those before the nth are spared.
        probability: of each of them to be hit.
        seed: of all that is drawn.
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
        return self.operator in PAYLOADS

    def fits(self, operator: str, phase: str, execution: str | None) -> bool:
        """Whether a result may be hit. ``execution``: None for a payload."""
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
        said = {key: getattr(self, key) for key in KEYS}
        differing = {key: value for key, value in said.items() if value != getattr(_PLAIN, key)}
        return " ".join(f"{key}={value}" for key, value in differing.items())


_PLAIN = Flip()


def read_flip(values: Mapping[str, Any], text: str) -> Flip:
    """A flip from its keys, as texts or JSON values.

    Args:
        text: where they come from, for messages.

    Raises:
        UserError: a value cannot be meant.
    """
    read = {}
    for key, value in values.items():
        try:
            read[key] = _READERS[key](value)
        except (ValueError, TypeError) as error:
            raise UserError(f"{text!r}: {key}={value} is wrong: {error}", _ALLOWED[key]) from error
    flip = Flip(**read)
    if flip.is_payload and flip.execution != ANY:
        raise UserError(
            f"{text!r}: {flip.operator} is sent once, there is no {flip.execution} of it", "leave execution out"
        )
    if flip.mode == STUCK and flip.execution != ANY:
        raise UserError(f"{text!r}: a stuck bit meets either execution", "leave execution out, or give mode=repeat")
    if flip.mode == STUCK and flip.probability != 1.0:
        raise UserError(f"{text!r}: a stuck bit is always stuck", "leave probability out, or give mode=repeat")
    return flip


def _word(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("no name")
    return value


def _one_of(*choices: str):
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError("no such value")
        return value

    return read


def _bit(value: Any) -> int | None:
    if value == ANY:
        return None
    number = int(str(value))
    if not 0 <= number < 64:
        raise ValueError("no bit has that number")
    return number


def _count(value: Any) -> int:
    number = int(str(value))
    if number < 1:
        raise ValueError("less than 1")
    return number


def _share(value: Any) -> float:
    number = float(value)
    if not 0.0 < number <= 1.0:
        raise ValueError("not above 0 and at most 1")
    return number


_READERS = {
    "operator": _word,
    "phase": _one_of(ANY, *PHASES),
    "execution": _one_of(ANY, PRIMARY, CHECKER),
    "bit": _bit,
    "mode": _one_of(ONCE, REPEAT, STUCK),
    "nth": _count,
    "probability": _share,
}
_ALLOWED = {
    "operator": f"a name of torch's, such as mm, add_ or *norm*, or one of: {ANY}, {', '.join(PAYLOADS)}",
    "phase": f"one of: {ANY}, {', '.join(PHASES)}",
    "execution": f"one of: {ANY}, {PRIMARY}, {CHECKER}",
    "bit": f"a number from 0, the lowest, or {ANY}",
    "mode": f"one of: {ONCE}, {REPEAT}, {STUCK}",
    "nth": "a number from 1",
    "probability": "a number above 0 and at most 1",
}
