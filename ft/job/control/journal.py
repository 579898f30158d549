"""The journal: what came in and what was decided, a JSON line each; the state can be derived from it again.

A report is in it before anything that was decided goes out: what the control plane has said to others, its successor
knows, and everything else the agents say to the successor once more. (Not on a full disk: there it waits in memory for
room, and a control plane that dies meanwhile takes it along.)

Every entry carries the term of who wrote it. A control plane that was paused may find out that it was succeeded only
after one more entry: what is written in an earlier term behind the place up to which a later one has read is no part
of the history.
"""

import contextlib
import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft.base.lines import Lines
from ft.job.control.channel import KEPT_ORDERS, Posted, Record
from ft.job.control.controller import decide
from ft.job.control.decision import Decision, Note
from ft.job.control.state import Options, State
from ft.job.messages import AgentBeat, decode, encode
from ft.net.codec import from_json, to_json


class Journal:
    """Appends to ``path`` in ``term``.

    Args:
        options: of a run, or of a new life of it, that begins here; None: it goes on.
        known: bytes of the file that the history so far was taken from (``Memory.bytes``).

    Heartbeats are many and decide little: of each agent only the newest is written, and only before a decision, which
    may have gone by it. That is enough for ``recall``, because a heartbeat replaces the one before it.
    """

    def __init__(self, path: Path, options: Options | None, term: int = 0, known: int = 0):
        size = path.stat().st_size if path.exists() else 0
        # Without an entry, those after it mean something else: none is given up.
        self._lines = Lines(path, most=None, is_shared=True)
        self._term = term
        self._beats: dict[str, tuple[float, Posted]] = {}
        begins = {"known": known} if options is None else {"known": size, "options": to_json(options)}
        self._write({"wall": time.time(), **begins})

    def enter(self, now: float, wall: float, posted: Posted | None, decisions: list[Decision]) -> None:
        """What ``decide(state, now, posted.report)`` has returned; None: time had passed.

        ``now`` is on the control plane's clock, ``wall`` in seconds since 1970.
        """
        if posted is not None and isinstance(posted.report, AgentBeat) and not decisions:
            self._beats[posted.node] = (now, posted)
            return
        if not decisions and posted is None:
            return
        for at, beat in self._beats.values():
            self._write({"now": at, **_plain(beat)})
        self._beats.clear()
        made = [
            {
                "reason": decision.reason,
                **({"orders": [json.loads(encode(order)) for order in decision.orders]} if decision.orders else {}),
                **({"events": [note.name for note in decision.events]} if decision.events else {}),
            }
            for decision in decisions
        ]
        self._write({"wall": wall, "now": now, **_plain(posted), "decisions": made})

    def remark(self, text: str, **values: Any) -> None:
        """Something for people; ``recall`` passes over it."""
        self._write({"wall": time.time(), "remark": text, **values})

    def close(self) -> None:
        self._lines.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._lines.write(json.dumps({"term": self._term, **entry}, separators=(",", ":")).encode() + b"\n")


@dataclass
class Memory:
    """What a journal says.

    Attributes:
        state: at its end. record: of the board. notes: events of the last decisions, which may not have been written.
        now, wall: time of the last entry, on the control plane's clock and in seconds since 1970.
        bytes: of the file it was taken from.
    """

    state: State
    record: Record = field(default_factory=Record)
    notes: list[Note] = field(default_factory=list)
    now: float = 0.0
    wall: float = 0.0
    bytes: int = 0


def recall(path: Path) -> Memory:
    """What the last control plane of this run knew, and had said, when it wrote the last whole line.

    Raises:
        ValueError: the file is no journal.
    """
    data = path.read_bytes()
    entries = _history(data)
    begins = [i for i, entry in enumerate(entries) if "options" in entry]
    if not begins:
        raise ValueError(f"{path} is no journal: nowhere does it begin with the run's options")
    memory = Memory(State.begin(from_json(Options, entries[begins[-1]]["options"])), bytes=len(data))
    orders: deque[Any] = deque(maxlen=KEPT_ORDERS)
    taken: dict[str, int] = {}
    count = 0
    for entry in entries[begins[-1] :]:
        memory.wall = entry.get("wall", memory.wall)
        if "now" not in entry:
            continue
        report = entry["report"]
        memory.now = entry["now"]
        decisions = decide(memory.state, memory.now, None if report is None else decode(json.dumps(report)))
        memory.notes = [note for decision in decisions for note in decision.events]
        for decision in decisions:
            orders.extend(decision.orders)
            count += len(decision.orders)
        if entry.get("number"):
            taken[entry["node"]] = entry["number"]
    memory.record = Record(count - len(orders), list(orders), taken)
    return memory


def lives(path: Path) -> int:
    """How many lives of the run the journal tells of."""
    return max([entry["options"]["restarts"] + 1 for entry in read(path) if "options" in entry], default=0)


def read(path: Path) -> list[dict[str, Any]]:
    """The entries that are part of the history; a line torn by a crash is left out."""
    return _history(path.read_bytes())


def _history(data: bytes) -> list[dict[str, Any]]:
    found, at = [], 0
    for line in data.splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            found.append((at, json.loads(line)))
        at += len(line)
    ends = [(entry["term"], entry["known"]) for _, entry in found if "known" in entry]
    return [
        entry for at, entry in found if not any(entry.get("term", 0) < term and at >= known for term, known in ends)
    ]


def _plain(posted: Posted | None) -> dict[str, Any]:
    if posted is None:
        return {"report": None}
    values = {"node": posted.node, "number": posted.number} if posted.number else {}
    return {**values, "report": json.loads(encode(posted.report))}
