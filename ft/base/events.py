"""The run's event log: one JSON object per line of ``events.jsonl``, written by all parts and read by all reports.

Two clocks stamp an event: ``wall`` (seconds since 1970, comparable between hosts as far as their clocks agree) and
``monotonic`` (comparable on one host only). :func:`elapsed` uses the better of the two.
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
PROTECTION_ACTED = "protection_acted"


@dataclass(frozen=True)
class Needs:
    """What an event of a given name must have: fields of :class:`Event` that are not None, and keys of its detail."""

    fields: tuple[str, ...] = ()
    detail: tuple[str, ...] = ()


SCHEMA: Mapping[str, Needs] = {
    # command: list of words; world_size: number of logical ranks
    RUN_STARTED: Needs((), ("command", "world_size")),
    # a process exists; rank None: a standby
    WORKER_STARTED: Needs(("node", "worker"), ("pid",)),
    STANDBY_READY: Needs(("node", "worker")),
    # number: number of the planned fault; where: phase of the step, or "time"
    FAULT_INJECTED: Needs(("node",), ("number", "kind")),
    # epoch: the epoch in which the failure happened; worker, node, rank: the broken part; step: the last step known to
    # be committed; category: class of the failure; action: "replace", "in place", "restart" or "stop"; signal: the
    # observation that revealed the failure
    FAULT_DETECTED: Needs(("epoch",), ("category", "action", "reason", "signal")),
    EPOCH_CLOSED: Needs(("epoch",), ("reason",)),
    # epoch: the closed epoch; the last surviving worker has left it
    RELEASED: Needs(("epoch",)),
    # seats: logical rank (a string) -> worker; joiners: logical ranks whose worker is new
    EPOCH_OPENED: Needs(("epoch",), ("seats", "joiners")),
    JOINER_ARRIVED: Needs(("epoch", "worker", "rank")),
    # step: the step to restore
    REPAIR_ORDERED: Needs(("epoch", "step")),
    # rebuilt, kept, deferred: numbers of groups over the whole run, not per worker; seconds: of the slowest worker
    GROUPS_REBUILT: Needs(("epoch",), ("rebuilt", "kept", "deferred", "seconds")),
    # sources: logical rank (a string) -> where its state came from; seconds: of the slowest worker
    STATE_RESTORED: Needs(("epoch", "step"), ("sources", "seconds")),
    # a pipeline stage whose state is lost on all ranks is rebuilt from its neighbouring stages (CheckFree); weights:
    # shares of the previous and the following stage; neighbours: logical ranks; seconds: on the stage's first rank,
    # counted from its first message
    STAGE_REBUILT: Needs(("epoch", "step"), ("stage", "strategy", "weights", "seconds")),
    # the first new step has begun on every worker; step: the last committed step
    RESUMED: Needs(("epoch", "step")),
    WORKER_LOST: Needs(("node", "worker"), ("reason",)),
    # number: warm restarts so far
    RESTARTED: Needs((), ("number", "reason")),
    CHECKPOINT_SAVED: Needs(("step",)),
    # violations: sentences, empty when invariants I1 to I4 hold (DEADPOOL, section V-C)
    INVARIANTS_CHECKED: Needs(("epoch",), ("violations",)),
    # copies: logical rank of the owner (a string) -> holders of its peer copies from this epoch's first snapshot on;
    # moved: copies that were placed elsewhere before; problems: sentences, empty when all failure domains are respected
    COPIES_PLACED: Needs(("epoch",), ("copies", "moved", "problems")),
    FINISHED: Needs(("step",)),
    STOPPED: Needs((), ("code", "message")),
    # the control plane could not continue from its journal: all workers restarted
    CONTROL_RESTARTED: Needs(),
    # the control plane continued from its journal, beside the agent of node; away: seconds since it last heard anything
    CONTROL_BACK: Needs(("node",), ("term", "away")),
    # FT-HSDP; replica: its number; life: its number of restarts; step: number of committed steps of its state
    REPLICA_OFFLINE: Needs((), ("replica", "reason")),
    REPLICA_ONLINE: Needs(("step",), ("replica", "life")),
    # a rank of a replica that was behind has received the state; step: the step in which it caught up; bytes: number of
    # bytes fetched in fetch_s seconds
    CAUGHT_UP: Needs(("step",), ("replica", "fetch_s", "bytes")),
    # the members have changed, or the step is retried; step: committed steps; wait_s: seconds since the first report
    QUORUM_FORMED: Needs(("step",), ("number", "healthy", "behind", "reason", "wait_s")),
    # a bit-flip fault was injected; fault: its number; execution: primary, checker or None (a payload)
    BIT_FLIPPED: Needs(
        ("rank", "step"), ("fault", "operator", "phase", "layer", "microbatch", "element", "bit", "dtype")
    ),
    # strategy: naive, piggyback or plan; counts: operators of this rank's first iteration, by way of verification
    DMR_COVERED: Needs(("rank", "step"), ("strategy", "counts")),
    # two executions of an operator differed; how: what was compared; elements: number of differing elements, None if
    # digests were compared
    DMR_MISMATCH: Needs(
        ("rank", "step"), ("attempt", "operator", "phase", "layer", "microbatch", "how", "host", "device")
    ),
    # the decision after a failed attempt on ``ranks``: action "retry", "evict" or "give up"; blamed: the faulty ranks
    DMR_VERDICT: Needs(("step",), ("attempt", "action", "reason", "ranks", "blamed")),
    # a step was clean after failed attempts
    DMR_CLEAN: Needs(("step",), ("attempt",)),
    # a protection of a user's own has acted on a step; protection: its name; what: what it did, as a sentence without a
    # subject
    PROTECTION_ACTED: Needs(("rank", "step"), ("protection", "what")),
}
"""All events, by name."""


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        name: a key of ``SCHEMA``.
        wall: time in seconds since 1970.
        monotonic: time in seconds on the host's monotonic clock.
        node: the node that the event is about, None if it does not apply; so for the following fields.
        worker: name of the worker.
        rank: logical rank.
        epoch: number of the epoch.
        step: number of committed steps.
        detail: all other values, as JSON values.
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
    """Return an event with the present time. Keywords that are no field of :class:`Event` become its detail."""
    return observed(name, {"wall": time.time(), "monotonic": time.monotonic(), **values})


def observed(name: str, values: Mapping[str, Any]) -> Event:
    """Return the event in an ``Observed`` message, which holds stamps, places and detail in one mapping."""
    stamps = {key: values[key] for key in _STAMPS if key in values}
    stamps.setdefault("wall", time.time())
    stamps.setdefault("monotonic", time.monotonic())
    return Event(name, **stamps, detail={key: value for key, value in values.items() if key not in _STAMPS})


def check(event: Event) -> None:
    """Check an event against ``SCHEMA``.

    Raises:
        ValueError: the event does not match, which is an error of the code that wrote it.
    """
    needs = SCHEMA.get(event.name)
    if needs is None:
        raise ValueError(f"no event is named {event.name!r}: {', '.join(SCHEMA)}")
    missing = [name for name in needs.fields if getattr(event, name) is None]
    missing += [f"detail[{key!r}]" for key in needs.detail if key not in event.detail]
    if missing:
        raise ValueError(f"event {event.name} lacks {', '.join(missing)}")


def elapsed(earlier: Event, later: Event) -> float:
    """Return the seconds between two events, never negative.

    If both clocks agree within a second, both events were stamped on one host, and its monotonic clock is used.
    Monotonic clocks of two hosts have different origins, so the wall clocks are used there.
    """
    wall, monotonic = later.wall - earlier.wall, later.monotonic - earlier.monotonic
    return max(0.0, monotonic if abs(monotonic - wall) < 1.0 else wall)


class EventLog:
    """Appends events to a file. Any thread may write.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path):
        self._lock = threading.Lock()
        self._lines = Lines(Path(path), is_shared=True)  # with a control plane that was declared dead but still runs

    def write(self, event: Event) -> None:
        """Append one event.

        Raises:
            ValueError: the event does not match the schema, or its detail is not JSON.
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
    """Return the events of a file in the order in which they were written, none if there is no such file.

    Torn lines are skipped, and so are fields that a later version has added. Events with unknown names are kept.
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
