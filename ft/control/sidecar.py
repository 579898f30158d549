"""The side-car's process: receives, decides, journals, publishes."""

import argparse
import json
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ft import events
from ft.control.board import Board
from ft.control.controller import decide, next_deadline
from ft.control.decision import Decision
from ft.control.state import ENDED, Options, State
from ft.control.timeouts import Timeouts
from ft.messages import AgentBeat, AgentLeaving, encode

_STATUS_S = 0.5
_LEAVE_S = 5.0


class Sidecar:
    """I/O around ``decide``. ``folder``: the run's; ``board``: hosted by this process."""

    def __init__(self, folder: Path, board: Board, options: Options):
        self._folder, self._board = folder, board
        self._state = State(options, restarts=options.restarts)
        self._events = events.EventLog(folder / "events.jsonl")
        self._journal = open(folder / "journal.jsonl", "a", buffering=1)  # noqa: SIM115 - for the process's life
        self._status_at = 0.0
        self._recovery: dict[str, Any] = {}

    def run(self) -> None:
        """Until the run has ended and all agents have left, or a while after."""
        state, left = self._state, set()
        while state.phase != ENDED or (left < state.agents.keys() and time.monotonic() < self._until):
            now = time.monotonic()
            wait = next_deadline(state, now) - now if state.phase != ENDED else _STATUS_S
            report = self._board.receive(wait)
            if isinstance(report, AgentLeaving):
                left.add(report.node)
            self.take(report)
            if state.phase != ENDED:
                self._until = time.monotonic() + _LEAVE_S

    def take(self, report: Any | None) -> None:
        """One report, or None: that time has passed."""
        now = time.monotonic()
        decision = decide(self._state, now, report)
        for order in decision.orders:  # first: everything else can wait, the workers cannot
            self._board.publish(order)
        self._write(now, report, decision)
        if decision or now - self._status_at >= _STATUS_S:
            self._status_at = now
            self._write_status()

    def _write(self, now: float, report: Any | None, decision: Decision) -> None:
        for name, values in decision.events:
            event = events.now(name, **values) if "wall" not in values else events.observed(name, values)
            self._events.write(event)
        if decision or (report is not None and not isinstance(report, AgentBeat)):
            entry = {
                "wall": time.time(),
                "now": now,
                "report": json.loads(encode(report)) if report is not None else None,
                "reasons": decision.reasons,
                "orders": [json.loads(encode(order)) for order in decision.orders],
            }
            self._journal.write(json.dumps(entry, separators=(",", ":")) + "\n")

    def _write_status(self) -> None:
        state = self._state
        seats = {
            str(rank): {
                "worker": name,
                "node": state.workers[name].node,
                "pid": state.workers[name].pid,
                **({"beat": asdict(state.beats[name][1])} if name in state.beats else {}),
            }
            for rank, name in sorted(state.seats.items())
        }
        lags = [state.beats[name][1].lag for name in state.seats.values() if name in state.beats]
        status = {
            "updated": time.time(),
            "phase": state.phase,
            "epoch": state.epoch,
            "step": state.step,
            "restarts": state.restarts,
            "seats": seats,
            "standbys": [{"worker": w.name, "node": w.node, "pid": w.pid} for w in state.standbys()],
            "lag": max(lags, default=0),
        }
        _replace(self._folder / "status.json", status)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ft.control", description="The control plane of one run.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--options",
        default="{}",
        help="JSON: nodes, world_size, max_restarts, restarts (before this start), command, timeouts",
    )
    given = parser.parse_args(argv)
    options = _options(json.loads(given.options))
    board = Board.host(given.host, given.port)
    address = {"host": given.host, "port": board.port, "pid": os.getpid(), "on": socket.gethostname()}
    _replace(given.run_dir / "control.json", address)
    Sidecar(given.run_dir, board, options).run()


def _options(values: dict[str, Any]) -> Options:
    timeouts = Timeouts(**values.get("timeouts", {}))
    timeouts.check()
    return Options(
        nodes=values.get("nodes", 1),
        world_size=values["world_size"],
        max_restarts=values.get("max_restarts", 3),
        command=values.get("command", []),
        timeouts=timeouts,
        restarts=values.get("restarts", 0),
    )


def _replace(path: Path, values: dict[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(values))
    temporary.replace(path)
