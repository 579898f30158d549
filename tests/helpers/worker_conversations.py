"""Conversations about a worker: its heartbeats, the operations of its steps, its protocol with the control plane."""

import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby

from conversations import Player, shown

from ft.base.errors import EpochClosed
from ft.job import messages as m
from ft.job.parts import Seat
from ft.state.groups.history import History, StartedOperation
from ft.worker import protocol
from ft.worker.progress import Progress
from ft.worker.protocol import Orders


class Heartbeats(Player):
    """What a worker says in its heartbeats, by a clock of its own; what it does are commands, too."""

    plays = "progress"

    def do_worker(self, step):
        """A worker begins to train after a committed step. Its training thread waits for nothing, nor its device."""
        self.now, self.host, self.device, self.told, self.inside = 100.0, None, None, [], ExitStack()
        self.progress = Progress(lambda: self.host, lambda: self.now, self._unfinished)
        self.progress.begins(step)
        self.progress.begun = lambda is_usual: self.told.append("a usual step" if is_usual else "not a usual step")
        self.progress.interrupted = lambda: self.told.append("interrupted")
        return []

    def _unfinished(self):
        """NCCL's wait has returned (torch, ProcessGroupNCCL.cpp, ``synchronizeStream``); the operation goes on."""
        return None if self.device is None else ("tp", "allreduce", self.now - self.device)

    def outcome(self):
        found, self.told = self.told, []
        return found

    def do_host(self, where=None, ago=0.0):
        """From some seconds ago on the training thread waits in this place, or nowhere."""
        self.host = None if where is None else (where, self.now - ago)

    def do_device(self, ago=None):
        """From some seconds ago on the device executes an operation, or none."""
        self.device = None if ago is None else self.now - ago

    def do_at(self, *activity):
        """What follows is done in an activity, up to ``leave``."""
        self.inside.enter_context(self.progress.at(*activity))

    def do_leave(self):
        self.inside.close()

    def do_pass(self, seconds):
        """Time passes."""
        self.now += seconds

    def do_after(self, *seconds, device=None):
        """Show the heartbeats after these seconds, one after the other. ``device``: see ``device``; anew for each."""
        for each in seconds:
            self.device = self.device if device is None else self.now - device
            self.now += each
            beat = self.progress.beat()
            yield f"{beat.doing} in {beat.where} for {beat.since_s:g} s, {beat.at_step_s:g} s in the step"


def start(kept: History, names: str) -> None:
    """Tell the history of operations that are started, one for each letter."""
    for at, name in enumerate(names, 1):
        place = f"train.py:{name}"
        kept.add(StartedOperation(name, "all_reduce", None, (), place, at, time.monotonic(), lambda: None))


class Steps(Player):
    """Which steps' operations are compared; what is told to the history of operations are commands, too."""

    plays = "kept"

    def do_history(self):
        self.kept = History()

    def do_step(self, names):
        """Operations are started, one for each letter. Show how the step departs from the one before."""
        start(self.kept, names)
        return self.do_departure()

    def do_departure(self):
        found = self.kept.departure()
        return [f"departs: {found.kind}" if found else "departs in nothing"]


class Member(protocol.Member):
    """A worker that has received orders. ``quiet``: how often nothing arrives in time before the first of them."""

    def __init__(self, quiet=0, epoch=1):
        super().__init__("n0.w0", "n0")
        self.address, self.progress, self.epoch = "n0:1", Progress(), epoch
        self.sent, self.errors, self._quiet = [], [], quiet
        self.orders = Orders(self.note_close)

    def send(self, report):
        self.sent.append(report)

    async def next_order(self, within_s):
        if self._quiet:
            assert within_s == protocol.REPEAT_S
            self._quiet -= 1
            return None
        return self.orders.next(0.0)

    async def wait_closed(self, within_s):
        self._quiet -= 1
        return self._quiet < 0

    def log_error(self, error):
        self.errors.append(error)


class Worker(Player):
    """A worker's protocol on a queue of orders; steps of the protocol show what the worker then does and has sent."""

    def do_worker(self, quiet=0, epoch=1, rank=None):
        """A worker; ``quiet``: how often nothing arrives in time before the first order."""
        self.member = Member(quiet, epoch)
        self.member.rank = self.member.rank if rank is None else rank

    def do_open(self, epoch, *workers, fresh=False):
        """It receives the order to open an epoch in which these workers hold the ranks 0, 1, and so on."""
        seats = {rank: Seat(name, "n0", f"{name}:1", rank) for rank, name in enumerate(workers)}
        self.member.orders.deliver(m.Open(epoch, seats, [], fresh))

    def do_order(self, kind, *values):
        """It receives another order."""
        self.member.orders.deliver(getattr(m, kind)(*values))

    def do_awaits(self, kind, report):
        return self._shown(protocol.await_order(self.member, getattr(m, kind), report))

    def do_finishes(self, step):
        return self._shown(protocol.finish(self.member, step))

    def do_enters(self, report=None):
        return self._shown(protocol.enter_next_epoch(self.member, report))

    def do_takes_a_seat(self):
        return self._shown(protocol.take_seat(self.member))

    def do_fails(self, step, kind, *values):
        """Training has raised an error."""
        raised = {"ValueError": ValueError, "EpochClosed": EpochClosed}[kind](*values)
        return self._shown(protocol.report_failure(self.member, step, raised))

    def _shown(self, steps) -> list[str]:
        """Carry out steps of the protocol; return what they lead to, what was sent and logged, and where it is now."""
        member = self.member
        try:
            ended = protocol.run(steps)
            lines = [] if ended is None else [f"obeys {_on_a_line(ended)}"]
        except (EpochClosed, SystemExit) as error:
            lines = [f"{type(error).__name__}: {error}"]
        sent, member.sent = [_on_a_line(report) for report in member.sent], []
        lines += [f"sent {len(list(times))} x {report}" for report, times in groupby(sent)]
        lines += [f"logged: {error!r}" for error in member.errors]
        place = f"rank {member.rank}, epoch {member.epoch}, {'closed' if member.closed else 'open'}"
        return [*lines, f"{place}; joins: {member.joins}; progress of epoch {member.progress.epoch}"]


def _on_a_line(report) -> str:
    """Return an order, or a report without its trace, which has paths of this machine."""
    if isinstance(report, str):
        return report
    return f"{type(report).__name__} {shown(replace(report, trace='') if hasattr(report, 'trace') else report)}"


PLAYERS = {"heartbeats": Heartbeats, "steps": Steps, "worker": Worker}
