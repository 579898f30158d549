"""Conversations about single parts: DMR's deferred operators and blame, copies from epoch to epoch, texts as data."""

import contextlib
import io
import os
import re
import shlex
from types import SimpleNamespace
from unittest import mock

import torch
from conversations import Player, shown

from ft.faults import Fault, worker
from ft.faults.worker import Injector
from ft.job.parts import Seat
from ft.systems.dmr.plan.trace import (
    D_INTER,
    NAIVE,
    PIGGYBACK,
    AgcSegment,
    Assignment,
    MemoryInUse,
    Operator,
    Plan,
    Predicted,
    Tensor,
    Trace,
    Window,
)
from ft.systems.dmr.runtime import findings, suspects
from ft.systems.dmr.runtime.cursor import ExecutedUnit, OperatorCall, operator_id
from ft.systems.dmr.runtime.findings import Findings, Mismatch
from ft.systems.dmr.runtime.operators import call_of, properties_of, state_before
from ft.systems.dmr.runtime.queue import Execution, Queue
from ft.systems.dmr.runtime.strategy import CheckMethod, Planned, PlannedSegment
from ft.systems.hot_swap.recovery_manager import Placing
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.ft_trainer.data.datasets import read_lengths
from tools.preprocess_data import preprocess

OPERATORS = {"mm": "mm.default", "relu": "relu.default", "dropout": "native_dropout.default"}
CONSTANTS = {"dropout": (0.5, True)}


def operator(name: str):
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


class Deferred(Player):
    """Operators of one rank that wait for a window; ``a`` and ``b`` are square matrices."""

    def do_queue(self, segments=None, lasting=(), **how):
        """Begin anew. ``segments``: name -> [operators, window of the replay]; ``lasting``: tensors of parameters."""
        torch.manual_seed(0)
        self.tensors, self.executed = {name: torch.randn(8, 8) for name in "ab"}, 0
        self.findings = Findings(torch.device("cpu"), 0)
        replays = {name: PlannedSegment(*each) for name, each in (segments or {}).items()}
        weights = {self.tensors[name].untyped_storage()._cdata for name in lasting}
        self.queue = Queue(self.findings, segments=replays, lasting=weights, **how)
        return []

    def do_execute(self, out, name, *given, due=0, replay=None, flip=False, size=0.0):
        """Execute an operator that is verified later; ``flip``: its result is falsified."""
        func = operator(OPERATORS[name])
        call = call_of(func, (*(self.tensors[each] for each in given), *CONSTANTS.get(name, ())))
        state, made = state_before(call), func(*call.args)
        results = made if isinstance(made, tuple) else (made,)
        self.tensors[out] = results[0]
        if flip:  # one bit of every element: operators that read some of them, or set some to zero, let it pass on
            flat = torch.as_strided(results[0], (results[0].numel(),), (1,))
            flat.view(torch.int32).bitwise_xor_(1 << 20)
        at = OperatorCall(call.kind.name, "backward", 0, 0, 1, self.executed)
        self.executed += 1
        # The queue may be the only one to hold the results: nobody else has them by now.
        waits = self.queue.put(Execution(at, call, made, state), CheckMethod(D_INTER, due, replay, 10.0, size))
        return [] if waits else [f"operator {at.index} does not wait"]

    def do_view(self, out, of):
        """A part of a tensor, transposed."""
        self.tensors[out] = self.tensors[of].t()[1:5]
        return []

    def do_change(self, name):
        """Add one in place, as the dispatcher does it."""
        self.queue.before_change([self.tensors[name]])
        self.tensors[name].add_(1)
        return self.do_show()

    def do_change_unseen(self, name):
        """Add one in place, past the dispatcher."""
        self.tensors[name].add_(1)
        return []

    def do_give_up(self, name):
        """Free a result, as the schedule does it."""
        self.tensors.pop(name).data = torch.empty(1)
        return []

    def do_window(self, number):
        """A window of the plan."""
        return self._shown(lambda: self.queue.window(number))

    def do_open_window(self, is_over=False):
        """A window of unknown length, which is over at once or not."""
        return self._shown(lambda: self.queue.dynamic_window(lambda: is_over))

    def do_drain(self):
        return self._shown(self.queue.drain)

    def do_restart(self):
        """The iteration is broken off."""
        return self._shown(self.queue.restart)

    def do_show(self):
        return self._shown(lambda: None)

    def _shown(self, act) -> list[str]:
        before = torch.get_rng_state()
        act()
        moved = "" if torch.equal(before, torch.get_rng_state()) else "; the generator has moved"
        queue, found = self.queue, self.findings.settle()
        wrong = [f"{one.at.index}{f' ({one.note})' if one.note else ''}" for one in found]
        counts = f"in windows {queue.in_windows}, early {queue.early}, late {queue.late}"
        waits = f"{queue.most_bytes} bytes at most; {'some wait' if queue else 'none waits'}"
        return [f"{counts}; {waits}; wrong: {', '.join(wrong) or 'none'}{moved}"]

    def do_operators(self, *names):
        """Show what DMR knows of torch's operators."""
        lines = []
        for name in names:
            kind = properties_of(operator(name))
            words = [word for word in ("executes", "random", "communicates") if getattr(kind, word)]
            written = [f"{key} of argument {position}" for position, key in kind.written]
            lines.append(
                f"{kind.name}: {', '.join(words) or 'is not executed again'}; writes {', '.join(written) or '-'}"
            )
        return lines


ASSIGNMENTS = {None: Assignment(NAIVE), "recomputation": Assignment(PIGGYBACK)}


class Followed(Player):
    """How a plan of six operators is followed, of 10 us each in one unit, with windows ``gap`` and ``open`` after them.

    ``gap`` is after the fourth operator in the plan, ``open`` has a length that only the run shows.
    """

    NAMES = ("mm", "add", "relu", "mm", "mul", "sum")

    def do_plan(self, stage=0, unit="backward", replayed=(), unstable=(), **windows):
        """Begin with the plan of a stage. ``windows``: ``o1=gap``, ``o0=recomputation``; others are verified at once.

        ``replayed``: numbers of the operators of a segment that is replayed in ``gap``.
        """
        ids = [operator_id(stage, unit, 0, 0, number) for number in range(len(self.NAMES))]
        ops, how = [], {}
        for number, (key, name) in enumerate(zip(ids, self.NAMES, strict=True)):
            reads = ("w", f"t{number}")
            ops.append(Operator(key, name, "backward", 10.0 * number, 10.0, reads, stage=stage, layer=1))
            segment = "agc" if number in replayed else None
            how[key] = ASSIGNMENTS.get(windows.get(f"o{number}")) or Assignment(D_INTER, windows[f"o{number}"], segment)
        tensors = {f"t{number}": Tensor(100.0, 60.0) for number in range(6)} | {"w": Tensor(1e6)}
        gaps = (Window("gap", 40.0, 0.0, "bubble", stage), Window("open", 50.0, 5.0, "ep", stage, dynamic=True))
        segments = {"agc": AgcSegment(tuple(ids[number] for number in replayed), "gap", (), 20.0)} if replayed else {}
        trace = Trace({}, tuple(ops), tensors, gaps, MemoryInUse({}))
        plan = Plan(trace, how, segments, Predicted(1.0, 1.0, 1.0, 0.0, 0.0))
        self.planned = Planned(plan, 0, unstable=unstable)
        return [f"replays {name}: {one.size} operators, due {one.due}" for name, one in self.planned.replays.items()]

    def do_execute(self, *names, unit="backward", in_segment=False):
        """Show what is decided on the operators of an execution of the unit, by default those of the plan."""
        for index, name in enumerate(names or self.NAMES):
            found = self.planned.decide(ExecutedUnit(unit), index, name, in_segment)
            yield f"{index} {name}: {shown(found)}"
        yield f"operators out of place: {sum(self.planned.misfits.values())}"


_AT = re.compile(r"(\w+)@(\d+)(?:#(\d+))?(?:/(\d+))?(?:/(\d+))?")


class Blame(Player):
    """Who is blamed for an iteration that keeps coming out wrong, on four ranks."""

    def do_limits(self, ranks=4, earlier=None, **limits):
        """Another iteration. ``earlier``: rank -> number of its wrong attempts in iterations before."""
        self.limits, self.attempts = suspects.AttemptLimits(**limits), []
        counts = {int(rank): count for rank, count in (earlier or {}).items()}
        self.earlier = {rank: (frozenset({"mm"}),) * counts.get(rank, 0) for rank in range(ranks)}
        return []

    def do_attempt(self, operator="mm", **ranks):
        """Show what is decided after an attempt in which ranks have found mismatches (``r2=AT_ONCE``).

        Each rank has one of a kind, in the ``operator``, or some: ``OPERATOR@NUMBER#MICROBATCH/CALL/PART``.
        """
        found = {int(rank[1:]): [mismatch(one, operator) for one in _listed(each)] for rank, each in ranks.items()}
        self.attempts.append({rank: tuple(each) for rank, each in found.items()})
        outcome = suspects.decide(self.attempts, self.earlier, self.limits)
        lines = f"{outcome.action} {list(outcome.ranks) or ''}".strip(), outcome.reason, outcome.fix
        return [": ".join(filter(None, lines))]

    def do_origins(self):
        """Show where the mismatches of the last attempt begin."""
        begun = suspects.origins(self.attempts[-1])
        return [f"rank {rank}: {[one.at.operator for one in each]}" for rank, each in begun.items()]


def _listed(value) -> list:
    return value if isinstance(value, list) else [value]


def mismatch(text: str, operator: str = "mm") -> Mismatch:
    """Return a mismatch of a kind in ``operator``, or of two executions at the place that the text says."""
    if match := _AT.fullmatch(text):
        index, microbatch, call, part = (int(each or 0) for each in match.groups()[1:])
        return Mismatch(OperatorCall(match[1], "forward", 0, microbatch, 1, index, call, part), findings.AT_ONCE)
    return Mismatch(OperatorCall(operator, "forward", 0, 0, 1, 0), getattr(findings, text))


class Placement(Player):
    """Who holds a worker's copies, and what is said of it. The data-parallel groups are ranks 0 and 1, and 2 and 3."""

    def do_seats(self, *nodes, rank=0, joins=False, racks=None, of=2, strict=False):
        """A worker of a run whose logical ranks sit on these nodes. ``of``: number of nodes that began the run."""
        self.events = []
        observe = lambda event, **detail: self.events.append((event, detail))  # noqa: E731
        self.session = SimpleNamespace(rank=rank, joins=joins, observe=observe)
        self.racks, self.nodes, peers = racks or {}, of, [0, 1] if rank < 2 else [2, 3]
        self.do_sit(*nodes)
        groups = {"dp_groups": [[0, 1], [2, 3]], "dp_peers": peers, "shards": ["s"], "copies_are_complete": True}
        self.placing = self._placing(SimpleNamespace(**groups), strict)
        return []

    def _placing(self, subject, strict) -> Placing:
        with mock.patch.dict(os.environ, GROUP_WORLD_SIZE=str(self.nodes)):
            return Placing(self.session, subject, 1, strict=strict)

    def do_sit(self, *nodes):
        """Other nodes have the seats."""
        domains = [{"rack": self.racks[node]} if node in self.racks else {} for node in nodes]
        self.session.seats = {r: Seat(f"w{r}", node, "", 0, domains[r]) for r, node in enumerate(nodes)}
        return []

    def do_begin(self):
        lines = self._told(self.placing.begin)
        self.copies = next((detail["copies"] for name, detail in self.events if name == "copies_placed"), None)
        return lines

    def do_renew(self, *before):
        """The seats of another epoch. ``before``: who held the copy of each rank; nothing: who held it at the start."""
        if before:
            self.copies = {rank: [holder] for rank, holder in enumerate(before)}
        return self._told(lambda: self.placing.renew(self.copies))

    def _told(self, act) -> list[str]:
        self.events.clear()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            held = act()
        told = [f"{name}: {detail}" for name, detail in self.events]
        return [f"my copy: {held}", *told, *out.getvalue().splitlines()]


class Texts(Player):
    """Text files that ``tools/preprocess_data.py`` makes an indexed dataset of."""

    def line_preprocess(self, text):
        """Show the documents that these flags lead to, the sentence of the tool, and what was skipped."""
        words = shlex.split(text.replace("RUN", str(self.folder)))
        prefix = [] if "--output-prefix" in words else ["--output-prefix", f"{self.folder}/out"]
        facts, skipped = preprocess([*prefix, "--input", *words])
        read_lengths(f"{self.folder}/out")
        documents = [document.tolist() for document in IndexedDataset(f"{self.folder}/out")]
        return [
            *map(_document, documents),
            facts.replace(str(self.folder), "RUN"),
            *([f"skipped: {skipped}"] if skipped else []),
        ]

    def do_files(self):
        """Show what the folder holds."""
        return [" ".join(sorted(os.listdir(self.folder)))]


def _document(ids: list[int]) -> str:
    if max(ids) > 256:
        return str(ids)
    return repr(bytes(i for i in ids if i < 256).decode()) + " and its end" * (256 in ids)


class Injected(Player):
    """Faults that a worker of rank 3 in node n1 does to itself, on a clock that only steps and sleeping move."""

    def do_injector(self, *planned, fired=()):
        """A worker with these faults, of which those in ``fired`` have happened."""
        self.told, self.now = [], 100.0
        faults = [Fault(number, **fault) for number, fault in enumerate(planned, 1)]
        self.injector = Injector(faults, 3, "n1", fired, self._announce, self)
        return [] if self.injector.is_armed else ["nothing is planned"]

    def _announce(self, fault):
        self.told.append(f"announced {fault.number}")

    def act(self, fault):
        self.told.append(f"{fault.kind} {fault.copies or ''}".strip())

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.told.append(f"sleeps {seconds:g} s")
        self.now += seconds

    def do_fired(self, *numbers):
        """The worker hears that these faults have happened to others."""
        self.injector.update(numbers)
        return ["some are to come" if self.injector.has("between") else "none is to come"]

    def do_steps(self, *steps, phases=("between", "forward", "reduce", "optimizer"), takes=1.0):
        """Show what happens in the phases of these steps."""
        lines = []
        for step in steps:
            for phase in phases:
                self.told.clear()
                try:
                    with mock.patch.object(worker, "time", self):
                        self.injector.at(phase, step)
                except Exception as error:
                    self.told.append(f"{type(error).__name__}: {error}")
                lines += [f"step {step}, {phase}: {', '.join(self.told)}"] if self.told else []
            self.now += takes
        return lines


PLAYERS = {
    **{"blame": Blame, "dmr": Deferred, "followed": Followed},
    **{"injected": Injected, "placement": Placement, "data": Texts},
}
