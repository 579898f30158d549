"""Read the folder of an FT-HSDP run: one folder for each replica, the quorum server's events, and the data positions.

A replica is a full copy of the model with its own workers. The quorum server determines which replicas take part in
each step. The run may still be in progress: folders of replicas may be missing, and files may end in incomplete lines.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ft.base import events
from ft.base.errors import UserError
from ft.base.events import Event
from ft.record import run
from ft.systems.hsdp import commits, loader_state
from ft.systems.hsdp.commits import Commit
from ft.systems.hsdp.loader_state import LoaderState

_FOLDER = re.compile(r"replica-(\d+)")
NOTHING = "nothing on record"
_FIX = "give the folder that was given to ft run as --run-dir"


@dataclass(frozen=True)
class ReplicaRecord:
    """The record of one replica.

    Attributes:
        commits: lines of its commit log, one for each step that it committed.
        events: events of the replica's own control plane and workers.
        metrics: one mapping for each committed step.
    """

    commits: list[Commit] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Return how it has ended (``ft.record.run.Run.state``), or "nothing on record" where there is no event."""
        return run.Run(Path(), self.events).state if self.events else NOTHING


@dataclass(frozen=True)
class Record:
    """The record of a whole FT-HSDP run.

    Attributes:
        folder: folder of the run.
        replicas: number of a replica -> its record, for the replicas that have a folder.
        events: events of the quorum server, in order of time.
        positions: content of the file ``loader_state`` (each replica's position in the data), None without that file.
        problem: why ``loader_state`` could not be read, or "".
    """

    folder: Path
    replicas: dict[int, ReplicaRecord]
    events: list[Event] = field(default_factory=list)
    positions: LoaderState | None = None
    problem: str = ""

    @cached_property
    def count(self) -> int:
        """Return the number of replicas of the run, with or without a folder."""
        from_commits = (commit.assignment.replicas for one in self.replicas.values() for commit in one.commits)
        from_events = (1 + number for event in self.events if (number := replica_of(event)) is not None)
        return max([1 + max(self.replicas), *from_commits, *from_events])

    @cached_property
    def history(self) -> list[tuple[int | None, Event]]:
        """Return (replica, event) for all events in order of time; the replica is None for the quorum server."""
        found = [(None, event) for event in self.events]
        found += [(number, event) for number, one in self.replicas.items() for event in one.events]
        return sorted(found, key=lambda item: item[1].wall)

    @property
    def state(self) -> str:
        """Return the state in a few words: that of the replicas, or their states where these differ.

        If all replicas have ended as planned, it is the state of one that could not save the last checkpoint, which one
        replica writes for all, or else of one that has done all steps.
        """
        states = {number: one.state for number, one in sorted(self.replicas.items())}
        if len(set(states.values())) == 1:
            return next(iter(states.values()))
        ended = [state for state in states.values() if run.is_planned_end(state)]
        if len(ended) == len(states):
            return min(ended, key=lambda state: (run.NOT_SAVED not in state, state != run.FINISHED))
        finished = len(ended)
        others = ", ".join(f"replica {number} {state}" for number, state in states.items() if state not in ended)
        return f"finished by {finished} of {len(states)} ({others})" if finished else others


def is_hsdp(folder: str | Path) -> bool:
    """Return whether ``folder`` is that of an FT-HSDP run, and not that of a single replica or of an ordinary run."""
    return bool(_folders(Path(folder)))


def load(folder: str | Path, most: int | None = None) -> Record:
    """Read the run's folder; incomplete lines are skipped.

    Args:
        folder: folder of the run.
        most: number of bytes to read from the end of each replica's commit log; None: all.

    Raises:
        UserError: the folder contains no replica's folder, or cannot be read.
    """
    folder = Path(folder)
    found = _folders(folder)
    if not found:
        raise UserError(f"{folder} contains no folder replica-0, replica-1, ...", _FIX)
    try:
        replicas = {number: _replica(path, most) for number, path in sorted(found.items())}
        history = sorted(events.read(folder / run.EVENTS), key=lambda event: event.wall)
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error}", _FIX) from error
    try:
        return Record(folder, replicas, history, loader_state.read(folder))
    except UserError as error:
        return Record(folder, replicas, history, problem=error.problem)


def replica_of(event: Event) -> int | None:
    """Return the replica that an event of the quorum server concerns, or None."""
    number = event.detail.get("replica")
    return number if isinstance(number, int) and number >= 0 else None


def _replica(folder: Path, most: int | None) -> ReplicaRecord:
    try:
        own = run.load(folder)
    except UserError:
        own = run.Run(folder)
    return ReplicaRecord(commits.read(folder, most), own.events, own.metrics)


def _folders(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    matches = ((_FOLDER.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return {int(match[1]): path for match, path in matches if match}
