"""The journal of the control plane: its input and decisions as JSON lines, from which its state can be recomputed.

A report is written before any decision on it is sent. So a new control plane knows everything that the previous one has
sent, and the agents resend all reports that were not recorded. While they cannot be written (a full disk, etcd without
a majority) the entries wait in memory, and are lost if the control plane dies meanwhile.

Every entry carries the leader-election term of its writer. A control plane that was paused may write one more entry
before it notices that another one has taken over. ``recall`` ignores such an entry: its term is older, and it stands
behind the place up to which the newer control plane had read.

A line that is damaged is skipped and counted. If the decisions behind it are not those that follow from the other
lines, the run cannot continue from the journal. Entries with orders name the number of their first order, which shows
whether the damaged line had orders.
"""

import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft.base import bounded_json
from ft.base.events import Note
from ft.job.control.arrivals import store_beat
from ft.job.control.channel import KEPT_ORDERS, ChannelRecord, Posted
from ft.job.control.controller import decide
from ft.job.control.state import ControlOptions, ControlState, RecordedDecision
from ft.job.messages import AgentBeat, from_values, to_values
from ft.net.codec import BadMessage, from_json, is_count, to_json
from ft.platform import shared_state

_BEGIN = b'"options"'


class Journal:
    """Appends entries to the log ``path`` in the shared state of its folder.

    Heartbeats are many and rarely cause a decision. So only the newest heartbeat of each agent is written, and only
    before a decision, which may depend on it. This suffices for ``recall``, because a heartbeat without a decision only
    replaces the one before it.

    Args:
        path: folder of the run, and name of the log.
        options: configuration of the run if a life of the run begins here; None if the run continues.
        term: leader-election term of this control plane.
        memory: the content of the log when the run continues.
    """

    def __init__(
        self, path: Path, options: ControlOptions | None, term: int = 0, memory: "JournalContent | None" = None
    ):
        self._log = shared_state.of(path.parent).log(path.name)
        self._term = term
        self._orders = 0 if memory is None else memory.record.first + len(memory.record.orders)
        self._beats: dict[str, tuple[float, Posted]] = {}
        begins = {"known": 0 if memory is None else memory.bytes}
        if options is not None:
            begins = {"known": self._log.size, "options": to_json(options)}
        self._write({"wall": time.time(), **begins})

    def enter(self, now: float, wall: float, posted: Posted | None, decisions: list[RecordedDecision]) -> None:
        """Record one call ``decide(state, now, posted.report)`` and the decisions that it returned.

        ``posted`` is None if the call was about the passing of time; ``wall`` is ``now`` in seconds since 1970.
        """
        if posted is not None and isinstance(posted.report, AgentBeat) and not decisions:
            self._beats[posted.node] = (now, posted)
            return
        if not decisions and posted is None:
            return
        beats = [{"now": at, **_plain(beat)} for at, beat in self._beats.values()]
        self._beats.clear()
        made = [
            {
                "reason": decision.reason,
                **({"orders": [to_values(order) for order in decision.orders]} if decision.orders else {}),
                **({"events": [note.name for note in decision.events]} if decision.events else {}),
            }
            for decision in decisions
        ]
        count = sum(len(decision.orders) for decision in decisions)
        first = {"first": self._orders} if count else {}
        self._write(*beats, {"wall": wall, "now": now, **_plain(posted), **first, "decisions": made})
        self._orders += count

    def remark(self, text: str, **values: Any) -> None:
        """Record a text for people; ``recall`` skips it."""
        self._write({"wall": time.time(), "remark": text, **values})

    def close(self) -> None:
        self._log.close()

    def _write(self, *entries: dict[str, Any]) -> None:
        texts = (json.dumps({"term": self._term, **entry}, separators=(",", ":")) for entry in entries)
        self._log.write(*(text.encode() + b"\n" for text in texts))


@dataclass
class JournalContent:
    """The content of a journal.

    Attributes:
        state: the control plane's state at the end of the journal.
        record: the reports and orders on the control channel, as far as the journal knows them.
        notes: events of the last decisions; the previous control plane may not have written them to the event file.
        now: time of the last entry on the control plane's clock, in seconds.
        wall: time of the last entry in seconds since 1970.
        bytes: size of the log in bytes when it was read.
        damaged: number of lines that are no valid entries.
    """

    state: ControlState
    record: ChannelRecord = field(default_factory=ChannelRecord)
    notes: list[Note] = field(default_factory=list)
    now: float = 0.0
    wall: float = 0.0
    bytes: int = 0
    damaged: int = 0


def recall(path: Path) -> JournalContent:
    """Return what the last control plane of this run knew and had sent when it wrote the last complete line.

    Raises:
        ValueError: the file is not a journal, or what is damaged in it cannot be done without.
    """
    data = _content(path)
    entries, damaged = _history(data)
    begins = [i for i, entry in enumerate(entries) if "options" in entry]
    if not begins:
        raise ValueError(f"{path} is no journal: nowhere does it begin with the run's options")
    memory = JournalContent(ControlState.begin(entries[begins[-1]]["options"]), bytes=len(data), damaged=damaged)
    orders: deque[Any] = deque(maxlen=KEPT_ORDERS)
    taken: dict[str, int] = {}
    count = 0
    for entry in entries[begins[-1] :]:
        memory.wall = entry.get("wall", memory.wall)
        if "now" not in entry:
            continue
        memory.now, report = entry["now"], entry["report"]
        if isinstance(report, AgentBeat) and "decisions" not in entry:
            # Most heartbeats are not in the journal. To one who reads it, an agent may seem silent that was not.
            store_beat(memory.state, memory.now, report)
            continue
        decisions = decide(memory.state, memory.now, report)
        memory.notes = [note for decision in decisions for note in decision.events]
        made = [order for decision in decisions for order in decision.orders]
        if damaged and (entry.get("first", count), entry["orders"]) != (count, [to_values(order) for order in made]):
            raise ValueError(f"{path} has {damaged} damaged line(s), without which later decisions do not follow")
        orders.extend(made)
        count += len(made)
        if "number" in entry:
            taken[entry["node"]] = entry["number"]
    memory.record = ChannelRecord(count - len(orders), list(orders), taken)
    return memory


def lives(path: Path) -> int:
    """Return the number of lives of the run in the journal (see the module's docstring).

    Only the lines that begin a life are looked at, because a journal that ends its readers is left behind.
    """
    begins = b"".join(line for line in _content(path).splitlines(keepends=True) if _BEGIN in line)
    return max([entry["options"].restarts + 1 for entry in _history(begins)[0] if "options" in entry], default=0)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the valid entries, with their options and reports as objects."""
    return _history(_content(path))[0]


def _content(path: Path) -> bytes:
    return shared_state.of(path.parent).read_log(path.name)


def _history(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return (the valid entries, number of other lines). A line that a crash has truncated is not counted."""
    found, damaged, at = [], 0, 0
    for line in data.splitlines(keepends=True):
        try:
            found.append((at, _entry(bounded_json.loads(line, non_finite=True))))
        except (ValueError, BadMessage):
            damaged += line.endswith(b"\n")
        at += len(line)
    ends = [(entry["term"], entry["known"]) for _, entry in found if "known" in entry]
    return [
        entry for at, entry in found if not any(entry["term"] < term and at >= known for term, known in ends)
    ], damaged


def _entry(values: Any) -> dict[str, Any]:
    """Return a line's values, checked, with the options and the report as objects, and with all orders as a list.

    Raises:
        ValueError: they are not those of an entry.
        BadMessage: they contain options or a report that are not valid.
    """
    if not isinstance(values, dict):
        raise ValueError("no entry: it is no object")
    entry = {"term": 0, **values}
    counts = [entry[name] for name in ("term", "known", "number", "first") if name in entry]
    times = [entry[name] for name in ("wall", "now") if name in entry]
    if not all(map(is_count, counts)) or not all(isinstance(time, int | float) for time in times):
        raise ValueError("no entry: a number is none")
    if "number" in entry and not isinstance(entry.get("node"), str):
        raise ValueError("no entry: a report of nobody")
    if "options" in entry:
        entry["options"] = from_json(ControlOptions, entry["options"])
    if "now" in entry and "report" not in entry:
        raise ValueError("no entry: neither a report nor none")
    decisions = from_json(list[dict[str, Any]], entry.get("decisions", []))
    entry["orders"] = [order for made in decisions for order in from_json(list[Any], made.get("orders", []))]
    if entry.get("report") is not None:
        entry["report"] = from_values(entry["report"])
    return entry


def _plain(posted: Posted | None) -> dict[str, Any]:
    if posted is None:
        return {"report": None}
    values = {"node": posted.node, "number": posted.number} if posted.number else {}
    return {**values, "report": to_values(posted.report)}
