"""The journal: what came in and what was decided, a JSON line each; the state can be derived from it again."""

import json
import time
from pathlib import Path
from typing import Any

from ft.control.codec import from_json, to_json
from ft.control.controller import decide
from ft.control.decision import Decision
from ft.control.state import Options, State
from ft.messages import AgentBeat, decode, encode


class Journal:
    """Appends to ``path``.

    Heartbeats are many and decide little: of each agent only the newest is written, and only before a decision, which
    may have gone by it. That is enough for ``rebuild``, because a heartbeat replaces the one before it.
    """

    def __init__(self, path: Path, options: Options):
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - for the life of the process
        self._beats: dict[str, tuple[float, AgentBeat]] = {}
        self._write({"wall": time.time(), "options": to_json(options)})

    def enter(self, now: float, report: Any | None, decisions: list[Decision]) -> None:
        """What ``decide(state, now, report)`` has returned."""
        if isinstance(report, AgentBeat) and not decisions:
            self._beats[report.node] = (now, report)
            return
        if not decisions and report is None:
            return
        for at, beat in self._beats.values():
            self._write({"now": at, "report": _plain(beat)})
        self._beats.clear()
        made = [
            {
                "reason": decision.reason,
                **({"orders": [_plain(order) for order in decision.orders]} if decision.orders else {}),
                **({"events": [note.name for note in decision.events]} if decision.events else {}),
            }
            for decision in decisions
        ]
        self._write({"wall": time.time(), "now": now, "report": _plain(report) if report else None, "decisions": made})

    def remark(self, text: str, **values: Any) -> None:
        """Something for people; ``rebuild`` passes over it."""
        self._write({"wall": time.time(), "remark": text, **values})

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")


def rebuild(path: Path) -> State:
    """The state that the last control plane of this run had when it wrote the last whole line.

    Raises:
        ValueError: the file is no journal.
    """
    entries = read(path)
    begins = [i for i, entry in enumerate(entries) if "options" in entry]
    if not begins:
        raise ValueError(f"{path} is no journal: nowhere does it begin with the run's options")
    state = State.begin(from_json(Options, entries[begins[-1]]["options"]))
    for entry in entries[begins[-1] :]:
        if "now" in entry:
            report = entry["report"]
            decide(state, entry["now"], None if report is None else decode(json.dumps(report)))
    return state


def read(path: Path) -> list[dict[str, Any]]:
    """The entries; a line torn by a crash is left out."""
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _plain(message: Any) -> dict[str, Any]:
    return json.loads(encode(message))
