"""The workers of one node agent of ``ft run``: their processes, their connections and their last heartbeats.

A worker attaches by connecting to the agent's Unix socket and reporting that it is ready.
"""

import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ft.base import bounded_json
from ft.job.agent import environment
from ft.job.agent.inspections import Inspections
from ft.job.agent.link import socket_address
from ft.job.agent.pool import WarmPool
from ft.job.control.timeouts import Timeouts
from ft.job.messages import (
    SNAPSHOT_MEMORY,
    Beat,
    Inherit,
    Inspect,
    Inspected,
    StepTimes,
    WorkerDone,
    WorkerExited,
    WorkerReady,
    WorkerResumed,
    WorkerSilent,
    WorkerStarted,
    decode,
    encode,
)
from ft.net.channel import Channel
from ft.net.codec import BadMessage
from ft.platform import processes
from ft.platform.processes import Handler, OwnPauses, Standstill
from ft.platform.supervisor import Supervisor


def is_silent(quiet_s: float, state: str, timeouts: Timeouts) -> bool:
    """Return whether a worker without a heartbeat for so many seconds is silent; ``state`` is its letter in /proc."""
    return quiet_s > (timeouts.stopped_s if state in "Tt" else timeouts.silent_s)


_STACK_S = 0.05
_ANSWER_S, _TICK_S = 0.2, 0.005
_JUDGE_S = 0.1
"""Longest time between two calls of ``Workforce.judge`` that the agent intends, in seconds."""


@dataclass
class Worker:
    """One worker, from the request to the warm pool until its process has ended.

    Attributes:
        name: the worker's name, unique in the run.
        rank: logical rank that the worker was started for, None for a standby.
        restart: number of the warm restart (restart of all workers from a checkpoint) in which it was started.
        log: file that receives the worker's output.
        pid: pid of the worker's process, None until the pool has reported it.
        channel: the worker's connection to the agent, None while there is none.
        attached: whether the worker has reported that it is ready.
        beat: the worker's last heartbeat, None before the first.
        beat_at: monotonic time at which that heartbeat was received.
        reported_silent: whether the worker was reported as silent and has sent no heartbeat since.
        resumed_at: step after which the worker has begun its last epoch, None before its first.
        doomed: whether this agent has decided to kill the worker.
        leaving: whether this agent has decided to send SIGTERM to the worker.
        exit_posted: whether its exit was reported to the control plane, although its process may still be ending.
        standstill: activity of the worker's process, watched until the worker has attached.
        local_rank: index of the device on this node that the worker was started with.
        stacks: handler by which the stacks of its process can be read, or None.
    """

    name: str
    rank: int | None
    restart: int
    log: Path
    pid: int | None = None
    channel: Channel | None = None
    attached: bool = False
    beat: Beat | None = None
    beat_at: float = 0.0
    reported_silent: bool = False
    resumed_at: int | None = None
    doomed: bool = False
    leaving: bool = False
    exit_posted: bool = False
    standstill: Standstill = field(default_factory=Standstill)
    local_rank: int = 0
    stacks: Handler | None = None


class Workforce:
    """Starts, monitors, commands and kills the workers of this node.

    Args:
        pool: the warm pool, which forks the workers.
        unwatch: function called with each channel before it is closed.

    Attributes:
        workers: name -> worker, from the request for it until its process has ended.
    """

    def __init__(
        self,
        pool: WarmPool,
        place: environment.NodeContext,
        post: Callable[[Any], None],
        unwatch: Callable[[Channel], None],
        timeouts: Timeouts,
    ):
        self._pool, self._place, self._post, self._unwatch, self._timeouts = pool, place, post, unwatch, timeouts
        self._logs = place.options.run_dir / "logs"
        self._started = 0
        self._early: dict[int, int] = {}
        self._remains: list[int] = []
        self._step_times: list[StepTimes] = []
        self._pauses = OwnPauses(_JUDGE_S)
        self.workers: dict[str, Worker] = {}
        self.kept_snapshots = KeptSnapshots()
        self.inspections = Inspections(place.options.run_dir, place.node, post)
        self.is_guarded = False
        """Whether a worker of this agent has ever committed a step in an epoch: then the first snapshots of all workers
        have reached their peers, because no worker commits a step before.
        """
        self.training_since: float | None = None
        """Wall-clock time at which training first began; injection times of planned faults are relative to it."""

    def settle(self, place: environment.NodeContext) -> None:
        """Use the values of ``place`` in the environments of workers that are started from now on."""
        self._place = place
        self.inspections = Inspections(place.options.run_dir, place.node, self._post)

    # --- processes ---------------------------------------------------------------------------------------------------

    def spawn(self, rank: int | None, local_rank: int, restart: int, master: tuple[str, int]) -> Worker:
        """Request a worker from the pool.

        Args:
            master: (host, port) for the script's own process groups.
        """
        name = f"{self._place.node}.w{self._started}"
        self._started += 1
        worker = Worker(name, rank, restart, self._logs / f"{name}.log", local_rank=local_rank)
        self.workers[name] = worker
        env = environment.worker_environment(self._place, name, restart, rank, local_rank, master)
        if self.training_since is not None:
            env["FT_BEGAN"] = str(self.training_since)
        self._pool.fork(name, str(worker.log), env)
        return worker

    def hear_pool(self) -> list[str]:
        """Process the pool's messages, which report started workers. Return its notes for the user."""
        born, notes = self._pool.take()
        for name, pid in born:
            worker = self.workers.get(name)
            if worker is None:  # ``drop_unborn`` removed it, because the run is over
                processes.kill_whole([pid])
                continue
            worker.pid = pid
            self._post(WorkerStarted(name, self._place.node, pid, worker.rank, worker.restart, worker.local_rank))
            self.hear(worker)
            if worker.doomed:
                processes.kill_whole([pid])
            elif worker.leaving:
                processes.send(pid, signal.SIGTERM)
        return notes

    def ended(self, pid: int, code: int) -> Worker | None:
        """Process the exit of a reaped child. Return its worker, None if no worker with this pid is known (yet)."""
        worker = next((w for w in self.workers.values() if w.pid == pid), None)
        if worker is None:
            if any(w.pid is None for w in self.workers.values()):
                self._early[pid] = code
            return None
        self._post_exit(worker, code)
        del self.workers[worker.name]
        self._pool.forget(pid)
        self._remains.append(pid)
        return worker

    def report_killed(self) -> bool:
        """Report the workers that SIGKILL is ending, before their processes have freed their memory and ended.

        Return whether there are any new ones.
        """
        alive = [(w, w.pid) for w in self.workers.values() if w.pid is not None and not w.exit_posted]
        found = [worker for worker, pid in alive if processes.killed_by(pid) == signal.SIGKILL]
        for worker in found:
            self._post_exit(worker, -signal.SIGKILL)
        return bool(found)

    def _post_exit(self, worker: Worker, code: int) -> None:
        """Pass on the worker's last messages and its exit, unless that was done before."""
        if not worker.exit_posted:
            self.hear(worker)
            self._post(WorkerExited(worker.name, self._place.node, code, worker.attached))
            worker.exit_posted = True

    def sweep(self) -> None:
        """Kill the processes that ended workers have left running.

        This takes time, so it is not part of ``ended``: the exit is reported to the control plane first.
        """
        if self._remains:
            processes.kill_remains(self._remains)
            self._remains = []

    def take_early(self) -> list[tuple[int, int]]:
        """Return (pid, exit code) of workers that had ended before the pool reported their start."""
        pids = {worker.pid for worker in self.workers.values()}
        found = [(pid, self._early.pop(pid)) for pid in list(self._early) if pid in pids]
        if None not in pids:
            self._early.clear()
        return found

    def kill(self, *names: str) -> None:
        """Send SIGKILL to these workers and to all processes that they started.

        Unknown names are ignored: these workers have ended.
        """
        doomed = [self.workers[name] for name in names if name in self.workers and not self.workers[name].doomed]
        for worker in doomed:
            worker.doomed = True
        if pids := [worker.pid for worker in doomed if worker.pid is not None]:
            processes.kill_whole(pids)

    def kill_hung(self, name: str, rank: int | None = None) -> None:
        """Kill a worker on the control plane's order. The snapshots of the holder of a logical rank are kept.

        Before, the others' answers to an inspection are awaited: the recovery that follows ends what they wait for. If
        the worker can still run, it first writes the stacks of its threads into its log (on SIGUSR1).
        """
        self._await_answers()
        worker = self.workers.get(name)
        if worker is not None and worker.pid is not None and processes.state(worker.pid) not in "TZX":
            processes.send(worker.pid, signal.SIGUSR1)
            time.sleep(_STACK_S)
        if rank is not None and worker is not None and worker.pid is not None:
            self.kept_snapshots.keep(rank, worker.pid)
        self.kill(name)

    def _await_answers(self) -> None:
        """Wait for the workers' answers to an inspection, at most ``_ANSWER_S`` seconds, and store them."""
        deadline = time.monotonic() + _ANSWER_S
        while not self.inspections.is_complete and time.monotonic() < deadline:
            for worker in list(self.workers.values()):
                self.hear(worker)
            time.sleep(_TICK_S)
        self.inspections.finish()

    def drop_unborn(self) -> None:
        """Remove the workers that the pool has not started yet, at the end of the run.

        The pool ends too, and so do workers that it still forks.
        """
        self.workers = {name: worker for name, worker in self.workers.items() if worker.pid is not None}

    def kill_all(self) -> None:
        """Kill all workers and all processes that they started."""
        self._await_answers()
        self.kill(*self.workers)

    def terminate(self, names: set[str]) -> None:
        """Send SIGTERM to these workers, which may save a checkpoint and end.

        A worker whose start the pool has not reported yet, but which may be running, gets the signal with that report.
        """
        for name in names & self.workers.keys():
            worker = self.workers[name]
            worker.leaving = True
            if worker.pid is not None:
                processes.send(worker.pid, signal.SIGTERM)

    @property
    def pids(self) -> set[int]:
        """Return the pids of the workers that the pool has started."""
        return {worker.pid for worker in self.workers.values() if worker.pid is not None}

    # --- conversation ------------------------------------------------------------------------------------------------

    def accept(self, channel: Channel, hello: bytes) -> Worker | None:
        """Attach a connection to the worker that its first line, ``hello``, names.

        Return that worker, or None if there is no such living worker or it already has a connection.
        """
        try:
            said = bounded_json.loads(hello)
            worker = self.workers.get(said["worker"])
        except (ValueError, KeyError, TypeError):
            worker = None
        if worker is None or worker.doomed or worker.channel is not None:
            return None
        worker.channel, worker.stacks = channel, Handler.of(said.get("stacks"))
        return worker

    def hear(self, worker: Worker) -> None:
        """Process the worker's messages, and pass its reports on to the control plane.

        If the worker has closed the connection, close it here too; the worker's exit follows.
        """
        if worker.channel is None:  # the worker's end was detected in another way after the socket became readable
            return
        # wait for the pool's report: the control plane must receive "started" before it receives "ready"
        if worker.pid is None:
            return
        for line in worker.channel.receive() or []:
            self._take(worker, line)
        if worker.channel.gone:
            self._unwatch(worker.channel)
            worker.channel.close()
            worker.channel = None

    def hand_over_snapshots(self, seats: Mapping[int, str]) -> None:
        """Have workers of this node take over the snapshots that this agent keeps.

        Those of a logical rank go to its new worker. If that is on another node, a worker of this node serves them. A
        worker that has them keeps them as long as it lives. Otherwise two processes would write their next snapshots
        into the same memory.

        Args:
            seats: logical rank -> the worker that is about to hold it.
        """
        living = {name: w for name, w in self.workers.items() if not w.doomed and not w.exit_posted}
        neighbour = next((w for name in seats.values() if (w := living.get(name)) and w.channel is not None), None)
        for rank in self.kept_snapshots.ranks:
            name = seats.get(rank, "")
            if name not in living and name.startswith(f"{self._place.node}."):
                continue  # that worker has ended, and the control plane will hear of it and fill the seat anew
            successor = living.get(name)
            receiver, before = successor or neighbour, living.get(self.kept_snapshots.holders.get(rank, ""))
            if receiver is not None and receiver.channel is not None and before in (None, receiver):
                self.kept_snapshots.holders[rank] = receiver.name
                order = Inherit(self.kept_snapshots.of(rank), rank, receiver is successor)
                receiver.channel.send(encode(order))

    def tell(self, order: Any) -> None:
        """Send an order to every attached worker."""
        line = encode(order)
        for worker in self.workers.values():
            if worker.attached and worker.channel is not None:
                worker.channel.send(line)

    def inspect(self, order: Inspect) -> None:
        """Ask all workers what they are doing, and store their answers."""
        pids = {name: worker.pid for name, worker in self.workers.items()}
        handlers = {name: worker.stacks for name, worker in self.workers.items() if worker.stacks is not None}
        self.inspections.begins(order, pids, handlers)
        self.tell(order)

    def flush(self) -> None:
        """Send the data that a worker's or the pool's socket did not accept at once."""
        self._pool.flush()
        for worker in self.workers.values():
            if worker.channel is not None and worker.channel.wants_write:
                worker.channel.flush()

    def take_step_times(self) -> list[StepTimes]:
        """Return what workers have reported about their steps since the last call."""
        taken, self._step_times = self._step_times, []
        return taken

    def beats(self, now: float) -> dict[str, Beat]:
        """Return the last heartbeat of each worker, with its present age.

        Pauses of this agent do not count: whatever paused it may have paused its workers, too.
        """
        return {w.name: self._aged(w.beat, w.beat_at, now) for w in self.workers.values() if w.beat is not None}

    def _aged(self, beat: Beat, at: float, now: float) -> Beat:
        """Return the heartbeat that came at ``at``, with all its durations without the pauses of this agent."""

        def lasted(begin: float, end: float) -> float:
            return round(self._pauses.between(begin, end), 3)

        since_s, at_step_s = lasted(at - beat.since_s, at), lasted(at - beat.at_step_s, at)
        return replace(beat, age_s=lasted(at, now), since_s=since_s, at_step_s=at_step_s)

    def judge(self, now: float) -> list[WorkerSilent]:
        """Report each worker that has just become silent to the control plane; return these reports.

        Once workers have attached, the script is known to call ``ft.attach``: a worker that has a rank, has never
        attached and does nothing at all is silent, too.
        """
        self._pauses.look(now)
        held = [w for w in self.workers.values() if not w.doomed and not w.exit_posted]
        is_attaching = any(w.attached and w.channel is not None for w in held)
        new = []
        for worker in held:
            if worker.pid is None or worker.reported_silent:
                continue
            if worker.attached and worker.channel is not None:
                quiet_s = now - worker.beat_at - self._pauses.since(worker.beat_at)
                found = quiet_s > self._timeouts.stopped_s
                found = found and is_silent(quiet_s, processes.state(worker.pid), self._timeouts)
            elif is_attaching and not worker.attached and worker.rank is not None:
                quiet_s = worker.standstill.look(now, worker.pid)
                found = quiet_s > self._timeouts.mute_s
            else:
                continue
            if found:
                worker.reported_silent = True
                state = processes.state(worker.pid)
                new.append(WorkerSilent(worker.name, self._place.node, round(quiet_s, 3), state))
                self._post(new[-1])
        return new

    def _take(self, worker: Worker, line: bytes) -> None:
        try:
            report = decode(line)
        except BadMessage:
            return
        if isinstance(report, Beat):
            worker.beat, worker.beat_at, worker.reported_silent = report, time.monotonic(), False
            if worker.pid is not None:
                self.kept_snapshots.follow(worker.pid, report.memory)
            self._note_progress(worker, report.step)
            return
        if isinstance(report, Inspected):
            self.inspections.heard(report)
            return
        if isinstance(report, StepTimes):
            self._step_times.append(report)
            return
        if isinstance(report, WorkerResumed):
            worker.resumed_at = report.step
        if isinstance(report, WorkerDone):
            self._note_progress(worker, report.step)
        if isinstance(report, WorkerReady):
            worker.attached, worker.beat_at = True, time.monotonic()
        self._post(report)

    def _note_progress(self, worker: Worker, step: int) -> None:
        self.is_guarded |= worker.resumed_at is not None and step > worker.resumed_at


def listen() -> tuple[str, socket.socket]:
    """Open the agent's listening socket. Return (its name for the workers' variable FT_AGENT, the socket).

    The socket is in Linux's abstract namespace, so it leaves no file behind however the agent ends.
    """
    name = f"@ft-agent-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_address(name))
    listener.listen(256)
    listener.setblocking(False)
    return name, listener


class KeptSnapshots:
    """The snapshots that workers of this node leave when they crash, or when this agent kills them.

    Their successors take them over, or a worker of this node serves them to a successor on another node. The agent
    opens the memory of each living worker's snapshots, so that the end of the process does not free it, and keeps it
    open until training goes on. It frees the memory of a worker that somebody else has killed with SIGKILL: the kernel
    does that when memory is short, and in tests it stands for the loss of a node.

    Attributes:
        holders: logical rank of the ended worker -> the worker that its snapshots were handed to.
    """

    def __init__(self) -> None:
        self.holders: dict[int, str] = {}
        self._files: dict[int, list[int]] = {}
        self._of_living: dict[int, tuple[int, list[int]]] = {}

    def follow(self, pid: int, number: int) -> None:
        """Open the files of a process's snapshots, if ``number`` (``Beat.memory``) is not that of the last call.

        The last heartbeat of a process may be read when it has ended. It has no files any more then, and those that are
        open stay open.
        """
        known, files = self._of_living.get(pid, (0, []))
        if number != known and (opened := processes.open_memory(pid, SNAPSHOT_MEMORY)):
            self._of_living[pid] = number, opened
            self._close(files)

    def ended(self, pid: int, rank: int | None, code: int) -> None:
        """Handle the end of a process: keep its snapshots if it crashed, and close their files otherwise.

        Args:
            rank: logical rank that it held, or None.
            code: its exit code, or -N if signal N killed it.
        """
        _, files = self._of_living.pop(pid, (0, []))
        if rank is None or code in (0, -signal.SIGKILL):
            self._close(files)
        else:
            self._add(rank, files)

    def keep(self, rank: int, pid: int) -> None:
        """Keep the snapshots of the process that holds a logical rank; call it before the process is killed."""
        self._add(rank, processes.open_memory(pid, SNAPSHOT_MEMORY))

    def _add(self, rank: int, files: list[int]) -> None:
        """Add files to those that are kept for a rank. A file is closed if its memory is kept already, for any rank."""
        known = {os.fstat(fd).st_ino for kept in self._files.values() for fd in kept}
        for fd in files:
            if os.fstat(fd).st_ino in known:
                os.close(fd)
            else:
                self._files.setdefault(rank, []).append(fd)

    def of(self, rank: int) -> list[str]:
        """Return paths at which the kept snapshots of a logical rank can be opened; an empty list if there are none."""
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._files.get(rank, [])]

    @property
    def ranks(self) -> list[int]:
        """Return the logical ranks for which snapshots of ended workers are kept."""
        return sorted(self._files)

    def clear(self) -> None:
        """Free the memory, except what other processes use."""
        for files in self._files.values():
            self._close(files)
        self._files, self.holders = {}, {}

    def _close(self, files: list[int]) -> None:
        for fd in files:
            os.close(fd)


class WorkerListener:
    """Accepts connections, and passes the connections of workers to the workforce.

    A connection is closed if it belongs to another user or if its first line does not name a worker of this agent.

    Args:
        listener: the socket that ``listen`` returned.
    """

    def __init__(self, listener: socket.socket, supervisor: Supervisor, workforce: Workforce):
        self._listener, self._supervisor, self._workforce = listener, supervisor, workforce

    def open(self) -> None:
        """Accept connections from now on."""
        self._supervisor.watch(self._listener, self._on_connection)

    def close(self) -> None:
        """Close the listening socket; accepted connections stay open."""
        self._listener.close()

    def _on_connection(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # nobody, or no free file descriptor: the connection waits until there is one
            return
        if not _is_mine(sock):
            sock.close()
            return
        channel = Channel(sock)
        self._supervisor.watch(channel, lambda: self._on_hello(channel))

    def _on_hello(self, channel: Channel) -> None:
        line = channel.receive_line()
        if line is None and not channel.gone:
            return
        self._supervisor.unwatch(channel)
        worker = self._workforce.accept(channel, line) if line is not None else None
        if worker is None:
            channel.close()
            return
        self._supervisor.watch(channel, lambda: self._workforce.hear(worker))
        # the channel has already read any data that followed the first line, so the selector would not report that data
        self._workforce.hear(worker)


def _is_mine(sock: socket.socket) -> bool:
    """Return whether the peer process belongs to this user. Any process on the machine could connect to the socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], "little") == os.getuid()
