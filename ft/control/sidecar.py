"""The side-car's process: receives, decides, publishes, and puts on record what it did."""

import argparse
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from ft import events
from ft.agent import processes
from ft.control import status
from ft.control.board import Board
from ft.control.controller import decide, next_deadline
from ft.control.decision import Decision, Note
from ft.control.journal import Journal
from ft.control.state import ENDED, Options, State
from ft.control.timeouts import Timeouts
from ft.errors import UserError
from ft.messages import AgentLeaving

_STATUS_S = 0.5
_LEAVE_S = 5.0


class Sidecar:
    """I/O around ``decide``. ``folder``: the run's; ``board``: hosted by this process."""

    def __init__(self, folder: Path, board: Board, options: Options):
        self._folder, self._board = folder, board
        self._state = State.begin(options)
        self._events = events.EventLog(folder / "events.jsonl")
        self._journal = Journal(folder / "journal.jsonl", options)
        self._due = self._status_at = 0.0
        self._left: set[str] = set()
        self._ended_at: float | None = None

    def run(self) -> None:
        """Until the run has ended and all agents have left, or a while after that."""
        while not self._is_over():
            report = self._board.receive(self._due - time.monotonic())
            if isinstance(report, AgentLeaving):
                self._left.add(report.node)
            self._take(time.monotonic(), report)
        self._journal.close()
        self._events.close()

    def _take(self, now: float, report: Any | None) -> None:
        """One report, or None: there is none, and it is time to look at the clock.

        Reports that wait are taken before the clock is looked at, so that no deadline passes because of a slow reader.
        """
        state = self._state
        decisions = decide(state, now, report)
        for decision in decisions:  # first: all else can wait, the workers cannot
            for order in decision.orders:
                self._board.publish(order)
        following = next_deadline(state, now)
        self._due = following if report is None else min(self._due, following)
        self._record(now, report, decisions)
        if state.phase == ENDED and self._ended_at is None:
            self._ended_at = now
        if any(decision.orders for decision in decisions) or now - self._status_at >= _STATUS_S:
            self._status_at = now
            status.replace_file(self._folder / "status.json", status.values(state))

    def _record(self, now: float, report: Any | None, decisions: list[Decision]) -> None:
        wall = time.time()
        for decision in decisions:
            for note in decision.events:
                self._write_event(wall, now, note)
        self._journal.enter(now, report, decisions)

    def _write_event(self, wall: float, now: float, note: Note) -> None:
        event = events.observed(note.name, {"wall": wall, "monotonic": now, **note.values})
        try:
            self._events.write(event)
        except (ValueError, TypeError) as error:  # an event of a worker's that is none: no reason to end the run
            self._journal.remark(f"no event: {error}", event=note.name)

    def _is_over(self) -> bool:
        if self._ended_at is None:
            return False
        here = {agent.node for agent in self._state.agents.values() if not agent.gone}
        wait = self._ended_at + _LEAVE_S
        self._due = min(self._due, wait)
        return here <= self._left or time.monotonic() >= wait


def parse_options(text: str) -> Options:
    """The options of the command line.

    Raises:
        UserError: they are no JSON object, or have no world size, or timeouts that cannot work.
    """
    try:
        values = json.loads(text)
        timeouts = Timeouts(**values.get("timeouts", {})).check()
        return Options(
            nodes=int(values.get("nodes", 1)),
            world_size=int(values["world_size"]),
            max_restarts=int(values.get("max_restarts", 3)),
            restarts=int(values.get("restarts", 0)),
            hot_swap=bool(values.get("hot_swap", True)),
            command=[str(word) for word in values.get("command", [])],
            timeouts=timeouts,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--options {text[:200]} cannot be read ({type(error).__name__}: {error})",
            'give a JSON object such as {"world_size": 4, "nodes": 1}',
        ) from error


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ft.control", description="The control plane of one run.")
    parser.add_argument("--run-dir", type=Path, required=True, help="journal, events and status go here")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True, help="0: any free one; control.json says which")
    parser.add_argument("--options", required=True, help="JSON: world_size, nodes, max_restarts, hot_swap, timeouts...")
    given = parser.parse_args(argv)
    processes.die_with_parent(signal.SIGKILL)
    try:
        options = parse_options(given.options)
        board = Board.host(given.host, given.port)
    except UserError as error:
        parser.exit(UserError.exit_code, f"{parser.prog}: {error}\n")
    address = {"host": given.host, "port": board.port, "pid": os.getpid(), "on": socket.gethostname()}
    status.replace_file(given.run_dir / "control.json", address)
    Sidecar(given.run_dir, board, options).run()
