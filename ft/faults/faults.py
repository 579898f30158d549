"""A planned fault: its kind, its moment, its victim."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.faults.flip import Flip

STEP_PHASES = ("between", "forward", "backward", "reduce", "optimizer", "transfer", "save", "evaluate")
"""Points of a step. between: before anything of the step is done."""

RECOVERY_PHASES = ("leave", "assemble", "rebuild", "restore", "resume")
"""Points of a recovery, each before what it is named for. leave: the closed epoch is left. assemble: a joiner says that
it has arrived. resume: the first step begins. Of replicas, on the one that returns and on the healthy ones alike:
restore: its state is being fetched; resume: the step in which it was is committed, and not yet offered."""

PHASES = STEP_PHASES + RECOVERY_PHASES

ERRORS = ("recoverable", "timeout", "software", "node", "user")
COPIES = ("own", "peer")
VALUES = ("nan", "bit")

OF_CONTROL = ("kill-control",)
OF_NODE = ("partition", "kill-agent")
"""Kinds that hit no worker: the control plane, a node."""


@dataclass(frozen=True)
class Fault:
    """One fault that will happen, or has happened.

    Attributes:
        number: from 1, unique in the run. kind: of ``ft.faults.table.NAMES``.
        step: in which step (the first one is 1), or None; with a phase of a recovery: in the recovery that interrupts
            this step, or the next one after it. time: seconds since training began, where ``step`` is None.
        rank: logical rank that it hits, node: node all of whose workers it hits; both None for kill-control.
        phase: of ``PHASES``, with ``step``. seconds: how long it lasts, None: for ever, or a moment.
        factor: step time with slow over step time without. error: of ``ERRORS``. copies: of ``COPIES``.
        value: of ``VALUES``. flip: of a bit-flip.
    """

    number: int
    kind: str
    step: int | None = None
    time: float | None = None
    rank: int | None = None
    node: str | None = None
    phase: str = "between"
    seconds: float | None = None
    factor: float = 3.0
    error: str = "recoverable"
    copies: str = "own"
    value: str = "bit"
    flip: Flip | None = None

    @property
    def is_agents(self) -> bool:
        """An agent carries it out; no worker can. (With a phase a worker does: it alone knows when that is.)"""
        of_agent = self.kind in (*OF_CONTROL, *OF_NODE) and self.rank is None
        return of_agent or (self.kind == "kill" and self.node is not None)

    def __str__(self) -> str:
        when = f"step {self.step}" if self.step is not None else f"{self.time:.1f} s"
        inside = f" ({self.phase})" if self.step is not None and self.phase != "between" else ""
        victim = f" of rank {self.rank}" if self.rank is not None else f" of node {self.node}" if self.node else ""
        which = f", {self.flip}" if self.flip is not None and str(self.flip) else ""
        return f"{self.kind}{victim} at {when}{inside}{which}"

    def values(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as JSON values."""
        return {name: value for name, value in asdict(self).items() if value != _DEFAULTS.get(name, _NOTHING)}


_NOTHING = object()
_DEFAULTS = {f.name: f.default for f in fields(Fault) if f.name not in ("number", "kind")}


FILE = "FT_FAULTS"
"""The environment variable with the path of the file that ``write`` made. A plan can be longer than a variable or a
socket's buffer can hold."""


def to_json(faults: Sequence[Fault]) -> str:
    """One fault per line."""
    return "[" + ",\n ".join(json.dumps(fault.values(), separators=(",", ":")) for fault in faults) + "]"


def from_json(text: str) -> list[Fault]:
    """What ``to_json`` made.

    Raises:
        UserError: it is something else.
    """
    try:
        return [_fault(values) for values in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise UserError(f"this is not a list of planned faults: {error}", "leave it to ft run to write it") from error


def write(path: Path, faults: Sequence[Fault]) -> None:
    """Makes the file that ``planned`` reads; whoever reads it meanwhile finds the old or the new one.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(to_json(faults) + "\n")
    temporary.replace(path)


def planned(environment: Mapping[str, str] = os.environ) -> list[Fault]:
    """The faults of the run, from the file that ``FT_FAULTS`` names; none where it names none.

    Raises:
        UserError: the file cannot be read.
    """
    path = environment.get(FILE)
    if not path:
        return []
    try:
        return from_json(Path(path).read_text())
    except OSError as error:
        raise UserError(f"the planned faults cannot be read: {error}", "leave FT_FAULTS to ft run") from error


def _fault(values: dict[str, Any]) -> Fault:
    fault = Fault(**values)
    return fault if fault.flip is None else replace(fault, flip=Flip(**fault.flip))
