"""The journal of the control plane: its input and decisions as JSON lines, from which its state can be recomputed.

A report is written before any decision on it is sent. So a new control plane knows everything that the previous one has
sent, and the agents resend all reports that were not recorded. On a full disk the entries wait in memory for free
space, and are lost if the control plane dies meanwhile.

Every entry carries the leader-election term of its writer. A control plane that was paused may write one more entry
before it notices that another one has taken over. ``recall`` ignores such an entry: its term is older, and it stands
behind the place up to which the newer control plane had read.

A life of the run begins when a control plane starts without the journal of its predecessor: at the first start, and
when all agents restart the run from the checkpoint because that journal is lost.
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
    """Appends entries to the file ``path``.

    Heartbeats are many and rarely cause a decision. So only the newest heartbeat of each agent is written, and only
    before a decision, which may depend on it. This suffices for ``recall``, because a heartbeat replaces the one before
    it.

    Args:
        path: the file.
        options: configuration of the run if a life of the run begins here; None if the run continues.
        term: leader-election term of this control plane.
        known: size in bytes of the file when its history was read (``Memory.bytes``).
    """

    def __init__(self, path: Path, options: Options | None, term: int = 0, known: int = 0):
        size = path.stat().st_size if path.exists() else 0
        # A missing entry would change the meaning of those after it, so none is ever dropped.
        self._lines = Lines(path, most=None, is_shared=True)
        self._term = term
        self._beats: dict[str, tuple[float, Posted]] = {}
        begins = {"known": known} if options is None else {"known": size, "options": to_json(options)}
        self._write({"wall": time.time(), **begins})

    def enter(self, now: float, wall: float, posted: Posted | None, decisions: list[Decision]) -> None:
        """Record one call ``decide(state, now, posted.report)`` and the decisions that it returned.

        Args:
            now: time on the control plane's clock, in seconds.
            wall: the same time in seconds since 1970.
            posted: the report; None if the call was about the passing of time.
            decisions: the decisions.
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
        """Record a text for people; ``recall`` skips it."""
        self._write({"wall": time.time(), "remark": text, **values})

    def close(self) -> None:
        self._lines.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._lines.write(json.dumps({"term": self._term, **entry}, separators=(",", ":")).encode() + b"\n")


@dataclass
class Memory:
    """The content of a journal.

    Attributes:
        state: the control plane's state at the end of the journal.
        record: the reports and orders on the control channel, as far as the journal knows them.
        notes: events of the last decisions; the previous control plane may not have written them to the event file.
        now: time of the last entry on the control plane's clock, in seconds.
        wall: time of the last entry in seconds since 1970.
        bytes: size of the file in bytes when it was read.
    """

    state: State
    record: Record = field(default_factory=Record)
    notes: list[Note] = field(default_factory=list)
    now: float = 0.0
    wall: float = 0.0
    bytes: int = 0


def recall(path: Path) -> Memory:
    """Return what the last control plane of this run knew and had sent when it wrote the last complete line.

    Raises:
        ValueError: the file is not a journal.
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
    """Return the number of lives of the run in the journal (see the module's docstring)."""
    return max([entry["options"]["restarts"] + 1 for entry in read(path) if "options" in entry], default=0)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the valid entries; a line that a crash has truncated is left out."""
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
