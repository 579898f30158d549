"""The control plane process: it receives reports, decides, records the decisions and publishes the orders.

It runs on the node of one of the agents (DEADPOOL, section VI-C, calls it a side-car), under a lease of a leader
election, and can continue the journal of a control plane that has died. If few agents reach it, it gives up its lease,
so that another one can take over. It writes ``status.json``, a summary of its state for people who watch a run.
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ft.base import bounded_json, events, files, token
from ft.base.errors import UserError
from ft.base.events import Note
from ft.job.control import stragglers
from ft.job.control.channel import ControlChannel, Posted, Record
from ft.job.control.controller import decide, next_deadline
from ft.job.control.inspections import Answers
from ft.job.control.journal import Journal, JournalContent, lives, recall
from ft.job.control.state import ENDED, ControlOptions, ControlStart, ControlState, Worker
from ft.job.control.stragglers import PaceBook
from ft.job.control.timeouts import Timeouts
from ft.job.messages import AgentBeat, AgentLeaving, ControlBack, InspectionAnswered, InspectionWanted, StepTimes
from ft.net.codec import from_json
from ft.net.store import lone_tcp_store
from ft.platform import election, processes
from ft.platform.election import SUCCEEDED, LeaseRecord
from ft.platform.processes import OwnPauses
from ft.record import inspections
from ft.record.metrics import STEP_TIMES

_A_MAJORITY = 3
"""With fewer agents than this, the other agents cannot outvote the agent on whose node the control plane runs."""


class PartitionDetector:
    """Decides when the control plane stops renewing its lease, and when it resumes because no other agent has taken
    over.

    Attributes:
        yields: while True, the lease must not be renewed, and no decision may be made because of the passing of time.
    """

    def __init__(self, timeouts: Timeouts):
        self._timeouts = timeouts
        self._until: float | None = None
        self._missed: frozenset[str] = frozenset()
        self.yields = False

    def look(self, now: float, heard_at: Mapping[str, float]) -> None:
        """Update ``yields`` at ``now`` from ``heard_at``: agent -> time at which it was last heard, in seconds.

        If most agents have been silent for ``quorum_s``, either they are gone or this control plane is partitioned from
        them. In a partition, one of these agents takes over once the lease has expired and the agents before it in the
        order have let their turns pass. If no agent takes over within that time, the silent agents are gone, and this
        control plane continues without them.
        """
        quiet = frozenset(node for node, at in heard_at.items() if now - at > self._timeouts.quorum_s)
        if 2 * len(quiet) <= len(heard_at) or len(heard_at) < _A_MAJORITY:
            self.yields, self._until, self._missed = False, None, frozenset()
        elif quiet <= self._missed:
            self.yields = False
        elif self._until is None:
            turns = self._timeouts.turn_s * (len(heard_at) + 1)
            self.yields, self._until = True, now + self._timeouts.lease_s + turns + self._timeouts.contact_s
        elif now > self._until:
            self.yields, self._until, self._missed = False, None, quiet


def status_values(state: ControlState) -> dict[str, Any]:
    """Return the status as JSON values.

    Keys that need an explanation: ``seats``: logical rank -> the worker that holds it, with its last heartbeat.
    ``standbys``: the ready workers without a logical rank. ``lag``: number of steps between the newest snapshot that
    all peers hold and the committed step, of the worker for which it is largest; None without snapshots. ``protected``:
    whether any worker has ever trained under hot-swap protection. ``limits``: the timeouts that are not the defaults.
    ``inspection``: [number of the last inspection of all workers, why it was taken], the latter "" if somebody has
        asked for it.
    ``stragglers``: logical rank -> its worker, for those that are persistently slower than others with the same work.
    """
    seated = state.seated()
    lags = [beat.lag for worker in seated if (beat := state.beat(worker))]
    return {
        "updated": time.time(),
        "phase": state.phase,
        "epoch": state.epoch,
        "step": state.newest_step(),
        "lag": max(lags, default=0) if state.protected and state.options.hot_swap else None,
        "protected": state.protected,
        "hot_swap": state.options.hot_swap,
        "limits": state.options.timeouts.changed(),
        "restarts": state.restarts,
        "seats": {str(worker.rank): _member(state, worker) for worker in seated},
        "vacant": sorted(state.vacant),
        "standbys": [_member(state, worker) for worker in state.standbys()],
        "nodes": {
            agent.node: agent.gone or (f"suspect: {agent.suspect}" if agent.suspect else "up")
            for agent in sorted(state.agents.values(), key=lambda a: a.joined.node_rank)
        },
        "inspection": [state.inspections, state.inspection_why],
        "last_recovery": dict(state.last_recovery) or None,
        "stragglers": {str(rank): asdict(slow) for rank, slow in sorted(stragglers.present(state).items())},
    }


def _member(state: ControlState, worker: Worker) -> dict[str, Any]:
    beat = state.beat(worker)
    found = {"worker": worker.name, "node": worker.node, "pid": worker.pid}
    return {**found, "beat": asdict(beat)} if beat is not None else found


_STATUS_S = 0.5
"""Maximum age of the status file, in seconds."""
_LEAVE_S = 5.0
"""Time after the end of the run in which agents can disconnect, in seconds."""
_TOKEN_S = 60.0
"""Limit for reading the run's token, in seconds."""
_NEWEST_EVENTS = 64
"""Number of last events that are compared with the journal after a failover."""


class Sidecar:
    """The I/O around the decision function ``decide``.

    Args:
        channel: control channel to the agents, hosted by this process.
        begins: options of a run that begins, or the content of the journal of a run that continues.
    """

    def __init__(
        self, folder: Path, channel: ControlChannel, begins: ControlOptions | JournalContent, standing: LeaseRecord
    ):
        self._folder, self._channel, self._standing = folder, channel, standing
        self._events = events.EventLog(folder / "events.jsonl")
        self._paces, self._answers = PaceBook(folder / STEP_TIMES), Answers(folder)
        self._due = self._status_at = self._renewed_at = 0.0
        self._taken: dict[str, int] = {}
        self._left: set[str] = set()
        self._ended_at: float | None = None
        options = begins if isinstance(begins, ControlOptions) else begins.state.options
        self._partition = PartitionDetector(options.timeouts)
        self._pauses = OwnPauses(options.timeouts.lease_beat_s)
        if isinstance(begins, ControlOptions):
            self._memory, self._state, self._ahead = None, ControlState.begin(begins), 0.0
            self._journal = Journal(folder / "journal.jsonl", begins, standing.term)
        else:
            # The clock continues where that of the previous control plane stopped, perhaps on another host.
            self._memory, self._state = begins, begins.state
            self._ahead = begins.now + max(0.0, time.time() - begins.wall) - time.monotonic()
            self._journal = Journal(folder / "journal.jsonl", None, standing.term, begins)

    def run(self) -> int:
        """Serve until the run has ended and all agents have left, or ``_LEAVE_S`` seconds after the end.

        The lease is also checked before each renewal, because this process may have been paused while another control
        plane took over.

        Returns:
            The exit code.
        """
        self._resume()
        while not self._is_over():
            if election.is_over(self._folder, self._standing.term):
                return SUCCEEDED
            self._forgive_own_pause()
            self._renew()
            wait = min(self._due - self._now(), self._state.options.timeouts.lease_beat_s)
            posted = self._channel.receive(wait)
            if election.is_over(self._folder, self._standing.term):
                return SUCCEEDED
            self._forgive_own_pause()
            if posted is not None and isinstance(posted.report, AgentLeaving):
                self._left.add(posted.node)
            for judged in self._answers.found():
                self._take(Posted(self._standing.node, 0, judged))
            if posted is None and (self._now() < self._due or self._partition.yields):
                continue
            if posted is None or not posted.number or posted.number > self._taken.get(posted.node, 0):
                posted, times = _without_times(posted)
                self._take(self._without_answer(posted))
                # Times of steps are many, and matter only together: the journal gets what follows from them.
                for pace in self._paces.take(self._state, times, time.time()):
                    self._take(Posted(self._standing.node, 0, pace))
        self._journal.close()
        self._events.close()
        self._paces.close()
        self._channel.close()
        return 0

    def _resume(self) -> None:
        memory = self._memory
        if memory is None:
            self._channel.resume(Record())
            return
        self._taken = dict(memory.record.taken or {})
        self._write_events(memory.wall, memory.now - self._ahead, self._unwritten(memory))
        self._channel.resume(memory.record)
        back = ControlBack(self._standing.term, self._standing.node, memory.damaged)
        self._take(Posted(self._standing.node, 0, back))
        self._memory = None

    def _forgive_own_pause(self) -> None:
        """Report to the decision function if this loop did not run for a while: then it has heard nobody."""
        if paused_s := self._pauses.look(self._now()):
            back = ControlBack(self._standing.term, self._standing.node, paused_s=round(paused_s, 3))
            self._take(Posted(self._standing.node, 0, back))

    def _without_answer(self, posted: Posted | None) -> Posted | None:
        """Return the message without a node's answer to an inspection, and keep that answer."""
        if posted is None or not isinstance(posted.report, InspectionAnswered):
            return posted
        self._answers.take(self._state, posted.report)
        return replace(posted, report=replace(posted.report, said={}))

    def _now(self) -> float:
        return time.monotonic() + self._ahead

    def _take(self, posted: Posted | None) -> None:
        """Process one report, or the passing of time if ``posted`` is None.

        Reports that are waiting are processed before deadlines are checked, so that no deadline passes because of slow
        reading.
        """
        state, now, wall = self._state, self._now(), time.time()
        decisions = decide(state, now, posted.report if posted is not None else None)
        self._journal.enter(now, wall, posted, decisions)
        for decision in decisions:  # orders first, because workers wait for them; all other work can wait
            for order in decision.orders:
                self._channel.publish(order)
        if posted is not None and posted.number:
            self._taken[posted.node] = posted.number
            self._channel.took(posted.node, posted.number)
        following = next_deadline(state, now)
        self._due = following if posted is None else min(self._due, following)
        self._write_events(wall, time.monotonic(), [note for decision in decisions for note in decision.events])
        if state.phase == ENDED and self._ended_at is None:
            self._ended_at = now
        if any(decision.orders for decision in decisions) or now - self._status_at >= _STATUS_S:
            self._status_at = now
            self._inspect_if_wanted()
            with contextlib.suppress(OSError):
                files.replace(self._folder / "status.json", json.dumps(status_values(state)))

    def _inspect_if_wanted(self) -> None:
        """Order an inspection of all workers if a person has asked for one, with a file in the run's folder."""
        path = inspections.wanted(self._folder)
        try:
            why = path.read_text()[:200]
            path.unlink()
        except (OSError, UnicodeDecodeError):
            return
        self._take(Posted(self._standing.node, 0, InspectionWanted(why or "asked for")))

    def _write_events(self, wall: float, monotonic: float, notes: list[Note]) -> None:
        for note in notes:
            event = events.observed(note.name, {"wall": wall, "monotonic": monotonic, **note.values})
            try:
                self._events.write(event)
            except (ValueError, TypeError) as error:  # a worker sent an invalid event: no reason to end the run
                self._journal.remark(f"no event: {error}", event=note.name)

    def _unwritten(self, memory: JournalContent) -> list[Note]:
        """Return the events of the last decisions that the previous control plane did not write before it died."""
        written = events.read(self._folder / "events.jsonl")[-_NEWEST_EVENTS:]
        known = {(event.name, event.wall) for event in written}
        return [note for note in memory.notes if (note.name, note.values.get("wall", memory.wall)) not in known]

    def _renew(self) -> None:
        now = time.monotonic()
        heard = {agent.node: agent.heard_at for agent in self._state.agents.values() if not agent.gone}
        self._partition.look(self._now(), heard)
        if now - self._renewed_at >= self._state.options.timeouts.lease_beat_s and not self._partition.yields:
            self._renewed_at = now
            self._standing = replace(self._standing, count=self._standing.count + 1)
            with contextlib.suppress(OSError):  # a full disk; connected agents do not read the lease
                election.renew(self._folder, self._standing)

    def _is_over(self) -> bool:
        if self._ended_at is None:
            return False
        here = {agent.node for agent in self._state.agents.values() if not agent.gone}
        wait = self._ended_at + _LEAVE_S
        self._due = min(self._due, wait)
        return here <= self._left or self._now() >= wait


def _without_times(posted: Posted | None) -> tuple[Posted | None, list[StepTimes]]:
    """Return the message without the times of steps that a heartbeat carries, and these times."""
    if posted is None or not isinstance(posted.report, AgentBeat) or not posted.report.step_times:
        return posted, []
    return replace(posted, report=replace(posted.report, step_times=[])), posted.report.step_times


def begin(folder: Path, options: ControlOptions) -> ControlOptions | JournalContent:
    """Return the content of the run's journal if it belongs to this life of the run, else ``options``.

    Raises:
        UserError: the run cannot continue from the journal.
    """
    path = folder / "journal.jsonl"
    if lives(path) <= options.restarts:
        return options
    try:
        return recall(path)
    except ValueError as error:
        raise UserError(f"the run cannot continue from its journal: {error}") from error


def main() -> None:
    """Run the process of the control plane, or of its standby.

    The process does its imports and then waits for a :class:`ControlStart` on standard input; if that is closed
    without one, it exits. It ignores SIGINT and SIGTERM, because the control plane is needed until the workers have
    saved their checkpoints.
    """
    processes.set_name("ft-ctl-spare")
    processes.die_with_parent(signal.SIGKILL)
    lone_tcp_store()  # with a process's first store, torch looks up names, for 10 s if no name server answers
    text, code = sys.stdin.read(), 0
    try:
        code = _serve(from_json(ControlStart, bounded_json.loads(text, non_finite=True))) if text else 0
    except UserError as error:
        print(f"control plane: {error}", file=sys.stderr)
        code = UserError.exit_code
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may be inside torch's store, so a regular interpreter shutdown would abort the process


def _serve(given: ControlStart) -> int:
    processes.set_name("ft-control")
    folder = Path(given.run_dir)
    begins = begin(folder, given.options)
    options = begins if isinstance(begins, ControlOptions) else begins.state.options
    channel = ControlChannel(given.where, token.find(folder, _TOKEN_S))
    launcher = processes.identity(os.getppid())
    standing = LeaseRecord(given.term, options.restarts, channel.where, given.node, os.getpid(), launcher=launcher)
    return Sidecar(folder, channel, begins, standing).run()
