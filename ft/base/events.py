"""The event log of an ``ft run``: one JSON object per line of ``events.jsonl``, the source of all recovery reports.

Two clocks stamp an event: ``wall`` (seconds since 1970, comparable between hosts as far as their clocks agree) and
``monotonic`` (comparable on one host only). :func:`elapsed` uses the better of the two.
"""

import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ft.base import bounded_json, files
from ft.base.lines import Lines


@dataclass(frozen=True)
class Needs:
    """The required content of an event.

    Attributes:
        fields: names of the fields of :class:`Event` that must not be None.
        detail: keys that the event's detail must contain.
    """

    fields: tuple[str, ...] = ()
    detail: tuple[str, ...] = ()


SCHEMA: dict[str, Needs] = {}
"""All events, by name."""


def _event(name: str, fields: tuple[str, ...] = (), detail: tuple[str, ...] = ()) -> str:
    """Enter an event into ``SCHEMA`` and return its name; the arguments are as in :class:`Needs`."""
    SCHEMA[name] = Needs(fields, detail)
    return name


# the run has started; command: list of words; world_size: number of logical ranks
RUN_STARTED = _event("run_started", (), ("command", "world_size"))
# an agent has joined; host: the address that it advertises; interfaces: name -> address; machine: its host name;
# about: settings that must be equal on all nodes; paths: paths of the command line -> "there" or "missing"; clock:
# its wall clock when it joined, in seconds since 1970
AGENT_JOINED = _event("agent_joined", ("node",), ("host", "interfaces", "machine", "about", "paths", "clock"))
# the run waits for agents at its start; missing: numbers of their nodes
AGENTS_MISSING = _event("agents_missing", (), ("missing", "message"))
# the nodes do not fit together, so the run ends before its first step; problems: sentences
START_REFUSED = _event("start_refused", (), ("problems",))
# a worker's process was started; rank is None for a standby
WORKER_STARTED = _event("worker_started", ("node", "worker"), ("pid",))
STANDBY_READY = _event("standby_ready", ("node", "worker"))
# a planned fault was injected; number: index of the fault; where: phase of the step, or "time"
FAULT_INJECTED = _event("fault_injected", ("node",), ("number", "kind"))
# a failure was detected and classified; epoch: the epoch in which it happened; worker, node, rank: where it
# happened; step: the last step known to be committed; category: class of the failure; action: "replace", "in
# place", "restart" or "stop"; signal: the observation that revealed the failure
FAULT_DETECTED = _event("fault_detected", ("epoch",), ("category", "action", "reason", "signal"))
EPOCH_CLOSED = _event("epoch_closed", ("epoch",), ("reason",))
# the last surviving worker has left the closed epoch; epoch: its number
RELEASED = _event("released", ("epoch",))
# a new epoch begins; seats: logical rank (a string) -> worker; joiners: logical ranks whose worker is new
EPOCH_OPENED = _event("epoch_opened", ("epoch",), ("seats", "joiners"))
JOINER_ARRIVED = _event("joiner_arrived", ("epoch", "worker", "rank"))
# the workers were ordered to rebuild groups and restore their state; step: the step to restore; also level, the level
# of the recovery ladder (ft.job.control.recovery)
REPAIR_ORDERED = _event("repair_ordered", ("epoch", "step"))
# the process groups are connected; rebuilt, kept, deferred: numbers of groups, each counted once and not per
# worker; seconds: duration on the slowest worker
GROUPS_REBUILT = _event("groups_rebuilt", ("epoch",), ("rebuilt", "kept", "deferred", "seconds"))
# all ranks have restored their state; sources: logical rank (a string) -> where its state came from; seconds:
# duration on the slowest worker
STATE_RESTORED = _event("state_restored", ("epoch", "step"), ("sources", "seconds"))
# a pipeline stage whose state is lost on all ranks is rebuilt from its neighbouring stages (CheckFree); weights:
# shares of the previous and the following stage; neighbours: logical ranks; seconds: on the stage's first rank,
# counted from its first message
STAGE_REBUILT = _event("stage_rebuilt", ("epoch", "step"), ("stage", "strategy", "weights", "seconds"))
# the first new step has begun on every worker; step: the last committed step
RESUMED = _event("resumed", ("epoch", "step"))
# a step that was done again after a recovery differs from its first try on this rank, in a training loop of the
# user's own; differences: clauses about the batches, the outputs of the model and the gradients
STEP_DIFFERS = _event("step_differs", ("rank", "epoch", "step"), ("differences",))
# all workers were asked what they are doing, because a time limit is about to pass or somebody wants to know
# (ft diagnose hang); number: number of the inspection
INSPECTED = _event("inspected", ("epoch",), ("number", "reason"))
WORKER_LOST = _event("worker_lost", ("node", "worker"), ("reason",))
# a device (GPU) of the node gets no further worker; device: its index on the node
DEVICE_UNUSABLE = _event("device_unusable", ("node",), ("device", "reason"))
# a node has found something about itself, by the rules of ft.faults.health; device: its name, "" for the node;
# action: "watch", "evict at the next step" or "drain"; index: the device's index among those that workers use, or
# None; acts: whether the control plane acts on it (ft run --health drain)
HEALTH_FOUND = _event("health_found", ("node",), ("device", "observation", "category", "action", "reason", "advice"))
# all workers were restarted from the last checkpoint (warm restart); number: number of warm restarts so far; also
# level, as in REPAIR_ORDERED
RESTARTED = _event("restarted", (), ("number", "reason"))
# the recovery was checked; violations: sentences, empty if invariants I1 to I4 hold (DEADPOOL, section V-C)
INVARIANTS_CHECKED = _event("invariants_checked", ("epoch",), ("violations",))
# peer copies (copies of a rank's optimizer shard in other ranks' host memory) were assigned to their holders;
# copies: logical rank of the owner (a string) -> ranks that hold its copies from this epoch's first snapshot on;
# moved: copies that were placed elsewhere before; problems: sentences, empty when all failure domains are respected
COPIES_PLACED = _event("copies_placed", ("epoch",), ("copies", "moved", "problems"))
# a checkpoint of ``step`` is complete; folder: of all checkpoints; also bytes and seconds, where they are known
SAVED = _event("saved", ("step",), ("folder",))
# the checkpoint of ``step`` could not be saved; older checkpoints are as they were
SAVE_FAILED = _event("save_failed", ("step",), ("folder", "reason"))
# the run has ended as planned; early: name of the signal that has ended it before its last step, whose number is
# steps (0: unknown); unsaved: why its last checkpoint could not be saved. Both are absent where they do not apply
FINISHED = _event("finished", ("step",))
STOPPED = _event("stopped", (), ("code", "message"))
# the control plane could not continue from its journal (its log of decisions): all workers restarted
CONTROL_RESTARTED = _event("control_restarted")
# the control plane continued from its journal, on the given node; term: number of its leadership; away: seconds
# since the control plane last received a message
CONTROL_BACK = _event("control_back", ("node",), ("term", "away"))
# FT-HSDP, where a replica is a full copy of the model with its own ranks; replica: number of the replica; life:
# number of restarts of the replica; step: number of committed steps in its state
REPLICA_OFFLINE = _event("replica_offline", (), ("replica", "reason"))
REPLICA_ONLINE = _event("replica_online", ("step",), ("replica", "life"))
# a rank of a replica that was behind has received the state; step: the step in which it caught up; bytes: number of
# bytes fetched in fetch_s seconds
CAUGHT_UP = _event("caught_up", ("step",), ("replica", "fetch_s", "bytes"))
# SPARe: a change in the shard types (parts of the batch) of which no host is present, so that the replica computes
# types that it does not host; step: the first step with the change; types: those of all replicas, empty at the end
TYPES_ADOPTED = _event("types_adopted", ("step",), ("replica", "types"))
# a new quorum (set of replicas that compute a step together): its members differ from the last quorum's, or the
# step is retried; step: number of committed steps; wait_s: seconds since the first report
QUORUM_FORMED = _event("quorum_formed", ("step",), ("number", "healthy", "behind", "reason", "wait_s"))
# a bit-flip fault was injected; fault: index of the planned fault; execution: "primary" or "checker", the execution
# of a duplicated operator that was hit, or None if the data of a message was hit
BIT_FLIPPED = _event(
    "bit_flipped", ("rank", "step"), ("fault", "operator", "phase", "layer", "microbatch", "element", "bit", "dtype")
)
# SpareTrain (dual modular redundancy, DMR): coverage of this rank's first iteration; strategy: naive, piggyback or
# plan; counts: number of operators by method of verification
DMR_COVERED = _event("dmr_covered", ("rank", "step"), ("strategy", "counts"))
# a smaller share of the operators is verified than in the steps before; now: that share, on the rank with the least
DMR_COVERAGE_FELL = _event("dmr_coverage_fell", ("step",), ("before", "now"))
# two executions of an operator gave different results; how: what was compared; elements: number of differing
# elements, None if digests were compared
DMR_MISMATCH = _event(
    "dmr_mismatch", ("rank", "step"), ("attempt", "operator", "phase", "layer", "microbatch", "how", "host", "device")
)
# the decision after a failed attempt on ``ranks``: action "retry", "evict" or "give up"; blamed: the faulty ranks
DMR_VERDICT = _event("dmr_verdict", ("step",), ("attempt", "action", "reason", "ranks", "blamed"))
# an attempt at a step showed no mismatch after earlier attempts at that step had failed
DMR_CLEAN = _event("dmr_clean", ("step",), ("attempt",))
# a user-defined protection has acted on a step; protection: its name; what: its action, as a verb phrase
PROTECTION_ACTED = _event("protection_acted", ("rank", "step"), ("protection", "what"))
# a rank's own work takes persistently longer than that of ranks with the same work, or no longer does; step: the
# last step that was compared; ratio: its time divided by the others'; own_s, usual_s: the median times of one step;
# cause: the kind of work that takes it longer; steps: number of steps that were compared
STRAGGLER_FOUND = _event("straggler_found", ("worker", "rank", "step"), ("ratio", "own_s", "usual_s", "cause", "steps"))
STRAGGLER_GONE = _event("straggler_gone", ("worker", "rank", "step"), ("ratio",))


@dataclass(frozen=True)
class Event:
    """One event. The fields from ``node`` to ``step`` are None where they do not apply.

    Attributes:
        name: a key of ``SCHEMA``.
        wall: time in seconds since 1970.
        monotonic: time in seconds on the host's monotonic clock.
        node: name of the node that the event is about.
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


@dataclass(frozen=True)
class Note:
    """An event without time stamps. ``values`` has all fields of the event in one mapping; see :func:`observed`."""

    name: str
    values: dict[str, Any]


_PLACES = ("node", "worker", "rank", "epoch", "step")
_STAMPS = ("wall", "monotonic", *_PLACES)
_KNOWN = {f.name for f in fields(Event)}


def now(name: str, **values: Any) -> Event:
    """Return an event with the present time. Keywords that are not fields of :class:`Event` become its detail."""
    return observed(name, {"wall": time.time(), "monotonic": time.monotonic(), **values})


def observed(name: str, values: Mapping[str, Any]) -> Event:
    """Return the event that an ``Observed`` message reports; ``values`` mixes the event's fields with its detail.

    Time stamps that are missing are set to the present time.
    """
    stamps = {key: values[key] for key in _STAMPS if key in values}
    stamps.setdefault("wall", time.time())
    stamps.setdefault("monotonic", time.monotonic())
    return Event(name, **stamps, detail={key: value for key, value in values.items() if key not in _STAMPS})


def check(event: Event) -> None:
    """Check an event against ``SCHEMA``.

    Raises:
        ValueError: the event does not match the schema, which is a bug in the code that creates the event.
    """
    needs = SCHEMA.get(event.name)
    if needs is None:
        raise ValueError(f"no event is named {event.name!r}: {', '.join(SCHEMA)}")
    missing = [name for name in needs.fields if getattr(event, name) is None]
    missing += [f"detail[{key!r}]" for key in needs.detail if key not in event.detail]
    if missing:
        raise ValueError(f"event {event.name} lacks {', '.join(missing)}")


def hosts(history: Iterable[Event]) -> dict[str, str]:
    """Return node -> host name, for all nodes that have joined the run and have told the name."""
    joined = (event for event in history if event.name == AGENT_JOINED and event.node is not None)
    return {str(event.node): str(event.detail["machine"]) for event in joined if event.detail.get("machine")}


def named(node: str | None, known: Mapping[str, str]) -> str:
    """Return how a node is called in messages: its name in the run and its host, such as "n1 (gpu0137)".

    In a run of one node, or if the host is unknown, it is the name in the run alone.

    Args:
        known: node -> host name, for all nodes of the run.
    """
    return f"{node} ({known[node]})" if node in known and len(known) > 1 else str(node)


def elapsed(earlier: Event, later: Event) -> float:
    """Return the seconds between two events, never negative.

    If the wall clock and the monotonic clock give the same difference within a second, both events come from one host,
    and the monotonic difference is returned. Monotonic clocks of two hosts have different origins; then the wall-clock
    difference is returned.
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
        # shared, because a control plane that was declared dead may still run and write to the same file
        self._lines = Lines(Path(path), is_shared=True)

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
    """Return the events of a file in the order in which they were written; an empty list if there is no such file.

    Incomplete lines are skipped, and so are fields that a later version has added. Events with unknown names are kept.
    """
    try:
        lines = files.read(path, files.UNLIMITED).splitlines()
    except FileNotFoundError:
        return []
    return [event for event in map(_parse, lines) if event is not None]


def _parse(line: bytes) -> Event | None:
    try:
        values = bounded_json.loads(line, non_finite=True)
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
