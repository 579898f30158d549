"""The node agent of ``ft run``: an event loop over child processes, workers' connections and control-plane orders; and
:func:`carry_out`, which makes it from the resolved options and returns the exit code.

A life of the run begins with its first start, and with every restart that does not continue from the control plane's
journal; the life has the number of that restart.
"""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft import faults as inject
from ft.base import events, files, token
from ft.base.errors import PLANNED_ENDS, UserError
from ft.base.files import needs_run_dir
from ft.faults.verdict import USER_CODE
from ft.job.agent.console import Console, RecoveryNews, Room, cause_of_crash, last_words
from ft.job.agent.control_plane import ControlPlaneSupervisor, Fenced, JournalBroken, SidecarProcess
from ft.job.agent.devices import Devices
from ft.job.agent.environment import Masters, NodeContext
from ft.job.agent.faults import AgentFaults
from ft.job.agent.health import HEALTH_ROOT, HealthWatch
from ft.job.agent.membership import Membership, claim_name
from ft.job.agent.options import RunOptions, count_gpus
from ft.job.agent.pool import PoolBroken, PoolUpkeep, WarmPool
from ft.job.agent.uplink import Linked, NewLife, NewRefusals, ReportRefused, Unlinked, Uplink, reach
from ft.job.agent.workforce import Worker, WorkerListener, Workforce, listen
from ft.job.control.state import ControlOptions
from ft.job.messages import (
    AgentBeat,
    AgentLeaving,
    Close,
    EndWanted,
    Finish,
    GivenUp,
    Inspect,
    Kill,
    MasterChosen,
    NodeRefused,
    Notice,
    Observed,
    Open,
    Reach,
    Repair,
    Reserve,
    Restart,
    Resume,
    Spawn,
    Stop,
)
from ft.platform import election, network, processes
from ft.platform.health.reader import Reader, of_this_node
from ft.platform.shared_state import keep_on_etcd
from ft.platform.supervisor import Supervisor
from ft.record.run import AGENT_LOG

_TICK_S = 0.1
"""Longest time for which the event loop waits for an event, in seconds."""
_GLANCE_S = 0.02
"""Longest time in seconds from a worker's SIGKILL until the agent notices it."""
_FINISH_S = 10.0
"""Seconds that workers have to exit by themselves after the last step."""
_LEAVE_S = 2.0
"""Longest time for which the agent waits at its end until its last reports are sent, in seconds."""
_RETRY_S = 1.0
"""Pause in seconds before an agent tries again to join the run, if its directory cannot be written."""
_GRACE_S = 1.0
"""Seconds between the end of the last worker after a signal and the end of the agent."""


@dataclass(frozen=True)
class Ending:
    """The planned end of this agent with exit code ``code``.

    Workers that still run at ``deadline`` (monotonic clock, seconds) are killed.
    """

    code: int
    deadline: float


@dataclass(frozen=True)
class Begin:
    """A pending start of workers, which happens as soon as all earlier workers of this agent have ended.

    Attributes:
        number: number of the warm restart, 0 for the first start.
        join: whether the agent first registers with the control plane again.
        anew: whether the agent also starts a new control plane without a journal, and registers with it.
    """

    number: int
    ranks: list[int]
    join: bool = False
    anew: bool = False


class Agent:
    """Runs one node of an ``ft run``: carries out the orders of the control plane on the workers of the node.

    Args:
        port: port on which the run's control plane listens.
        ranks: logical ranks of its first workers.
        joined: message to print once the first snapshots of all workers have reached their peers.
        began: wall-clock time at which training first began, None if it has not.

    Raises:
        UserError: the control plane's host cannot be reached, the run's directory cannot be written, or this node's
            ft run is at work already.
    """

    def __init__(
        self,
        options: RunOptions,
        port: int,
        faults: list[inject.Fault],
        ranks: list[int],
        joined: str = "",
        began: float | None = None,
    ):
        self._options = options
        self._connect(port, faults)
        self._workforce.training_since = began
        self._first_ranks = [] if self.membership.is_late else ranks
        self._number = self._life = options.life or 0
        self._begin: Begin | None = Begin(self._life, self._first_ranks)
        self._seats: dict[int, str] = {}
        self._ending: Ending | None = None
        self._signum = 0
        self._left = self._alone = self._was_unlinked = False
        self._empty_since = self._join_at = 0.0
        self._joined = joined
        self._reported: set[str] = set()
        self._last_words_of: set[str] = set()
        self._messages = NewRefusals(options.run_dir)
        self._has_crashed = False
        self._beat_s, self._next_beat = options.timeouts.agent_beat_s, 0.0

    def _connect(self, port: int, faults: list[inject.Fault]) -> None:
        """Make the components of this agent, and connect them to each other; nothing is started."""
        options, cluster, timeouts = self._options, self._options.cluster, self._options.timeouts
        run_dir, node_rank = options.run_dir, cluster.node_rank
        supervisor, console = Supervisor(), Console(options.quiet)
        endpoint = f"tcp://{cluster.host}:{port}" if cluster.nnodes > 1 and not cluster.in_folder else ""
        uplink = Uplink(run_dir, endpoint, supervisor.wake, timeouts, node_rank)
        pool = WarmPool(supervisor, options.script, run_dir / "logs" / f"n{node_rank}.pool.log", timeouts.stuck_s)
        name, listener = listen()
        place = _place(options, port, name, faults)
        workforce = Workforce(pool, place, uplink.post, supervisor.unwatch, timeouts)
        given = options.devices
        devices = Devices(
            count_gpus if given is None else lambda: given, options.nproc, supervisor.wake, left_out=options.left_out
        )
        recoveries = RecoveryNews(None if node_rank else run_dir / "events.jsonl", console.show)
        where, settings = _channel_address(options, port, place.host), _settings(options, len(faults))
        sidecar = SidecarProcess(supervisor, run_dir, where, settings)
        reader = _reader(options, place.node)
        self._supervisor, self.console, self._uplink, self._workforce = supervisor, console, uplink, workforce
        self._devices, self._recoveries, self._warm_pool = devices, recoveries, pool
        self.membership = Membership(place, devices)
        self._worker_listener = WorkerListener(listener, supervisor, workforce)
        self._masters, self._room = Masters(place, uplink), Room(run_dir, console.complain)
        self._pool = PoolUpkeep(supervisor, pool, workforce, console, self._on_exit)
        self._control = ControlPlaneSupervisor(
            run_dir, node_rank, sidecar, timeouts, uplink, console, recoveries, self._obey
        )
        self._faults = AgentFaults(_own(faults, place), place.node, str(run_dir), uplink.record)
        self._health = HealthWatch(options.health, reader, devices, uplink.post, console.complain)

    def run(self) -> int:
        """Supervise the node until the run ends, and return the exit code.

        All processes that the agent has started have ended when this returns.
        """
        try:
            self._set_up()
            while not (self._ending and not self._workforce.workers):
                self._turn()
            return self._ending.code
        except (PoolBroken, UserError) as error:
            self.console.complain(str(error))
            return getattr(error, "exit_code", 1)
        # the connection's threads may be inside torch: an uncaught exception here could abort the process
        except Exception:
            self.console.complain(traceback.format_exc())
            self._leave_word(traceback.format_exc())
            return 1
        finally:
            self._clean_up()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        self._supervisor.open(self._on_signal, self._on_exit)
        self._worker_listener.open()
        self._control.settle(self._life, self._node)
        if self._options.cluster.node_rank == 0 and not self.membership.is_late:
            with needs_run_dir(self._options.run_dir):
                self._control.start()
        self._pool.start()
        self._devices.start()
        self._uplink.start(self.membership.join, self._life)
        self._health.start()

    @property
    def _node(self) -> str:
        return self.membership.place.node

    def _turn(self) -> None:
        until, has_happened = time.monotonic() + _TICK_S, False
        while not has_happened and time.monotonic() < until:
            has_happened = self._supervisor.turn(_GLANCE_S)
            has_happened = self._glance() or has_happened
        for what in self._uplink.take():
            self._obey(what)
        for report in self._devices.reports():
            self._uplink.post(report)
        self._health.poll(self._node, time.monotonic())
        self._begin_when_possible()
        now = time.monotonic()
        self._workforce.judge(now)
        self._workforce.flush()
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            beats = self._workforce.beats(now)
            self._uplink.post(AgentBeat(self._node, beats, self._workforce.take_step_times()))
            self._faults.heard(beats)
            self._room.heard(beats)
            if self._control.is_here and self._workforce.training_since is None:
                for node, reason in self._messages.new():
                    self._uplink.post(NodeRefused(node, reason))
            self._workforce.sweep()
        if self._joined and self._workforce.is_guarded:
            self.console.say(self._joined)
            self._joined = ""
        self._workforce.inspections.poll()
        self._recoveries.poll()
        self._room.poll()
        self.console.poll()
        if self._signum and not self._ending and not self._rank_holders():
            self._leave_after_grace(now)
        if self._ending and now > self._ending.deadline:
            self._workforce.kill_all()
            self._workforce.drop_unborn()
        elif not self._ending:
            self._pool.look(now)
            self._control.look(now)

    # --- children ----------------------------------------------------------------------------------------------------

    def _glance(self) -> bool:
        """Report workers that are being killed, before their processes have ended; return whether there are any.

        Once this agent has told them to end, the order of what it says matters more, and ends are reported when they
        have come.
        """
        return not self._signum and not self._ending and self._workforce.report_killed()

    def _on_exit(self, pid: int, code: int) -> None:
        holders = {self._workforce.workers[name].pid for name in self._rank_holders()}
        if self._signum and code == -signal.SIGTERM and pid in holders and not self._ending:
            self._say_leaving()  # sent first, so that the control plane knows that the following exits are intended
        worker = self._workforce.ended(pid, code)
        if worker is not None:
            self._devices.ended(worker.name, self._node)
            self._workforce.kept_snapshots.ended(pid, self._rank_of(worker.name), code)
        if worker is not None and code not in PLANNED_ENDS and not worker.doomed and not self._signum:
            self._tell_last_lines(worker, code)

    def _tell_last_lines(self, worker: Worker, code: int) -> None:
        if self.console.shows(worker.log):
            self.console.poll(to_the_end=True)
        rank = self._rank_of(worker.name, worker.rank)
        what = f"logical rank {rank}" if rank is not None else "a standby"
        text = [f"{worker.name} ({what}) {processes.how_it_ended(code)}"]
        lines = [] if self.console.shows(worker.log) else last_words(worker.log, code)
        if lines:
            text[0] += f"; the last lines of {worker.log}:"
        if lines or self.console.shows(worker.log):
            self._last_words_of.add(worker.name)
        self._reported.add(text[0].partition(";")[0])
        self.console.complain("\n".join(text + [f"    {line}" for line in lines]))

    # --- orders ------------------------------------------------------------------------------------------------------

    def _obey(self, what: Any) -> None:
        match what:
            case Repair():
                self._workforce.tell(what)
            case Reserve():
                self._workforce.tell(what)
                for name in what.devices.keys() & self._workforce.workers.keys():
                    self._devices.take(name, what.devices[name])
            case Resume():
                self._workforce.tell(what)
                self._workforce.kept_snapshots.clear()
            case Close():
                self._workforce.tell(what)
                self._recoveries.expect(what.epoch + 1)
            case Open():
                self._workforce.hand_over_snapshots({rank: seat.worker for rank, seat in what.seats.items()})
                self._workforce.tell(what)
                self.membership.sweep(what.epoch)
                self._workforce.training_since = self._workforce.training_since or time.time()
                self._faults.opened(what, self._workforce.training_since)
                for seat in what.seats.values():
                    if seat.node == self._node:
                        self._devices.take(seat.worker, seat.local_rank)
                self._seat({rank: seat.worker for rank, seat in what.seats.items()}, fresh=what.fresh)
            case Inspect():
                self._workforce.inspect(what)
            case Kill():
                self._workforce.kill_hung(what.worker, self._rank_of(what.worker))
            case Spawn():
                if what.node == self._node and not self._ending and not self._signum:
                    self._spawn_standbys(what.count)
            case Restart():
                self._restart(what)
            case Finish():
                self._workforce.tell(what)
                self._workforce.kill(*(name for name, worker in self._workforce.workers.items() if not worker.attached))
                self._end(128 + signal.SIGINT if self._signum == signal.SIGINT else what.code, _FINISH_S)
            case Stop():
                self._stop(what)
            case MasterChosen():
                self._masters.learn(what)
            case Reach():
                reach(what, self._node, self._uplink.post)
            case Notice():
                self._tell_notice(what)
            case GivenUp():
                if what.node == self._node:
                    self._leave_and_come_back(what.reason)
            case Linked() | Unlinked() | NewLife() | ReportRefused() | Fenced() | JournalBroken():
                self._on_link(what)

    def _tell_notice(self, order: Notice) -> None:
        if self._options.cluster.node_rank == 0 or self._control.is_here:
            self.console.complain(order.message)

    def _spawn_standbys(self, count: int) -> None:
        master = self._masters.known(self._number)
        for _ in range(count):
            self._workforce.spawn(None, 0, self._number, master)

    def _restart(self, order: Restart) -> None:
        self.console.say(f"warm restart {order.number}: {order.reason}")
        self._recoveries.expect(0)
        self._begin = Begin(order.number, order.ranks.get(self._node, []))
        self._workforce.kill_all()

    def _begin_when_possible(self) -> None:
        """Start the pending workers once all earlier workers have ended, their devices are free, and the rendezvous
        address is known.
        """
        begin = self._begin
        if begin is None or self._ending or self._signum or self._workforce.workers or self._devices.is_busy:
            return
        if begin.join:
            if not self._can_join_again(begin):
                return
            self._begin = begin = replace(begin, join=False)
        master = self._masters.find(begin.number, begin.ranks) if begin.ranks else None
        if begin.ranks and master is None:
            return
        self._begin, self._number = None, begin.number
        self._workforce.kept_snapshots.clear()
        devices = self._devices
        # If there are too few sound devices, the control plane will find other nodes for these ranks.
        for rank, device in zip(begin.ranks, devices.sound(len(begin.ranks)), strict=False):
            assert master is not None, "there are ranks"
            devices.take(self._workforce.spawn(rank, device, begin.number, master).name, device)
        self._seat({w.rank: name for name, w in self._workforce.workers.items() if w.rank is not None}, fresh=True)

    def _seat(self, seats: dict[int, str], fresh: bool) -> None:
        """Record which worker holds which logical rank, and show the output of the first and the last rank."""
        self._seats = seats
        world_size = self._options.world_size
        names = [seats.get(rank) for rank in sorted({0, world_size - 1})]
        workers = self._workforce.workers
        self.console.follow([workers[name].log for name in names if name in workers], fresh)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _on_signal(self, signum: int) -> None:
        """Tell the workers by SIGTERM to save and end. A second signal kills them."""
        if self._signum or self._ending:
            self._end(128 + signum, 0.0)
            self._workforce.kill_all()
            return
        self._signum = signum
        name = signal.Signals(signum).name
        self.console.say(f"{name}: workers are told to save and end; a second signal kills them")
        self._uplink.post(EndWanted(self._node, signum))
        self._workforce.terminate(self._rank_holders())

    def _leave_after_grace(self, now: float) -> None:
        """End this agent ``_GRACE_S`` seconds after the last worker that held a logical rank has ended.

        The delay leaves time for the control plane's order that contains the result of the run.
        """
        self._empty_since = self._empty_since or now
        if now - self._empty_since > _GRACE_S:
            self._end(128 + self._signum, 0.0)
            self._workforce.kill_all()

    def _rank_of(self, name: str, otherwise: int | None = None) -> int | None:
        return next((rank for rank, worker in self._seats.items() if worker == name), otherwise)

    def _rank_holders(self) -> set[str]:
        return set(self._seats.values()) & self._workforce.workers.keys()

    def _stop(self, order: Stop) -> None:
        self.console.poll(to_the_end=True)
        tells = self._options.cluster.node_rank == 0 or self._control.is_here
        if tells and order.message not in ("", *self._reported) and not self._signum:
            self.console.complain(order.message)
        is_planned = order.code in PLANNED_ENDS
        self._has_crashed = tells and not self._signum and not is_planned and order.code != USER_CODE
        self._end(128 + self._signum if self._signum and not is_planned else order.code, 0.0)
        self._workforce.kill_all()

    # --- the control plane -------------------------------------------------------------------------------------------

    def _on_link(self, what: Linked | Unlinked | NewLife | ReportRefused | Fenced | JournalBroken) -> None:
        match what:
            case Unlinked():
                self._was_unlinked = True
            case Linked():
                if self._was_unlinked:
                    self.console.say(f"the control plane answers again (term {what.term})")
                self._was_unlinked = False
            case NewLife():
                self._begin_anew(what.number, "the run has begun anew")
            case JournalBroken():
                self._begin_anew(self._latest_number() + 1, what.reason, anew=True)
            case Fenced():
                if self._workforce.workers:
                    self._leave_and_come_back(what.reason)
            case ReportRefused():
                self._refuse(what.reason)

    def _refuse(self, reason: str) -> None:
        self.console.complain(f"the run ends: {reason}")
        self._alone = True
        self._end(1, 0.0)
        self._workforce.kill_all()

    def _leave_and_come_back(self, reason: str) -> None:
        """End this node's workers and join again as a standby node: other nodes take over its logical ranks."""
        if self._ending or (self._begin is not None and self._begin.join):
            return
        self.console.complain(f"{self._node} is out of the run ({reason}): its workers end, and it joins as a standby")
        self._uplink.close()
        self._first_ranks = []
        self._begin = Begin(self._latest_number(), [], join=True)
        self._workforce.kill_all()

    def _begin_anew(self, number: int, reason: str, anew: bool = False) -> None:
        """Begin a new life: restart all workers from the checkpoint and, with ``anew``, the control plane.

        The assignment of workers to logical ranks was lost with the old control plane.
        """
        if self._ending or (self._begin is not None and self._begin.anew):
            return
        goes_on = (number <= self._options.max_restarts or not anew) and not self._signum
        what = f"warm restart {number} from the checkpoint" if goes_on else "the run ends"
        self.console.complain(f"{reason}; {what}")
        self._begin, self._life = Begin(number, self._first_ranks, join=True, anew=anew), number
        self._recoveries.expect(0)
        if not goes_on:
            self._alone = True
            self._end(1, 0.0)
        self._workforce.kill_all()

    def _latest_number(self) -> int:
        return max(self._number, self._begin.number if self._begin is not None else 0)

    def _can_join_again(self, begin: Begin) -> bool:
        """Join the run again; return False if a full disk does not let this node, which then tries again later."""
        if (now := time.monotonic()) < self._join_at:
            return False
        try:
            self._join_again(begin)
        except OSError as error:
            if not self._join_at:
                self.console.complain(f"{self._node} cannot join again now: {error}; it tries until it can")
            self._join_at = now + _RETRY_S
            return False
        self._join_at = 0.0
        return True

    def _join_again(self, begin: Begin) -> None:
        if not self._first_ranks and not begin.anew:
            self.membership.come_back()
            self._workforce.settle(self.membership.place)
        self._control.settle(self._life, self._node)
        if begin.anew:
            self._control.start()
        self._uplink.start(self.membership.join, self._life)
        if begin.anew:
            stamps = {"wall": time.time(), "monotonic": time.monotonic(), "node": self._node}
            self._uplink.post(Observed(events.CONTROL_RESTARTED, {**stamps, "number": begin.number}))

    # --- the end, continued ------------------------------------------------------------------------------------------

    def _end(self, code: int, patience: float) -> None:
        if self._ending is None or patience < self._ending.deadline - time.monotonic():
            self._ending = Ending(code, time.monotonic() + patience)
            self._pool.finish()
            self._control.finish()

    def _say_leaving(self) -> None:
        if not self._left:
            self._left = True
            self._control.finish()  # with the ranks of this node the run ends, and so does the control plane
            self._uplink.post(AgentLeaving(self._node, self._signum))

    def _leave_word(self, trace: str) -> None:
        """Write the exception that ends this agent into the run's directory, for ``ft diagnose crash``."""
        with contextlib.suppress(OSError):
            files.replace(self._options.run_dir / "logs" / f"{self._node}{AGENT_LOG}", trace)

    def _clean_up(self) -> None:
        self._workforce.kill_all()
        self.console.poll(to_the_end=True)
        self._recoveries.finish()
        if not self._alone:
            self._say_leaving()
            self._uplink.flush(_LEAVE_S)
        self._uplink.close()
        self._faults.close()
        self._warm_pool.close()
        self._control.close()
        self._supervisor.close()
        self._worker_listener.close()
        self._workforce.inspections.close()
        self._room.close()
        self._recoveries.close()
        if self._has_crashed:
            self.console.complain(cause_of_crash(self._options.run_dir, self._last_words_of))
        self._health.close()
        # last, because it waits for the reader of stdout: nothing else of the run may wait for that reader
        self.console.close()


def _reader(options: RunOptions, node: str) -> Callable[[], Reader]:
    root = os.environ.get(HEALTH_ROOT)
    return lambda: of_this_node(node, Path(root) if root else None, [options.run_dir])


def _own(faults: list[inject.Fault], place: NodeContext) -> list[inject.Fault]:
    """Address this node's planned faults to this agent.

    If a replica of FT-HSDP is restarted with new agents, the agent's name differs from the node's first name.
    """
    asked = f"n{place.options.cluster.node_rank}" if place.options.life else place.node
    return [replace(fault, node=place.node) if fault.node == asked else fault for fault in faults]


def _channel_address(options: RunOptions, port: int, own_host: str) -> str:
    """Return the address at which a control plane on this node would be reached."""
    cluster = options.cluster
    return f"tcp://{cluster.host}:{port}" if cluster.node_rank == 0 else f"tcp://{own_host}:0"


def _place(options: RunOptions, port: int, agent_socket: str, faults: list[inject.Fault]) -> NodeContext:
    cluster = options.cluster
    with needs_run_dir(options.run_dir):
        # the launcher of a replica of FT-HSDP has looked already, and starts agents again and again
        joins = options.joins or options.life is not None
        name = claim_name(options.run_dir, cluster.node_rank, joins)
    host = options.local_addr or network.own_address(cluster.host, port, cluster.node_rank == 0)
    return NodeContext(options, name, host, agent_socket, _write(faults, options.run_dir, name))


def _write(faults: list[inject.Fault], run_dir: Path, node: str) -> str:
    """Write the planned faults to a file for the workers of ``node``. Return its path, "" if no faults are planned."""
    if not faults:
        return ""
    path = run_dir / f"faults.{node}.json"
    try:
        inject.write(path, faults)
    except OSError as error:
        raise UserError(f"the planned faults cannot be written: {error}", "choose --run-dir") from error
    return str(path)


def _settings(options: RunOptions, faults: int) -> ControlOptions:
    cluster = options.cluster
    # a replica that starts again does not wait for its standby nodes: one of them may have moved to another replica
    waits_for_all = not options.life
    return ControlOptions(
        cluster.nnodes if waits_for_all else cluster.training_nodes,
        counts_standby_nodes=waits_for_all,
        faults=faults,
        command=[options.script.target, *options.script.args],
        **{name: getattr(options, name) for name in _SHARED},
    )


_OTHER_FILES = 512
"""Files that an agent opens beside its store's connections: logs, records, and sockets and pipes of its processes."""
_SHARED = ("world_size", "max_restarts", "hot_swap", "replicas", "reorders", "timeouts")
"""Options of the run that the control plane has under the same names."""


# --- the whole run of an agent ----------------------------------------------------------------------------------------


def carry_out(
    options: RunOptions,
    faults: list[inject.Fault],
    announcement: str = "",
    began: float | None = None,
    joined: str = "",
) -> int:
    """Run the agent of this node to the end of the run, and return the exit code.

    Args:
        began: wall-clock time at which training first began, if that was before this agent's start; injection times of
            planned faults are relative to it.
        joined: message to print once the first snapshots of all workers have reached their peers.

    Raises:
        UserError: the options are not usable; nothing has been started.
    """
    port = options.cluster.port or network.free_port(options.cluster.host)
    if options.cluster.node_rank == 0:
        network.check_port(options.cluster.host, port)
    make_run_dir(options, makes_token=options.cluster.node_rank == 0)

    agent = Agent(options, port, faults, first_ranks(options), joined, began)
    if announcement:
        agent.console.say(announcement)
    wanted = 2 * options.world_size + _OTHER_FILES  # if this node has logical rank 0, all ranks connect to its store
    if not processes.allow_files(wanted):
        agent.console.say(f"this node may have to open {wanted} files at once: raise its hard limit (ulimit -Hn)")
    if not options.cluster.in_folder:  # the launcher of replicas tells it for all of them
        for line in networks(options, agent.membership.place.host, options.cluster.nnodes == 1):
            agent.console.say(line)
    if agent.membership.is_late:
        agent.console.say(f"this node joins a run that is under way, as the spare {agent.membership.place.node}")
    return agent.run()


def networks(options: RunOptions, host: str, is_alone: bool) -> list[str]:
    """Return lines that say which interface carries control messages, snapshots and sums of replicas, at which rate.

    Args:
        host: address at which other nodes reach this one.
        is_alone: whether no other node needs them; then there is a line only if the user has chosen an interface.
    """
    if is_alone and options.data_addr is None:
        return []
    own = network.interfaces()
    names = {address: network.said_rate(name) for name, address in own.items()}
    data = options.data_addr or host
    lines = [
        f"networks of node {options.cluster.node_rank}: control over {names.get(host, host)}, snapshots and sums of "
        f"replicas over {names.get(data, data)}"
    ]
    if quick := network.faster(data, own):
        what = ", ".join(f"{names[own[name]]} {own[name]}" for name in quick[:4])
        lines.append(f"faster here: {what}; --data-interface NAME takes one, if the other nodes reach its address")
    return lines


def make_run_dir(options: RunOptions, makes_token: bool, parts: Sequence[Path] = (), lease: str = "") -> None:
    """Make the run's folders on this node, its token, and its shared state if that is on etcd.

    Args:
        makes_token: whether this node makes the run's token if there is none.
        parts: folders of the run's replicas.
        lease: folder, relative to the run's, with the lease that shows whether the run is under way.

    Raises:
        UserError: a folder cannot be written, etcd does not answer, or it holds an earlier run of this name.
    """
    run_dir, cluster = options.run_dir, options.cluster
    with needs_run_dir(run_dir):
        for folder in (run_dir, *parts):
            folder.mkdir(0o755, parents=True, exist_ok=True)
            (folder / "logs").mkdir(0o755, exist_ok=True)
        if makes_token:
            token.make(run_dir)
        if options.control is None:
            return
        root = keep_on_etcd(run_dir, options.control, options.run_id, token.find(run_dir, 0.0))
        if cluster.node_rank or options.joins or election.newest(run_dir / lease) < 0:
            return
    if not election.is_kept(run_dir / lease):
        raise UserError(
            f"etcd holds an earlier run with the name {options.run_id}",
            f"choose another --rdzv-id or --run-dir, or remove that one: etcdctl del --prefix {root}",
        )


def first_ranks(options: RunOptions) -> list[int]:
    """Return the logical ranks of this node's first workers, assigned node by node as in torchrun."""
    if not options.cluster.trains:
        return []
    first = options.cluster.node_rank * options.nproc
    return list(range(first, first + options.nproc))
