"""A simulated machine: ranks that carry out the communication of Megatron's steps, with something wrong on some.

A collective ends when all members have started it, with fitting operations; a message ends when both ends have been
started. What does not fit never ends. The history of each rank and its departures from it are those of the production
code (``ft.state.groups.history``).
"""

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import product

from ft.faults.hang.graph import all_fit
from ft.faults.hang.inspection import DEAD, RECV, RUNNING, SEND, Inspection, Operation, Rank, Thread, channel
from ft.state.groups.history import History, StartedOperation
from tests.simulation.engine import Timeline

# --- programs ---------------------------------------------------------------------------------------------------------

_CORE = "megatron/core"


@dataclass(frozen=True)
class Call:
    """One operation of a program.

    Attributes:
        group: name of the process group.
        name: name of the operation.
        sizes: (type, shape) of its tensors.
        site: the line that starts it.
        peer: logical rank of the other end of a message, None for a collective.
        awaited: whether the rank waits for its end before it goes on.
    """

    group: str
    name: str
    sizes: tuple
    site: str
    peer: int | None = None
    awaited: bool = True


Batch = tuple[Call, ...]
"""Operations that are started together; the rank goes on when those that are awaited have ended."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel grid, and of a step.

    Attributes:
        tp: tensor-parallel size.
        cp: context-parallel size.
        dp: data-parallel size.
        pp: number of pipeline stages.
        ep: expert-parallel size; it divides ``dp``. 1: a dense model.
        vpp: number of model chunks of each stage.
        microbatches: number of micro-batches of a step.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    microbatches: int = 4

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def __str__(self) -> str:
        sizes = (("TP", self.tp), ("CP", self.cp), ("DP", self.dp), ("PP", self.pp), ("EP", self.ep), ("VPP", self.vpp))
        return " x ".join(f"{name}{size}" for name, size in sizes if size > 1) or "one rank"


@dataclass
class Programs:
    """The programs of all ranks.

    Attributes:
        groups: name of each group -> its members.
        steps: logical rank -> the batches of one step.
    """

    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    steps: dict[int, list[Batch]] = field(default_factory=dict)


def programs(layout: Layout) -> Programs:
    """Return the programs of all ranks of a layout, with the order of ranks TP, CP, DP, PP."""
    grid = {
        (tp, cp, dp, pp): tp + layout.tp * (cp + layout.cp * (dp + layout.dp * pp))
        for tp, cp, dp, pp in product(range(layout.tp), range(layout.cp), range(layout.dp), range(layout.pp))
    }
    found = Programs()
    kinds = {
        "tp": lambda t, c, d, p: (c, d, p),
        "cp": lambda t, c, d, p: (t, d, p),
        "dp": lambda t, c, d, p: (t, p),
        "pp": lambda t, c, d, p: (t, c, d),
        "mp": lambda t, c, d, p: (c, d),
        "ep": lambda t, c, d, p: (t, c, d // layout.ep, p),
    }
    member: dict[tuple[str, int], str] = {}
    for kind, key in kinds.items():
        classes: dict[tuple, list[int]] = defaultdict(list)
        for place, rank in grid.items():
            classes[key(*place)].append(rank)
        for number, ranks in enumerate(classes.values()):
            name = f"{kind}/{number}"
            found.groups[name] = tuple(sorted(ranks))
            for rank in ranks:
                member[kind, rank] = name
    for place, rank in grid.items():
        found.steps[rank] = _Step(layout, found, member, grid, place, rank).batches()
    return found


class _Step:
    """Builds the program of one rank."""

    def __init__(self, layout: Layout, all_: Programs, member, grid, place, rank: int):
        self._layout, self._all, self._member, self._grid = layout, all_, member, grid
        self._place, self._rank, self._batches = place, rank, []

    def batches(self) -> list[Batch]:
        layout, stage = self._layout, self._place[3]
        self._collective("tp", "broadcast", (64, 8), "tensor_parallel/data.py:76 broadcast_data")
        for chunk, micro in product(range(layout.vpp), range(layout.microbatches)):
            self._pass_on(chunk, stage, forward=True, micro=micro)
        for chunk, micro in product(reversed(range(layout.vpp)), range(layout.microbatches)):
            self._pass_on(chunk, stage, forward=False, micro=micro)
        dp = "distributed/param_and_grad_buffer.py"
        self._collective("dp", "reduce_scatter", (4096,), f"{dp}:380 start_grad_sync")
        if layout.pp > 1:
            self._collective("pp", "all_reduce", (256, 8), "distributed/finalize_model_grads.py:210 embedding_grads")
        self._collective("mp", "all_reduce", (1,), "optimizer/clip_grads.py:120 get_grad_norm_fp32")
        self._collective("dp", "all_gather", (2048,), f"{dp}:260 start_param_sync")
        self._collective("dp", "all_reduce", (2,), "training/training.py:1490 train_step")
        return self._batches

    def _pass_on(self, chunk: int, stage: int, forward: bool, micro: int) -> None:
        layout = self._layout
        ahead, last_chunk = (1, layout.vpp - 1) if forward else (-1, 0)
        first, last = (0, layout.pp - 1) if forward else (layout.pp - 1, 0)
        begins = stage == first and chunk == (0 if forward else layout.vpp - 1)
        ends = stage == last and chunk == last_chunk
        way = "forward" if forward else "backward"
        if layout.pp > 1 and not begins:
            self._message(RECV, (stage - ahead) % layout.pp, f"recv_{way}")
        self._layer(way)
        if layout.pp > 1 and not ends:
            self._message(SEND, (stage + ahead) % layout.pp, f"send_{way}", awaited=False)

    def _layer(self, way: str) -> None:
        line = 100 if way == "forward" else 200
        if self._layout.cp > 1:
            self._ring(line)
        self._collective("tp", "all_gather", (32, 8), f"tensor_parallel/mappings.py:{line} {way}")
        if self._layout.ep > 1:
            self._collective("ep", "all_to_all", (48, 8), f"transformer/moe/token_dispatcher.py:{line} {way}")
            self._collective("ep", "all_to_all", (48, 8), f"transformer/moe/token_dispatcher.py:{line + 30} {way}")
        self._collective("tp", "reduce_scatter", (32, 8), f"tensor_parallel/mappings.py:{line + 50} {way}")

    def _ring(self, line: int) -> None:
        """Exchange keys and values with both neighbours of the context-parallel ring, started together."""
        group = self._member["cp", self._rank]
        ranks = self._all.groups[group]
        at = ranks.index(self._rank)
        after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]
        site = f"{_CORE}/extensions/context_parallel.py:{line} exchange"
        both = [
            Call(group, SEND, (("bfloat16", (16, 8)),), site, after),
            Call(group, RECV, (("bfloat16", (16, 8)),), site, before),
        ]
        self._batches.append(tuple(both))

    def _message(self, name: str, stage: int, what: str, awaited: bool = True) -> None:
        tp, cp, dp, _ = self._place
        peer, group = self._grid[tp, cp, dp, stage], self._member["pp", self._rank]
        site = f"{_CORE}/pipeline_parallel/p2p_communication.py:{300 if name == SEND else 320} {what}"
        self._batches.append((Call(group, name, (("bfloat16", (64, 8)),), site, peer, awaited),))

    def _collective(self, kind: str, name: str, shape: tuple[int, ...], site: str) -> None:
        group = self._member[kind, self._rank]
        if len(self._all.groups[group]) > 1:
            self._batches.append((Call(group, name, (("bfloat16", shape),), f"{_CORE}/{site}"),))


# --- machine ----------------------------------------------------------------------------------------------------------

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
    entry: StartedOperation
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
        self._time = Timeline()
        for runner in self._runners.values():
            self._time.after(0.0, self._compute, runner)

    @property
    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._time.now

    def run(self, until: float = math.inf) -> None:
        """Go on until this virtual time, or until nothing moves."""
        while self._time.next_at <= until and self._time.turn():
            pass
        if until != math.inf:
            self._time.now = max(self._time.now, until)

    # --- events -------------------------------------------------------------------------------------------------------

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
        self._time.after(seconds, self._start, runner)

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
        entry = StartedOperation(
            call.group, call.name, call.peer, call.sizes, call.site, sequence, self.now, lambda: None
        )
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
                self._time.after(_TRANSFER_S * factor, self._end, meeting)
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

    def started(self, rank: int) -> list[tuple[StartedOperation, bool]]:
        """Return the operations that a rank has started in the last steps, each with whether it has ended."""
        runner = self._runners[rank]
        return [(entry, id(entry) not in runner.open) for entry in runner.history.entries()]

    # --- inspections --------------------------------------------------------------------------------------------------

    def inspect(self) -> Inspection:
        """Return what all ranks would say now."""
        return Inspection({rank: self._said(runner) for rank, runner in self._runners.items()}, self._programs.groups)

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

        def status(entry: StartedOperation) -> tuple[bool, bool]:
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
