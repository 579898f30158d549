"""Launcher of one node: an event loop over the agents of its replicas, and the quorum server if that runs here.

The launcher merges the output of all replicas: the training output of one, and the events and errors of all. Workers
whose agent has died are orphans, which the launcher adopts and kills. When one replica inspects its hanging
workers by itself, because a limit passes, the launcher of its first node asks the other replicas for one at the same
moment, with the file by which a person asks.
"""

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft.base import token
from ft.base.errors import PLANNED_ENDS
from ft.base.files import needs_run_dir
from ft.faults.hang.inspection import SERVER
from ft.faults.hang.replicas import FOR_OTHERS
from ft.job.agent.console import Console, Tail
from ft.job.agent.inspections import of_the_system
from ft.job.control.state import ENDED, GATHERING
from ft.job.quorum import EPOCHS, GIVEN_UP, Notice
from ft.job.replicas import marks, policy
from ft.job.replicas.host import QuorumHost
from ft.job.replicas.marks import Marks, read
from ft.job.replicas.member import ReplicaMember, next_life
from ft.job.replicas.stand_in import LauncherPlace
from ft.platform import processes
from ft.platform.supervisor import Supervisor
from ft.record import inspections
from ft.record.run import read_status, replicas

_NEWS = re.compile(r"^ft: ?")


class MergedConsole:
    """Standard output and standard error of a launcher.

    Args:
        quiet: show only output of workers and errors.
        files: replica -> (file with its agent's standard output, file with its standard error).
    """

    def __init__(self, quiet: bool, files: Mapping[int, tuple[Path, Path]]):
        self._own = Console(quiet)
        self._followed: int | None = None
        self.say, self.complain, self.close = self._own.say, self._own.complain, self._own.close
        self.show(files)

    def show(self, files: Mapping[int, tuple[Path, Path]]) -> None:
        """Show these files of replicas from now on, instead of those so far."""
        self._said = {replica: Tail(out, None) for replica, (out, _) in files.items()}
        self._complained = {replica: Tail(err, None) for replica, (_, err) in files.items()}

    def follow(self, replica: int | None) -> None:
        """Show the workers' output of this replica from now on, and of no other."""
        self._followed = replica

    def poll(self, to_the_end: bool = False) -> None:
        """Show what was written since the last call. ``to_the_end``: also an incomplete last line."""
        self._own.poll()
        for replica, tail in self._said.items():
            for line in tail.take(to_the_end).splitlines(keepends=True):
                if _NEWS.match(line):
                    self.say(self._named(replica, line))
                elif replica == self._followed:
                    self._own.write(line)
        for replica, tail in self._complained.items():
            for line in tail.take(to_the_end).splitlines():
                self.complain(self._named(replica, line))

    @staticmethod
    def _named(replica: int, line: str) -> str:
        return f"replica {replica}: {_NEWS.sub('', line.rstrip())}"


def begun(before: Mapping[int, Any], now: Mapping[int, Any]) -> dict[int, str]:
    """Return the replicas that have begun an inspection, each with the reason, "" if somebody has asked for it.

    Args:
        before: replica -> field "inspection" of its status when it was last read; absent if it was not.
        now: replica -> the same field now.
    """
    found = {}
    for replica, inspection in now.items():
        is_inspection = isinstance(inspection, list) and len(inspection) == 2
        if is_inspection and replica in before and inspection != before[replica] and inspection[0]:
            found[replica] = str(inspection[1])
    return found


class Company:
    """Gets inspections of the other replicas when one of this node makes an inspection. Used in a thread that may wait
    for storage.

    Args:
        server: returns (name of the node, pid) of the quorum server's process; the pid is 0 if it has ended; None if it
            belongs on another node.
    """

    def __init__(self, run_dir: Path, server: Callable[[], tuple[str, int] | None]):
        self._run_dir, self._server = run_dir, server
        self._before: dict[int, Any] = {}

    def follow(self, now: Mapping[int, Any], leads: Collection[int]) -> None:
        """Ask the other replicas for an inspection for each that has begun by itself.

        Args:
            now: replica of this node -> field "inspection" of its status.
            leads: the replicas whose first node is this one.
        """
        found = begun(self._before, now)
        self._before = dict(now)
        for replica, why in found.items():
            if why and replica in leads:
                self._want(replica, why)
        if found and (server := self._server()) is not None:
            node, pid = server
            said = of_the_system(SERVER, f"process {pid}" if pid else "", node, pid or None)
            with contextlib.suppress(OSError):  # the diagnosis knows less; nothing else depends on it
                inspections.note_server(self._run_dir, time.time(), said)

    def _want(self, replica: int, why: str) -> None:
        for other, folder in replicas(self._run_dir).items():
            if other == replica:
                continue
            with contextlib.suppress(OSError):
                inspections.want(folder, f"{FOR_OTHERS}{replica}: {why}")


_PERIOD_S = 0.3


@dataclass(frozen=True)
class Seen:
    """State of the run when it was last read.

    Attributes:
        marks: the marker files of replicas that have finished or were given up.
        phases: replica -> phase of its control plane, "" before there is one.
        restarts: replica -> number of warm restarts inside the replica.
        at: time at which the reading began (monotonic, in seconds).
    """

    marks: Marks = field(default_factory=Marks)
    phases: Mapping[int, str] = field(default_factory=dict)
    restarts: Mapping[int, int] = field(default_factory=dict)
    at: float = 0.0

    def may_run(self, replica: int, since: float) -> bool:
        """Return whether this was read after ``since``, and the present life of ``replica`` had not ended then."""
        return self.at > since and self.phases.get(replica, "") != ENDED

    def trains(self, replica: int) -> bool:
        """Return whether the control plane of ``replica`` exists and has gathered its workers."""
        return self.phases.get(replica, "") not in ("", GATHERING)


class Watch:
    """Reads the state of the run every 0.3 s, in a thread.

    Args:
        folders: replica -> its folder, for the replicas to watch.
        leads: the replicas whose first node is this one.
        company: gets inspections of other replicas when one of these makes an inspection.

    Attributes:
        seen: the state that was read last.
    """

    def __init__(
        self,
        run_dir: Path,
        folders: Mapping[int, Path],
        leads: Collection[int] = (),
        company: Company | None = None,
    ):
        self._run_dir, self._folders, self._leads, self._company = run_dir, folders, leads, company
        self._closed = threading.Event()
        self.seen = Seen()

    def start(self) -> None:
        threading.Thread(target=self._run, name="ft-watch", daemon=True).start()

    def follow(self, folders: Mapping[int, Path], leads: Collection[int] = ()) -> None:
        """Watch these replicas from now on, instead of those so far."""
        self._folders, self._leads, self.seen = folders, leads, Seen(self.seen.marks)

    def look(self) -> Seen:
        """Read the state now."""
        now = time.monotonic()
        found = {replica: read_status(folder) for replica, folder in self._folders.items()}
        phases = {replica: str(status.get("phase", "")) for replica, status in found.items()}
        restarts = {replica: _whole(status.get("restarts")) for replica, status in found.items()}
        self.seen = Seen(read(self._run_dir), phases, restarts, now)
        if self._company is not None:
            self._company.follow({replica: status.get("inspection") for replica, status in found.items()}, self._leads)
        return self.seen

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_PERIOD_S):
            try:
                self.look()
            except OSError:
                continue


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


_TICK_S, _RETRY_S = 0.1, 5.0
"""Period of the event loop, and pause after an agent could not be started, in seconds."""
_ENDING_S, _KILLED_S = 20.0, 10.0
"""Limits in seconds for an agent to end: after the launcher told it to end, and after a second signal to the
launcher.
"""
_ORPHANS_S = 5.0
"""Limit in seconds for processes that dead agents have left behind to die after SIGKILL."""


class Launcher:
    """Carries out ``ft run --ft-hsdp-replicas`` on its node.

    Args:
        supervisor: supervisor of the launcher's child processes, with its event loop.
        host: host of the quorum server, not begun yet.
        least: number of replicas that the run needs.
        place: this node's place in a run with standby nodes, None in other runs.
        members_of: returns the members of a place, to start them there.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        run_dir: Path,
        members: list[ReplicaMember],
        host: QuorumHost,
        console: MergedConsole,
        replicas: int,
        least: int,
        place: LauncherPlace | None = None,
        members_of: Callable[[int], list[ReplicaMember]] = lambda place: [],
    ):
        self._supervisor, self._run_dir, self._host, self._console = supervisor, run_dir, host, console
        self._members = {member.replica: member for member in members}
        self._replicas, self._least, self._place, self._members_of = replicas, least, place, members_of
        self._watch = Watch(run_dir, *_watched(members), Company(run_dir, host.server))
        self._signum, self._signalled_at, self._signals = 0, 0.0, 0
        self._finished_at: float | None = None
        self._is_held_up = False
        self._ending: dict[int, float] = {}
        self._have_trained: set[int] = set()
        self._orphans_since: float | None = None
        self._verdict: policy.Verdict | None = None
        self._failure_notices: list[Notice] = []

    def run(self) -> int:
        """Run until the run ends; return the exit code. No process of the run is left on this node afterwards."""
        try:
            self._set_up()
            while self._verdict is None:
                self._turn()
            return self._code()
        finally:
            self._clean_up()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        self._supervisor.open(self._on_signal)
        for replica in self._members:
            marks.clear(self._run_dir, replica)
        for member in self._members.values():
            member.on_exit = self._on_exit
        with needs_run_dir(self._run_dir):
            self._host.begin()
            for member in self._members.values():
                member.start()
        self._watch.start()

    def _turn(self) -> None:
        self._supervisor.turn(_TICK_S)
        now, seen = time.monotonic(), self._watch.seen
        self._host.look(now)
        self._take_place()
        self._start_again(now)
        self._console.follow(self._shown(seen))
        self._console.poll()
        self._decide(now, seen)
        self._kill_late(now)

    def _shown(self, seen: Seen) -> int | None:
        """Choose the replica whose output is shown: the first that is not restarting, else the first whose agent
        runs.
        """
        self._have_trained |= {replica for replica in self._members if seen.trains(replica)}
        up = [replica for replica, member in sorted(self._members.items()) if member.process is not None]
        sound = (replica for replica in up if seen.trains(replica) or replica not in self._have_trained)
        return next(sound, next(iter(up), None))

    # --- children ----------------------------------------------------------------------------------------------------

    def _on_exit(self, member: ReplicaMember, code: int) -> None:
        self._console.poll(to_the_end=True)
        is_over = bool(self._signum) or self._finished_at is not None
        answer = member.ended(code, ending=is_over)
        if code < 0:
            self._kill_orphans(time.monotonic())
        name = f"replica {member.replica}"
        if answer.action == policy.DONE:
            self._console.say(f"{name} has {answer.reason}")
            self._mark(member.replica, answer.reason)
            self._finished_at = self._finished_at or time.monotonic()
        elif is_over:
            self._console.say(f"{name}: {answer.reason}")
        elif answer.action == policy.AGAIN:
            when = f" in {answer.pause_s:g} s" if answer.pause_s else ""
            self._console.complain(f"{name}: {answer.reason}; another one is started{when}, the others train on")
        elif member.part.is_standby:
            self._console.complain(f"{name} loses the standbys of this node: {answer.reason}")
        else:
            self._give_up(member, answer.reason)

    def _give_up(self, member: ReplicaMember, reason: str) -> None:
        self._console.complain(f"replica {member.replica} is given up: {reason}; {self._way_back(member.replica)}")
        self._mark(member.replica, marks.GIVEN_UP)
        self._failure_notices.append(self._notify(member, reason))

    def _notify(self, member: ReplicaMember, reason: str) -> Notice:
        """Notify the quorum server that this replica is given up, so that the other replicas stop waiting for it."""
        life = next_life(member.folder, 0) - 1
        if member.options.hot_swap:  # each epoch of its workers was a life
            life = (life + 1) * EPOCHS - 1
        return Notice(self._run_dir, member.replica, life, token.find(self._run_dir, 0.0), GIVEN_UP, reason)

    def _mark(self, replica: int, mark: str) -> None:
        try:
            marks.put(self._run_dir, replica, mark)
        except OSError as error:
            self._console.complain(f"other nodes cannot be told how replica {replica} has ended: {error}")

    def _way_back(self, replica: int) -> str:
        standby = " with a standby" if self._members[replica].options.hot_swap else ""
        return f"ft run --ft-hsdp-replicas {self._replicas} --ft-hsdp-replica {replica} ...{standby} brings it back"

    def _start_again(self, now: float) -> None:
        if self._signum:
            return
        due = [m for m in self._members.values() if m.waits and now >= m.due and self._has_a_life(m, now)]
        if not due:
            return
        if self._kill_orphans(now):
            return
        for member in due:
            try:
                member.start()
            except OSError as error:  # a full disk, or no memory: the others train on
                member.due = now + _RETRY_S
                self._console.complain(f"replica {member.replica}: no agent can be started now: {error}")

    def _has_a_life(self, member: ReplicaMember, now: float) -> bool:
        """Return whether an agent can be started: there is a life for it to join, or it begins one.

        A member that waits for too long is given up: the first node of its replica is lost, and nobody took its place.
        """
        if not member.joins or self._watch.seen.may_run(member.replica, member.left_at):
            return True
        limit_s = member.options.timeouts.join_s
        if now - member.left_at > limit_s:
            member.code, member.given_up = 1, True
            self._give_up(member, f"the first of its nodes has not come back within {limit_s:g} s")
        return False

    def _take_place(self) -> None:
        """On a standby node: take the place of a lost node if a replica cannot train without it."""
        if self._place is None or self._signum or self._finished_at is not None:
            return
        try:
            has_moved = self._place.take()
        except OSError as error:
            if not self._is_held_up:
                self._console.complain(f"the place of a lost node cannot be taken now, it is tried again: {error}")
            self._is_held_up = True
            return
        if not has_moved:
            return
        self._is_held_up = False
        members = self._members_of(self._place.number)
        for member in self._members.values():  # to its replica, the end of this agent is the loss of a standby node
            member.on_exit = lambda member, code: None
            member.send(signal.SIGKILL)
        self._members = {member.replica: member for member in members}
        for member in members:
            member.on_exit = self._on_exit
        self._watch.follow(*_watched(members))
        self._console.show({member.replica: (member.out, member.err) for member in members})
        numbers = ", ".join(str(replica) for replica in self._members)
        self._console.say(f"this node takes the place of node {self._place.number}, in replica {numbers}")

    def _kill_orphans(self, now: float) -> bool:
        """Kill the processes that dead agents have left behind; return whether it is worth waiting for some of
        them to die.
        """
        found = [pid for pid in self._supervisor.orphans() if processes.state(pid) not in "ZX"]
        if not found:
            self._orphans_since = None
            return False
        processes.kill_whole(found)
        self._orphans_since = self._orphans_since or now
        return now - self._orphans_since < _ORPHANS_S

    # --- the end -----------------------------------------------------------------------------------------------------

    def _on_signal(self, signum: int) -> None:
        """Handle a request to end the run."""
        self._signum, self._signalled_at, self._signals = signum, time.monotonic(), self._signals + 1
        if self._signals == 1:
            name = signal.Signals(signum).name
            self._console.say(f"{name}: all replicas are told to save and end; a second signal kills them")
        for member in self._members.values():
            # an agent that was started under nohup ignores SIGHUP, and so do all that this one starts
            member.send(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)
            if member.process is None and member.code is None:
                member.code = 128 + signum

    def _decide(self, now: float, seen: Seen) -> None:
        if self._place is not None and self._place.is_lost:
            self._verdict = policy.Verdict(policy.END, "a standby node has taken the place of this node", code=1)
        elif self._signum:
            if all(member.process is None for member in self._members.values()):
                self._verdict = policy.Verdict(policy.END, "all replicas have ended")
        else:
            self._judge(now, seen)

    def _judge(self, now: float, seen: Seen) -> None:
        if seen.marks.finished and self._finished_at is None:
            self._finished_at = now
        finished_s = None if self._finished_at is None else now - self._finished_at
        views = {replica: self._view(member, seen, finished_s) for replica, member in self._members.items()}
        given_up = {replica for replica, view in views.items() if view.given_up} | seen.marks.given_up
        verdict = policy.judge(views, finished_s, given_up, self._replicas, self._least, self._ending)
        if verdict.what == policy.TELL:
            for replica in verdict.replicas:
                self._tell(self._members[replica], verdict.reason, now)
        elif verdict.what == policy.END:
            self._verdict = verdict

    def _view(self, member: ReplicaMember, seen: Seen, finished_s: float | None) -> policy.ReplicaView:
        restarts = seen.restarts.get(member.replica, 0)
        if finished_s is not None and member.restarts_then is None:
            member.restarts_then = restarts
        is_spare = member.part.is_standby  # the replica goes on without it
        return policy.ReplicaView(
            up=member.process is not None,
            code=0 if member.code and is_spare else member.code,
            given_up=member.given_up and not is_spare,
            restarts_then=restarts if member.restarts_then is None else member.restarts_then,
            restarts=restarts,
            gathering=not seen.trains(member.replica),
        )

    def _tell(self, member: ReplicaMember, reason: str, now: float) -> None:
        self._console.say(f"replica {member.replica} is told to end: {reason}")
        self._ending[member.replica] = now
        member.send(signal.SIGTERM)
        if member.process is None:
            member.code = 128 + signal.SIGTERM

    def _kill_late(self, now: float) -> None:
        """Kill agents that do not end in time.

        Agents normally end by themselves once their workers have ended. The launcher waits no longer for an agent that
        was asked to end because the other replicas had finished, or after a second signal.
        """
        for replica, member in self._members.items():
            ending_since = self._ending.get(replica)
            if ending_since is not None and now - ending_since > _ENDING_S:
                member.send(signal.SIGKILL)
        if self._signals > 1 and now - self._signalled_at > _KILLED_S:
            for member in self._members.values():
                member.send(signal.SIGKILL)

    def _code(self) -> int:
        self._console.poll(to_the_end=True)
        codes = {replica: member.code for replica, member in self._members.items()}
        if self._signum:
            ended = [code for code in codes.values() if code is not None]
            return policy.planned(ended) if set(ended) <= {*PLANNED_ENDS} else 128 + self._signum
        verdict = self._verdict
        assert verdict is not None, "the run has ended"
        others = [str(replica) for replica, code in sorted(codes.items()) if code and code not in PLANNED_ENDS]
        if verdict.code not in PLANNED_ENDS:
            self._console.complain(f"the run ends: {verdict.reason}")
        elif others:
            self._console.say(f"{verdict.reason}, without replica(s) {', '.join(others)}")
        else:
            self._console.say(verdict.reason)
        return verdict.code

    def _clean_up(self) -> None:
        for member in self._members.values():
            member.send(signal.SIGKILL)
        self._watch.close()
        if self._place is not None:
            self._place.close()
        for notice in self._failure_notices:
            notice.close()
        self._host.close()
        self._supervisor.close()
        self._console.poll(to_the_end=True)
        self._console.close()


def _watched(members: list[ReplicaMember]) -> tuple[dict[int, Path], set[int]]:
    """Return (replica -> its folder, the replicas whose first node this is)."""
    folders = {member.replica: member.folder for member in members}
    return folders, {member.replica for member in members if not member.part.node_rank}
