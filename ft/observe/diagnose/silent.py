"""Find out which machines and devices have computed wrongly, from what DMR recorded in the events of several runs.

One mismatch may be a cosmic ray; a device with wrong results in several steps, or that a run has evicted, should
be pulled. An operator that differs on several devices is not reproducible: then no device is at fault.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft.base import events
from ft.base.events import Event
from ft.platform.suspects import PULL, WATCH, Counts, Suspect
from ft.record import run
from ft.record.run import number

LINK, OPERATOR = "check the link", "not at fault"
"""What to do with a device, beside PULL (take it out of use) and WATCH (note it): look for the fault in what it
received, which may be the sender or the connection; nothing, because only operators that are not reproducible
differed."""

_DEVICE = re.compile(r"cuda:(\d+)\b|cpu$")
"""Names of devices as DMR records them; the number is the index among all of the host."""
_FIRST = (PULL, LINK, WATCH, OPERATOR)
_RECEIVED = "what was sent"
_SEVERAL = 3
"""Number of devices on which an operator differs from which on it is the operator that is at fault."""


@dataclass(frozen=True)
class DeviceHistory:
    """What DMR recorded in one run or one replica of a run.

    Attributes:
        name: the folder, as it was given.
        coverage: (the least share of operators that was verified in a step, the step); None if it is not on record.
    """

    name: str
    events: Sequence[Event]
    coverage: tuple[float, int] | None = None


@dataclass
class SilentDevice:
    """The mismatches of one device.

    Attributes:
        device: name of the device, such as "cuda:1 (NVIDIA H100)".
        steps: (run, step) in which there was a mismatch.
        received: number of mismatches in what it received from other ranks.
        corrected: number of steps that were correct when they were done again.
        ended: number of runs that ended because of it.
        of_run: run -> "mismatches" and "evicted", as above, of that run alone.
    """

    host: str
    device: str
    mismatches: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    steps: set[tuple[str, int]] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    received: int = 0
    evicted: int = 0
    corrected: int = 0
    ended: int = 0
    advice: str = WATCH
    of_run: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def runs(self) -> list[str]:
        """Return the runs in which there was a mismatch, sorted."""
        return sorted({name for name, _ in self.steps})


@dataclass(frozen=True)
class Silent:
    """What was found in all runs.

    Attributes:
        devices: the devices with mismatches, those to pull first.
        operators: operators that are not reproducible -> the devices (host, device) on which they differed.
    """

    histories: Sequence[DeviceHistory]
    devices: Sequence[SilentDevice]
    operators: dict[str, list[tuple[str, str]]]


def read(folders: Sequence[Path]) -> list[DeviceHistory]:
    """Read the folders of runs; one with replicas has a history for each of them.

    Raises:
        UserError: a folder contains no run, or cannot be read.
    """
    found = []
    for folder in folders:
        for each in run.parts(folder):
            record = run.load(each)
            shares = [(number(line, "dmr_coverage"), line["step"]) for line in record.metrics]
            known = [(share, step) for share, step in shares if share is not None]
            found.append(DeviceHistory(str(each), record.events, min(known, default=None)))
    return found


def silent(histories: Sequence[DeviceHistory]) -> Silent:
    """Return which devices have computed wrongly, and which operators are not reproducible."""
    devices: dict[tuple[str, str], SilentDevice] = {}
    for history in histories:
        _count(history, devices)
    operators = dict(_not_reproducible(list(devices.values())))
    for device in devices.values():
        device.advice = _advice(device, operators)
    return Silent(histories, sorted(devices.values(), key=_urgency), operators)


def _count(history: DeviceHistory, devices: dict[tuple[str, str], SilentDevice]) -> None:
    """Add the mismatches of one run to the devices, and what followed from them."""
    of_step: dict[tuple[int, int | None], SilentDevice] = {}
    for event in history.events:
        if event.name == events.DMR_MISMATCH and event.step is not None:
            key = str(event.detail.get("host", "?")), str(event.detail.get("device", "?"))
            device = devices.setdefault(key, SilentDevice(*key))
            device.mismatches += 1
            device.of_run.setdefault(history.name, Counter())["mismatches"] += 1
            device.operators[str(event.detail.get("operator", "?"))] += 1
            device.steps.add((history.name, event.step))
            device.received += event.detail.get("how") == _RECEIVED
            device.ranks |= set() if event.rank is None else {event.rank}
            of_step[event.step, event.rank] = device
    for event in history.events:
        if event.step is None:
            continue
        concerned = {id(one): one for (step, _), one in of_step.items() if step == event.step}.values()
        if event.name == events.DMR_CLEAN:
            for device in concerned:
                device.corrected += 1
        elif event.name == events.DMR_VERDICT and event.detail.get("action") == "evict":
            blamed = event.detail.get("blamed")
            for rank in blamed if isinstance(blamed, list) else ():
                if (event.step, rank) in of_step:
                    of_step[event.step, rank].evicted += 1
                    of_step[event.step, rank].of_run[history.name]["evicted"] += 1
        elif event.name == events.DMR_VERDICT and event.detail.get("action") == "give up":
            for device in concerned:
                device.ended += 1


def _not_reproducible(devices: Sequence[SilentDevice]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for operator in sorted({name for device in devices for name in device.operators}):
        where = [(one.host, one.device) for one in devices if one.operators[operator]]
        if len(where) >= _SEVERAL:
            yield operator, sorted(where)


def _urgency(device: SilentDevice) -> tuple[int, int, str, str]:
    return _FIRST.index(device.advice), -len(device.steps), device.host, device.device


def _advice(device: SilentDevice, operators: dict[str, list[tuple[str, str]]]) -> str:
    own = sum(count for name, count in device.operators.items() if name not in operators)
    if device.evicted:
        return PULL
    if not own:
        return OPERATOR
    if device.received == device.mismatches:
        return LINK
    return PULL if len(device.steps) > 1 else WATCH


def suspects_of(found: Silent) -> Iterator[Suspect]:
    """Yield the devices to pull or to watch as entries of a file of suspects, which names runs by absolute paths."""
    for one in found.devices:
        word = _DEVICE.match(one.device)
        if one.advice not in (PULL, WATCH) or word is None:
            continue
        runs = {}
        for name, counted in one.of_run.items():
            steps = sum(run == name for run, _ in one.steps)
            runs[str(Path(name).absolute())] = Counts(steps, counted["mismatches"], counted["evicted"])
        yield Suspect(one.host, int(word[1]) if word[1] else None, one.device, runs)


def as_values(found: Silent) -> dict[str, Any]:
    """Return the result as JSON values."""
    return {
        "runs": [{"run": one.name, "least_coverage": one.coverage} for one in found.histories],
        "devices": [
            {
                "advice": one.advice,
                "host": one.host,
                "device": one.device,
                "mismatches": one.mismatches,
                "operators": dict(one.operators.most_common()),
                "steps": [list(step) for step in sorted(one.steps)],
                "ranks": sorted(one.ranks),
                "received": one.received,
                "evicted": one.evicted,
                "corrected": one.corrected,
                "ended_runs": one.ended,
            }
            for one in found.devices
        ],
        "not_reproducible": {name: [list(where) for where in places] for name, places in found.operators.items()},
    }
