"""Planned faults: the kind, time and victim of each, the file that carries them to agents and workers, and a timer."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ft.base import bounded_json, events, files
from ft.base.errors import UserError
from ft.faults.flip import Flip
from ft.net import codec

STEP_PHASES = ("between", "forward", "backward", "reduce", "optimizer", "transfer", "save", "evaluate")
"""Points of a step at which a fault can happen. between: before any work of the step; reduce: gradient reduction;
transfer: copy of the snapshot to a peer; save: checkpoint save.
"""

RECOVERY_PHASES = ("leave", "assemble", "rebuild", "restore", "resume")
"""Points of a recovery; the fault happens just before the action that gives the point its name.

- leave: the worker leaves the closed epoch.
- assemble: a worker that has just taken over a logical rank reports that it has built model and optimizer.
- rebuild: the worker rebuilds its process groups.
- restore: the worker restores its state.
- resume: the first step begins.

In a run with replicas, a restarted replica returns while the healthy ones go on. The recovery then has only two points,
which the restarted and the healthy replicas all pass:

- restore: the restarted replica is fetching its state.
- resume: the replica has committed the step during which the restarted replica fetched its state, but does not yet
  offer the state after this step to other replicas.
"""

PHASES = STEP_PHASES + RECOVERY_PHASES
_MOST_NAMED = 10

ERRORS = ("recoverable", "timeout", "software", "node", "user")
"""Exceptions that a worker can raise (``ft.faults.worker``)."""
COPIES = ("own", "peer")
VALUES = ("nan", "bit")
OF_CONTROL = ("kill-control",)
"""Kinds of faults that hit the control plane."""
OF_NODE = ("partition", "kill-agent")
"""Kinds of faults that hit a whole node."""


@dataclass(frozen=True)
class Fault:
    """One planned fault.

    Attributes:
        number: number of the fault, from 1, unique in the run.
        kind: one of ``ft.faults.table.NAMES``.
        step: step in which it happens, counted from 1, or None. With a phase of a recovery: the fault happens in the
            recovery that interrupts this step, or in the next recovery after it.
        time: seconds from the beginning of training, if ``step`` is None.
        node: node all of whose workers it hits, or None. For kill-control, rank and node are None.
        phase: one of ``PHASES``; only with ``step``.
        seconds: duration in seconds; None for a momentary fault, or for one that never ends.
        factor: for kind slow, the step time with the fault divided by the step time without it.
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
    def is_injected_by_agent(self) -> bool:
        """Return whether an agent injects this fault.

        An agent injects the faults that hit the control plane or a node. An exception is such a fault with a rank: it
        has the phase of a recovery, and only the worker of that rank knows when it reaches that phase.
        """
        of_agent = self.kind in (*OF_CONTROL, *OF_NODE) and self.rank is None
        return of_agent or (self.kind == "kill" and self.node is not None)

    def __str__(self) -> str:
        when = f"step {self.step}" if self.step is not None else f"{self.time:.1f} s"
        inside = f" ({self.phase})" if self.step is not None and self.phase != "between" else ""
        victim = f" of rank {self.rank}" if self.rank is not None else f" of node {self.node}" if self.node else ""
        which = f", {self.flip}" if self.flip is not None and str(self.flip) else ""
        return f"{self.kind}{victim} at {when}{inside}{which}"

    def values(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON values."""
        return {f.name: codec.to_json(value) for f in fields(self) if (value := getattr(self, f.name)) != f.default}


class FaultTimer:
    """What the injectors of agents and workers share: which faults have happened, and a thread for those with a time.

    Args:
        announce: called before each fault; returns once the fault is recorded. After a SIGKILL nothing could be
            reported.
        fired: numbers of the faults that have happened; a repeated step has no fault the second time.
    """

    def __init__(self, mine: Sequence[Fault], announce: Callable[[Fault], None], fired: Iterable[int] = ()):
        self._mine, self._announce = mine, announce
        self._lock = threading.Lock()
        self._fired = set(fired)
        self._stop = threading.Event()
        self._timer: threading.Thread | None = None

    def begin(self, began: float | None = None) -> None:
        """Start a thread that carries out the planned faults with a time, if there are any. A second call does nothing.

        If the time of a fault has already passed, it happens at once: its victim did not run when it was due.

        Args:
            began: wall-clock time in seconds at which training began, from which their times count; default: now.
        """
        timed = [fault for fault in self._mine if fault.step is None and fault.number not in self._fired]
        if timed and self._timer is None:
            # The wall clock is used only once, because hosts share it; later changes of it do not move a fault.
            zero = time.monotonic() - (0.0 if began is None else max(0.0, time.time() - began))
            self._timer = threading.Thread(target=self._wait, args=(timed, zero), name="ft-faults", daemon=True)
            self._timer.start()

    def update(self, fired: Iterable[int]) -> None:
        """Add the numbers of faults that have happened, as an ``Open`` order (which opens an epoch) lists them."""
        with self._lock:
            self._fired |= set(fired)

    def close(self) -> None:
        """Stop the thread of the faults with a time."""
        self._stop.set()
        if self._timer is not None and threading.current_thread() is not self._timer:
            self._timer.join()

    def _fire(self, fault: Fault) -> None:
        """Carry out a fault that is due, if it has not happened before."""
        raise NotImplementedError

    def _is_first(self, fault: Fault) -> bool:
        """Note that a fault happens; return whether it has not happened before."""
        with self._lock:
            is_first = fault.number not in self._fired
            self._fired.add(fault.number)
        return is_first

    def _wait(self, timed: Sequence[Fault], zero: float) -> None:
        for fault in sorted(timed, key=lambda fault: fault.time):
            if self._stop.wait(max(0.0, zero + fault.time - time.monotonic())):
                return
            self._fire(fault)


FILE = "FT_FAULTS"
"""Name of the environment variable that tells a worker the path of the file of planned faults, written by ``write``.

The faults are passed in a file because a plan can be longer than an environment variable may be.
"""


def to_json(faults: Sequence[Fault]) -> str:
    """Return the faults as a JSON list, with one fault per line."""
    return "[" + ",\n ".join(json.dumps(fault.values(), separators=(",", ":")) for fault in faults) + "]"


def from_json(text: str) -> list[Fault]:
    """Return the faults that ``to_json`` has encoded.

    Raises:
        UserError: the text is not valid.
    """
    try:
        return codec.from_json(list[Fault], bounded_json.loads(text))
    except (ValueError, codec.BadMessage) as error:
        raise UserError(
            f"this is not a list of planned faults: {error}", "unset FT_FAULTS: ft run writes this file"
        ) from error


def write(path: Path, faults: Sequence[Fault]) -> None:
    """Write the file that ``planned`` reads. Concurrent readers see either the old or the new file.

    Raises:
        OSError: the file cannot be written.
    """
    files.replace(path, to_json(faults) + "\n")


def planned(environment: Mapping[str, str] = os.environ) -> list[Fault]:
    """Return the planned faults of the run, from the file that ``FT_FAULTS`` names; an empty list if it is not set.

    Raises:
        UserError: the file cannot be read.
    """
    path = environment.get(FILE)
    if not path:
        return []
    try:
        return from_json(files.read_text(path))
    except OSError as error:
        raise UserError(f"the planned faults cannot be read: {error}", "unset FT_FAULTS: ft run sets it") from error


def left(faults: Sequence[Fault], folder: Path) -> list[Fault]:
    """Return the faults that were not injected yet, according to the events of the run, or replica, in ``folder``."""
    done = _injected(folder)
    return [fault for fault in faults if fault.number not in done]


def missed(run_dir: Path) -> str:
    """Return one sentence about the planned faults of a run or replica that did not happen, "" if there are none."""
    names, count = [], 0
    for folder in (run_dir, *sorted(run_dir.glob("replica-*"))):
        where = "" if folder == run_dir else f" of {folder.name}"
        in_files: dict[int, Fault] = {}
        for path in folder.glob("faults.*.json"):
            with contextlib.suppress(OSError, UserError):
                in_files |= {fault.number: fault for fault in from_json(files.read_text(path))}
        # The agents of a replica that has started again have written only the faults that were left then.
        count += len(in_files.keys() | _injected(folder))
        names += [f"{fault}{where}" for fault in left(list(in_files.values()), folder)]
    if not names:
        return ""
    more = "; ..." if len(names) > _MOST_NAMED else ""
    return f"{len(names)} of {count} planned fault(s) did not happen: {'; '.join(names[:_MOST_NAMED])}{more}"


def _injected(folder: Path) -> set[int]:
    happened = events.read(folder / "events.jsonl")
    return {event.detail.get("number", 0) for event in happened if event.name == events.FAULT_INJECTED}
