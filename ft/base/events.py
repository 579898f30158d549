"""What happened in a run, one JSON object per line of ``events.jsonl``: every part writes it, every report reads it.

Two clocks stamp an event: ``wall`` (seconds since 1970, comparable between hosts as far as these agree) and
``monotonic`` (comparable on one host only); :func:`elapsed` takes the better of the two.
"""

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ft.base.lines import Lines

RUN_STARTED = "run_started"
WORKER_STARTED = "worker_started"
STANDBY_READY = "standby_ready"
FAULT_INJECTED = "fault_injected"
FAULT_DETECTED = "fault_detected"
EPOCH_CLOSED = "epoch_closed"
RELEASED = "released"
EPOCH_OPENED = "epoch_opened"
JOINER_ARRIVED = "joiner_arrived"
REPAIR_ORDERED = "repair_ordered"
GROUPS_REBUILT = "groups_rebuilt"
STATE_RESTORED = "state_restored"
STAGE_REBUILT = "stage_rebuilt"
RESUMED = "resumed"
WORKER_LOST = "worker_lost"
RESTARTED = "restarted"
CHECKPOINT_SAVED = "checkpoint_saved"
INVARIANTS_CHECKED = "invariants_checked"
COPIES_PLACED = "copies_placed"
FINISHED = "finished"
STOPPED = "stopped"
CONTROL_RESTARTED = "control_restarted"
CONTROL_BACK = "control_back"
REPLICA_OFFLINE = "replica_offline"
REPLICA_ONLINE = "replica_online"
CAUGHT_UP = "caught_up"
QUORUM_FORMED = "quorum_formed"
BIT_FLIPPED = "bit_flipped"
DMR_COVERED = "dmr_covered"
DMR_MISMATCH = "dmr_mismatch"
DMR_VERDICT = "dmr_verdict"
DMR_CLEAN = "dmr_clean"


@dataclass(frozen=True)
class Needs:
    """What an event of some name must have: ``fields`` of :class:`Event` that are not None, keys of its detail."""

    fields: tuple[str, ...] = ()
    detail: tuple[str, ...] = ()


SCHEMA: Mapping[str, Needs] = {
    # command: list of words; world_size: logical ranks
    RUN_STARTED: Needs((), ("command", "world_size")),
    # a process exists; rank None: a standby
    WORKER_STARTED: Needs(("node", "worker"), ("pid",)),
    STANDBY_READY: Needs(("node", "worker")),
    # number: of the planned fault; where: phase of the step, or "time"
    FAULT_INJECTED: Needs(("node",), ("number", "kind")),
    # epoch: the one it happened in; worker, node, rank: what is broken; step: the furthest committed one known;
    # category: class of the failure; action: "replace", "in place", "restart" or "stop"; signal: what gave it away
    FAULT_DETECTED: Needs(("epoch",), ("category", "action", "reason", "signal")),
    EPOCH_CLOSED: Needs(("epoch",), ("reason",)),
    # epoch: the closed one; the last survivor has left it
    RELEASED: Needs(("epoch",)),
    # seats: logical rank (a string) -> worker; joiners: logical ranks whose worker is new to its seat
    EPOCH_OPENED: Needs(("epoch",), ("seats", "joiners")),
    JOINER_ARRIVED: Needs(("epoch", "worker", "rank")),
    # step: the one to be restored
    REPAIR_ORDERED: Needs(("epoch", "step")),
    # numbers of groups, counted over the run and not per worker; seconds: of the slowest worker
    GROUPS_REBUILT: Needs(("epoch",), ("rebuilt", "kept", "deferred", "seconds")),
    # sources: logical rank (a string) -> how its state came; seconds: of the slowest worker
    STATE_RESTORED: Needs(("epoch", "step"), ("sources", "seconds")),
    # a stage of which nobody had a state is made from the stages beside it (CheckFree); weights: shares of the previous
    # and the following one; neighbours: logical ranks; seconds: of the stage's first rank, from its first message on
    STAGE_REBUILT: Needs(("epoch", "step"), ("stage", "strategy", "weights", "seconds")),
    # the first new step has begun on every worker; step: the last committed one
    RESUMED: Needs(("epoch", "step")),
    WORKER_LOST: Needs(("node", "worker"), ("reason",)),
    # number: of warm restarts so far
    RESTARTED: Needs((), ("number", "reason")),
    CHECKPOINT_SAVED: Needs(("step",)),
    # violations: sentences, empty when I1 to I4 hold
    INVARIANTS_CHECKED: Needs(("epoch",), ("violations",)),
    # copies: owner's logical rank (a string) -> who holds its peer copies from this epoch's first snapshot on; moved:
    # copies that went elsewhere before; problems: sentences, empty when all failure domains are respected
    COPIES_PLACED: Needs(("epoch",), ("copies", "moved", "problems")),
    FINISHED: Needs(("step",)),
    STOPPED: Needs((), ("code", "message")),
    # the control plane could not go on where it was: all workers began again
    CONTROL_RESTARTED: Needs(),
    # it went on from its journal, beside the agent of node; away: seconds since it last heard anything
    CONTROL_BACK: Needs(("node",), ("term", "away")),
    # FT-HSDP: replica: its number; life: of it; step: the committed steps of its state
    REPLICA_OFFLINE: Needs((), ("replica", "reason")),
    REPLICA_ONLINE: Needs(("step",), ("replica", "life")),
    # a rank of a replica that was behind has the state; step: the one it caught up in; bytes: fetched in fetch_s
    CAUGHT_UP: Needs(("step",), ("replica", "fetch_s", "bytes")),
    # the members have changed, or the step is tried again; step: committed ones; wait_s: since the first had reported
    QUORUM_FORMED: Needs(("step",), ("number", "healthy", "behind", "reason", "wait_s")),
    # a bit-flip fault has hit; fault: its number; execution: primary, checker or None (a payload)
    BIT_FLIPPED: Needs(
        ("rank", "step"), ("fault", "operator", "phase", "layer", "microbatch", "element", "bit", "dtype")
    ),
    # strategy: naive, piggyback or plan; counts: operators of this rank's first iteration by how they are verified
    DMR_COVERED: Needs(("rank", "step"), ("strategy", "counts")),
    # two executions of an operator differed; how: what was compared; elements: how many, None: digests differed
    DMR_MISMATCH: Needs(
        ("rank", "step"), ("attempt", "operator", "phase", "layer", "microbatch", "how", "host", "device")
    ),
    # what follows from an attempt that went wrong on ``ranks``: action "retry", "evict" or "give up"; blamed: who is
    DMR_VERDICT: Needs(("step",), ("attempt", "action", "reason", "ranks", "blamed")),
    # a step came out clean after attempts that had not
    DMR_CLEAN: Needs(("step",), ("attempt",)),
}
"""Every event there is."""


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        name: a key of ``SCHEMA``. wall, monotonic: when, in seconds.
        node, worker, rank, epoch, step: what it is about, None where that makes no sense. ``step`` counts committed
            steps. detail: the rest, JSON values.
    """

    name: str
    wall: float
    monotonic: float
    node: str | None = None
    worker: str | None = None
    rank: int | None = None
    epoch: int | None = None
    step: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)


_PLACES = ("node", "worker", "rank", "epoch", "step")
_STAMPS = ("wall", "monotonic", *_PLACES)
_KNOWN = {f.name for f in fields(Event)}


def now(name: str, **values: Any) -> Event:
    """An event that happens now; keywords that are no field of :class:`Event` become its detail."""
    return observed(name, {"wall": time.time(), "monotonic": time.monotonic(), **values})


def observed(name: str, values: Mapping[str, Any]) -> Event:
    """The event in the values of an ``Observed`` message: stamps and places beside its detail, in one mapping."""
    stamps = {key: values[key] for key in _STAMPS if key in values}
    stamps.setdefault("wall", time.time())
    stamps.setdefault("monotonic", time.monotonic())
    return Event(name, **stamps, detail={key: value for key, value in values.items() if key not in _STAMPS})


def check(event: Event) -> None:
    """Raises ``ValueError`` where ``event`` is not what ``SCHEMA`` says: a mistake of who wrote it."""
    needs = SCHEMA.get(event.name)
    if needs is None:
        raise ValueError(f"no event is named {event.name!r}: {', '.join(SCHEMA)}")
    missing = [name for name in needs.fields if getattr(event, name) is None]
    missing += [f"detail[{key!r}]" for key in needs.detail if key not in event.detail]
    if missing:
        raise ValueError(f"event {event.name} lacks {', '.join(missing)}")


def elapsed(earlier: Event, later: Event) -> float:
    """Seconds between two events, never negative.

    Where both clocks agree to a second, both events were stamped on one host and its monotonic clock is right. Two
    hosts' monotonic clocks began when those hosts did: there the wall clocks are all there is.
    """
    wall, monotonic = later.wall - earlier.wall, later.monotonic - earlier.monotonic
    return max(0.0, monotonic if abs(monotonic - wall) < 1.0 else wall)


class EventLog:
    """Appends events to a file; any thread may write.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path):
        self._lock = threading.Lock()
        self._lines = Lines(Path(path), is_shared=True)  # with a control plane that was taken for dead

    def write(self, event: Event) -> None:
        """Appends one line.

        Raises:
            ValueError: the event is not in the schema, or its detail is no JSON.
        """
        check(event)
        values = {name: value for name, value in asdict(event).items() if name not in _PLACES or value is not None}
        line = json.dumps(values, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._lines.write(line)

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def read(path: str | Path) -> list[Event]:
    """The events of a file in the order they were written; none if there is no such file.

    A torn line is skipped, as are fields that a later version has added. Names nobody knows are kept.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [event for event in map(_parse, lines) if event is not None]


def _parse(line: bytes) -> Event | None:
    try:
        values = json.loads(line)
        event = Event(**{key: value for key, value in values.items() if key in _KNOWN})
        return event if _is_sound(event) else None
    except (ValueError, TypeError, AttributeError):
        return None


def _is_sound(event: Event) -> bool:
    numbers = (event.wall, event.monotonic)
    whole = (event.rank, event.epoch, event.step)
    return (
        isinstance(event.name, str)
        and all(isinstance(value, int | float) for value in numbers)
        and all(value is None or isinstance(value, int) for value in whole)
        and isinstance(event.detail, dict)
    )
