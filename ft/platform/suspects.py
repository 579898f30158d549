"""The file of suspects: devices that computed wrongly in earlier runs, and that the next run does not use.

``ft diagnose silent --out FILE`` writes it, ``ft run --suspects FILE`` reads it. It is JSON::

    {"format": "ft suspects", "version": 1, "suspects": [
      {"host": "n1", "device": 3, "name": "cuda:3 (NVIDIA H100)", "advice": "pull", "why": "wrong in 2 steps of 1 run",
       "runs": {"/jobs/a": {"steps": 2, "mismatches": 4, "evicted": 0}}}]}

``host`` is what ``hostname`` prints there. ``device`` is the index of the device among all devices of the host; null
means the whole host, because its processor computed. ``advice`` is "pull" or "watch"; only devices to pull are avoided.
``runs`` has the counts of each run by its folder, so that a run that is read again is not counted twice. Whoever has
repaired a device removes its entry.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ft.base import files
from ft.base.errors import UserError

FORMAT, VERSION = "ft suspects", 1
PULL, WATCH = "pull", "watch"
"""What to do with a device: take it out of use; only note it, because one wrong step may be a cosmic ray."""
_FIX = "write it with: ft diagnose silent RUN... --out FILE"
_NUMBERS = ("steps", "mismatches", "evicted")


@dataclass(frozen=True)
class Counts:
    """How often a device was wrong in one run.

    Attributes:
        steps: number of steps in which it was wrong.
        mismatches: number of results that were wrong.
        evicted: number of times that the run has evicted it.
    """

    steps: int
    mismatches: int
    evicted: int


@dataclass(frozen=True)
class Suspect:
    """A device that computed wrongly.

    Attributes:
        host: name of the machine, as ``hostname`` prints it there.
        device: index of the device among all of the machine; None: the machine as a whole.
        name: name of the device, such as "cuda:3 (NVIDIA H100)".
        runs: folder of a run -> how often the device was wrong in it.
    """

    host: str
    device: int | None
    name: str
    runs: Mapping[str, Counts] = field(default_factory=dict)

    @property
    def advice(self) -> str:
        """Return PULL if the device was wrong in several steps or has been evicted, else WATCH."""
        return PULL if self._sum("evicted") or self._sum("steps") > 1 else WATCH

    @property
    def why(self) -> str:
        """Return in words how often the device was wrong."""
        evicted = self._sum("evicted")
        steps = f"wrong in {_count(self._sum('steps'), 'step')} of {_count(len(self.runs), 'run')}"
        return steps + (f", evicted {_count(evicted, 'time')}" if evicted else "")

    def _sum(self, name: str) -> int:
        return sum(getattr(each, name) for each in self.runs.values())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def read(path: str | Path) -> list[Suspect]:
    """Read a file of suspects.

    Raises:
        UserError: the file cannot be read, or is none of this version.
    """
    content = files.read_structured(path, "suspects")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f'suspects {path} has no "format": "{FORMAT}"', _FIX)
    if content.get("version") != VERSION:
        raise UserError(f"suspects {path} has version {content.get('version')!r}, this ft reads {VERSION}", _FIX)
    entries = content.get("suspects")
    if not isinstance(entries, list):
        raise UserError(f'suspects {path}: "suspects" is not a list', _FIX)
    return [_suspect(path, number, entry) for number, entry in enumerate(entries, 1)]


def _suspect(path: str | Path, number: int, entry: Any) -> Suspect:
    where = f"suspects {path}, entry {number}"
    values = entry if isinstance(entry, dict) else {}
    host, device, runs = values.get("host"), values.get("device", ""), values.get("runs")
    if not isinstance(host, str) or not host:
        raise UserError(f'{where} has no "host"', _FIX)
    if device is not None and not _is_count(device):
        raise UserError(f'{where}: "device" is neither an index from 0 on nor null', _FIX)
    if not isinstance(runs, dict) or not runs:
        raise UserError(f'{where}: "runs" has no run', _FIX)
    counts = {}
    for run, given in runs.items():
        numbers = [given.get(name) if isinstance(given, dict) else None for name in _NUMBERS]
        if not all(_is_count(each) for each in numbers):
            raise UserError(f"{where}: {run} lacks one of the numbers {', '.join(_NUMBERS)}", _FIX)
        counts[run] = Counts(*numbers)
    return Suspect(host, device, str(values.get("name", "")), counts)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def merged(old: Iterable[Suspect], new: Iterable[Suspect]) -> list[Suspect]:
    """Return the suspects of both, those to pull first. Of a run that both have, the counts of ``new`` hold."""
    found: dict[tuple[str, int | None], Suspect] = {}
    for each in (*old, *new):
        known = found.get((each.host, each.device))
        runs = {**(known.runs if known else {}), **each.runs}
        found[each.host, each.device] = Suspect(each.host, each.device, each.name, runs)
    return sorted(
        found.values(), key=lambda one: (one.advice != PULL, one.host, -1 if one.device is None else one.device)
    )


def add(path: Path, suspects: Iterable[Suspect]) -> list[Suspect]:
    """Add suspects to a file, which is made if it does not exist. Who reads it meanwhile sees the old or the new one.

    Returns:
        all suspects of the file.

    Raises:
        UserError: the file exists and is none of suspects, or cannot be written.
    """
    path = path.absolute()
    try:
        with _alone_in(path.parent):
            every = merged(read(path) if path.exists() else (), suspects)
            files.replace(path, as_text(every), durable=True)
    except OSError as error:
        raise UserError(f"suspects {path} cannot be written: {error}", "choose another --out") from error
    return every


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process adds to a file of suspects in the folder, where the file system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def as_text(suspects: Iterable[Suspect]) -> str:
    """Return the content of a file of suspects."""
    entries = [
        {
            **{"host": one.host, "device": one.device, "name": one.name, "advice": one.advice, "why": one.why},
            "runs": {run: asdict(counts) for run, counts in sorted(one.runs.items())},
        }
        for one in suspects
    ]
    return json.dumps({"format": FORMAT, "version": VERSION, "suspects": entries}, indent=2) + "\n"
