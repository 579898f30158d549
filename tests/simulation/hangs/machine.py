"""A simulated machine: ranks that carry out their programs in virtual time, with something wrong on some of them.

A collective ends when all members have started it, with fitting operations; a message ends when both ends have been
started. What does not fit never ends. The history of each rank and its departures from it are those of the production
code (``ft.state.groups.history``).
"""

import heapq
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

from ft.faults.hang.graph import all_fit
from ft.faults.hang.look import DEAD, RUNNING, SEND, Look, Operation, Rank, Thread, channel
from ft.state.groups.history import Entry, History
from tests.simulation.hangs.program import Batch, Call, Programs

_COMPUTE_S, _TRANSFER_S, _JITTER = 1.0, 0.05, 0.02
_IN_WAIT = ("torch/distributed/distributed_c10d.py:3100 wait", "megatron/core/training.py:1 train_step")
_IN_COMPUTE = ("megatron/core/transformer/mlp.py:120 forward", "megatron/core/training.py:1 train_step")


@dataclass
class Wrong:
    """What is wrong on one rank.

    Attributes:
        state: state of its process from ``at`` on: ``RUNNING``, ``STOPPED`` or ``DEAD``.
        at: (step, batch) before which it stops for ever; None: it does not.
        inside: whether it stops in the wait for that batch, instead of before it.
        answers: whether it can say what it does.
        frames: its Python calls there.
        kernel: what the operating system says of its training thread.
        program: its program in the step of the fault, if that differs.
        slower: factor of the time that it computes.
        link: factor of the time that each of its operations takes.
        where: its Python calls while it is slow.
    """

    state: str = RUNNING
    at: tuple[int, int] | None = None
    inside: bool = False
    answers: bool = True
    frames: tuple[str, ...] = ()
    kernel: str = "S"
    program: list[Batch] | None = None
    slower: float = 1.0
    link: float = 1.0
    where: tuple[str, ...] = ()


@dataclass
class _Started:
    """One operation that a rank has started."""

    call: Call
    sequence: int
    entry: Entry
    done: bool = False


@dataclass
class _Runner:
    """The state of one rank."""

    rank: int
    history: History = field(default_factory=History)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    step: int = 0
    batch: int = 0
    waits: list[_Started] = field(default_factory=list)
    open: dict[int, _Started] = field(default_factory=dict)
    halted: bool = False
    computing: bool = True


class Machine:
    """Runs the programs of all ranks for a number of steps, or until nothing moves.

    Args:
        programs: the programs.
        steps: number of steps.
        wrong: logical rank -> what is wrong there.
        fault_step: the step in which ``Wrong.program`` replaces the program.
        choice: random numbers for the durations.
    """

    def __init__(self, programs: Programs, steps: int, wrong: dict[int, Wrong], fault_step: int, choice: random.Random):
        self._programs, self._steps, self._wrong = programs, steps, wrong
        self._fault_step, self._choice = fault_step, choice
        self._runners = {rank: _Runner(rank) for rank in programs.steps}
        self._open: dict[tuple, dict[tuple[int, str], _Started]] = defaultdict(dict)
        self._queue: list[tuple[float, int, tuple]] = []
        self._number = 0
        self.now = 0.0
        for rank in self._runners:
            self._later(0.0, ("compute", rank))

    def run(self, until: float = float("inf")) -> None:
        """Go on until this virtual time, or until nothing moves."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            if what[0] == "compute":
                self._compute(self._runners[what[1]])
            elif what[0] == "start":
                self._start(self._runners[what[1]])
            else:
                self._end(what[1])
        self.now = max(self.now, until) if until != float("inf") else self.now

    @property
    def moves(self) -> bool:
        """Return whether anything is still to happen."""
        return bool(self._queue)

    # --- events -------------------------------------------------------------------------------------------------------

    def _later(self, delay: float, what: tuple) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay, self._number, what))

    def _program(self, runner: _Runner) -> list[Batch]:
        wrong = self._wrong.get(runner.rank)
        if wrong is not None and wrong.program is not None and runner.step == self._fault_step:
            return wrong.program
        return self._programs.steps[runner.rank]

    def _compute(self, runner: _Runner) -> None:
        """The rank computes before its next batch."""
        if runner.batch == 0 and runner.step < self._steps:
            runner.history.begins()
        if runner.step >= self._steps:
            runner.computing = False
            return
        runner.computing = True
        wrong = self._wrong.get(runner.rank, Wrong())
        if wrong.at == (runner.step, runner.batch) and not wrong.inside:
            runner.halted = True
            return
        seconds = _COMPUTE_S * wrong.slower * (1 + self._choice.uniform(-_JITTER, _JITTER))
        self._later(seconds, ("start", runner.rank))

    def _start(self, runner: _Runner) -> None:
        """The rank starts its next batch."""
        runner.computing = False
        wrong = self._wrong.get(runner.rank, Wrong())
        here = (runner.step, runner.batch)
        for call in self._program(runner)[runner.batch]:
            started = self._begin(runner, call)
            if call.awaited:
                runner.waits.append(started)
        if wrong.at == here and wrong.inside:
            runner.halted = True
            return
        self._go_on(runner)

    def _begin(self, runner: _Runner, call: Call) -> _Started:
        key = channel(call.group, call.name, call.peer)
        runner.counts[key] += 1
        sequence = runner.counts[key]
        entry = Entry(call.group, call.name, call.peer, call.sizes, call.site, sequence, self.now, lambda: None)
        runner.history.add(entry)
        started = _Started(call, sequence, entry)
        runner.open[id(entry)] = started
        if call.peer is None:
            meeting: tuple = (call.group, sequence)
        else:
            ends = (runner.rank, call.peer) if call.name == SEND else (call.peer, runner.rank)
            meeting = (call.group, *ends, sequence)
        members = self._open[meeting]
        members[runner.rank, call.name] = started
        complete = len(members) == (2 if call.peer is not None else len(self._programs.groups[call.group]))
        if complete and all_fit(map(_operation, members.values())):
            ranks = [rank for rank, _ in members]
            factor = max(self._wrong[rank].link if rank in self._wrong else 1.0 for rank in ranks)
            # The communication library's own threads go on while a rank's program is blocked.
            if not any(self._runners[rank].halted and self._wrong[rank].state != RUNNING for rank in ranks):
                self._later(_TRANSFER_S * factor, ("end", meeting))
        return started

    def _end(self, meeting: tuple) -> None:
        """An operation ends on all its members."""
        members = self._open.pop(meeting)
        for (rank, _), started in members.items():
            started.done = True
            self._runners[rank].open.pop(id(started.entry), None)
        for rank, _ in members:
            self._go_on(self._runners[rank])

    def _go_on(self, runner: _Runner) -> None:
        if runner.halted or runner.computing or any(not one.done for one in runner.waits):
            return
        runner.waits = []
        runner.batch += 1
        if runner.batch >= len(self._program(runner)):
            runner.step, runner.batch = runner.step + 1, 0
        runner.computing = True
        self._compute(runner)

    def is_wrong(self, rank: int) -> bool:
        """Return whether the fault of a rank has come about: the rank has not been stopped by another one before."""
        wrong = self._wrong[rank]
        return self._runners[rank].halted or wrong.program is not None

    def started(self, rank: int) -> list[tuple[Entry, bool]]:
        """Return the operations that a rank has started in the last steps, each with whether it has ended."""
        runner = self._runners[rank]
        return [(entry, id(entry) not in runner.open) for entry in runner.history.entries()]

    # --- looks --------------------------------------------------------------------------------------------------------

    def look(self) -> Look:
        """Return what all ranks would say now."""
        return Look({rank: self._said(runner) for rank, runner in self._runners.items()}, self._programs.groups)

    def _said(self, runner: _Runner) -> Rank:
        wrong = self._wrong.get(runner.rank, Wrong())
        name = f"n{runner.rank // 8}.w{runner.rank % 8}"
        if runner.halted and (wrong.state != RUNNING or not wrong.answers):
            threads = () if wrong.state == DEAD else (Thread(name, (), True, wrong.kernel),)
            return Rank(runner.rank, name, name.partition(".")[0], wrong.state, False, threads=threads)
        if runner.computing and not runner.halted and wrong.slower > 1 and not wrong.answers:
            return Rank(runner.rank, name, answers=False, threads=(Thread(name, (), True, "R"),))
        open_ = [one.entry for one in runner.waits if not one.done]
        awaited = open_[0] if open_ else None

        def status(entry: Entry) -> tuple[bool, bool]:
            return id(entry) not in runner.open, entry is awaited

        frames = _IN_WAIT if open_ else wrong.frames if runner.halted else (wrong.where or _IN_COMPUTE)
        kernel = wrong.kernel if runner.halted else "S" if open_ else "R"
        return Rank(
            *(runner.rank, name, name.partition(".")[0]),
            ended=runner.step >= self._steps,
            step=runner.step,
            counts=dict(runner.counts),
            operations=tuple(_ageless(one) for one in runner.history.operations(status)),
            departure=runner.history.departure(),
            threads=(Thread("MainThread", frames, True, kernel),),
        )


def _ageless(operation: Operation) -> Operation:
    """Return the operation without its age, which the history has measured by the real clock."""
    return replace(operation, age_s=None)


def _operation(started: _Started) -> Operation:
    call = started.call
    sizes = tuple(f"{dtype}{list(shape)}" for dtype, shape in call.sizes)
    return Operation(call.group, call.name, started.sequence, call.peer, sizes)
