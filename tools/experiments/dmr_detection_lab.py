"""Fault injection for ``dmr_detection.py``: repeats an iteration from one state, each time with another bit flip."""

import random
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PLAN = "plan"
IN_WINDOW = "checker in a window"


@dataclass(frozen=True)
class Case:
    """A kind of run.

    Attributes:
        world: number of ranks.
        way: how operators are executed twice: "naive", "piggyback" or PLAN.
        flags: flags of the trainer.
        divides_sequences: whether attention for context parallelism is planted; the real one needs a GPU.
        indices: whether results that are not floating-point numbers are flipped, too. With two ranks, an index that is
            out of range would end one rank and leave the other waiting.
    """

    world: int
    way: str
    flags: str

    @property
    def divides_sequences(self) -> bool:
        return "--context-parallel-size" in self.flags

    @property
    def indices(self) -> bool:
        return self.world == 1


class Catalogue:
    """The results in an iteration of one rank that can be flipped: (operator, phase, execution, floating point)."""

    def __init__(self):
        self.found: list[tuple] = []

    def restart(self) -> None:
        self.found = []

    def falsify(self, execution, operator, cursor, tensors) -> None:
        kinds = [tensor.is_floating_point() for tensor in tensors if tensor.numel()]
        if kinds:
            self.found.append((operator, cursor.unit.phase, execution, all(kinds)))

    def deferred(self, at, tensors) -> None:
        kinds = [tensor.is_floating_point() for tensor in tensors if tensor.numel()]
        if kinds:
            self.found.append((at.operator, at.phase, IN_WINDOW, all(kinds)))


def one_flip(tell, number: int, seed: int, indices: bool):
    """Return a falsifier of the ``number``-th result of an iteration; without ``indices``, of the first floating-point
    result from there on. Windows of varying length make the order of results differ between iterations."""
    from ft.faults.flip import Flip
    from ft.systems.dmr.runtime.injection import Falsifier

    class Exact(Falsifier):
        seen, armed, in_window = -1, False, False

        def falsify(self, execution, operator, cursor, tensors):
            if self.is_it(operator, tensors):
                super().falsify(execution, operator, cursor, tensors)

        def deferred(self, at, tensors):
            if self.is_it(at.operator, tensors):
                self.in_window = True
                super().deferred(at, tensors)

        def is_it(self, operator, tensors) -> bool:
            filled = [tensor for tensor in tensors if tensor.numel()]
            self.seen += bool(filled)
            if self.armed or self.seen < number or not filled:
                return False
            if not (indices or all(tensor.is_floating_point() for tensor in filled)):
                return False
            self.armed = True
            self.arm(number, Flip(operator, seed=seed))
            return True

    return Exact(tell)


def waits(way: str | Path) -> tuple[int, int]:
    """Return how many operators of this rank wait for windows by a plan: individually, and in AGC segments."""
    from ft.systems.dmr.plan.file import read_plan
    from megatron.core import parallel_state

    if not isinstance(way, Path):
        return 0, 0
    plan, stage = read_plan(way), parallel_state.get_pipeline_model_parallel_rank()
    deferred = [plan.assign[op.id] for op in plan.trace.ops if op.stage == stage and plan.assign[op.id].window]
    alone = sum(how.agc_segment is None for how in deferred)
    return alone, len(deferred) - alone


class Lab:
    """Repeats iterations of a job from the same state, with one falsifier each. ``way``: as in ``dmr_jobs.protection``.

    Attributes:
        waits: numbers of operators of this rank that wait for windows: individually, and in AGC segments.
    """

    def __init__(self, job, way: str | Path):
        import dmr_jobs

        self._job, self._again = job, dmr_jobs.Again(job)
        self.engine = dmr_jobs.protection(job, way).engine
        self.waits = waits(way)
        self.falsifier = None
        self.engine.mode._disturbance = self
        self.engine.queue.disturb = self.deferred
        self.engine._falsifier = self
        self.engine._collectives._falsify = self.engine._falsify_reduced

    def falsify(self, *args) -> None:
        if self.falsifier is not None:
            self.falsifier.falsify(*args)

    def deferred(self, *args) -> None:
        if self.falsifier is not None:
            self.falsifier.deferred(*args)

    def attempt(self, falsifier) -> tuple[bool, list, str | None, tuple]:
        """Return (whether any rank has found a mismatch, what this rank has found, error, resulting state)."""
        import torch.distributed as dist

        from megatron.ft_trainer.loop import _update

        self.falsifier, error, loss = falsifier, None, None
        self._again._undo.begin()
        self._again._undo.wait()
        with self.engine.iteration(self._job.microbatches(self._job.options.training.global_batch_size)):
            try:
                loss = _update(self._job).loss
            except Exception as caught:
                if dist.get_world_size() > 1:
                    raise
                error = f"{type(caught).__name__}: {caught}".splitlines()[0][:200]
        self.falsifier = None
        flag = self.engine.flag()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        found = list(self.engine.settle())
        left = None if flag.item() else (repr(loss), self._again._state())
        self._again._undo.roll_back()
        return bool(flag.item()), found, error, left


def flips_of(lab: Lab, case: Case, count: int, seed: int, stop_after: float = float("inf")) -> dict:
    """Inject ``count`` flips, one after the other, and return their outcomes and what they are out of. Collective.

    Args:
        lab: repeats the iteration.
        case: the kind of run.
        count: number of flips.
        seed: chooses the results and the bits.
        stop_after: seconds after which no further flip is made.
    """
    import torch.distributed as dist

    catalogue = Catalogue()
    for _ in range(2):  # the first iteration of a process has operators that later ones do not have
        catalogue.restart()
        alarmed, _, _, clean = lab.attempt(catalogue)
    coverage, waits = lab.engine.coverage(), [None] * dist.get_world_size()
    dist.all_gather_object(waits, lab.waits)
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, catalogue.found)
    ended = 0
    began, flips, alarms = time.monotonic(), [], int(alarmed)
    for number, (rank, index) in enumerate(plan(by_rank, case, count, seed)):
        is_over = [time.monotonic() - began > stop_after]
        dist.broadcast_object_list(is_over, src=0)  # all ranks end at the same flip
        if is_over[0]:
            break
        hits: list = []
        falsifier = None
        if dist.get_rank() == rank:
            falsifier = one_flip(hits.append, index, seed * 1_000_003 + number, case.indices)
        try:
            alarmed, found, error, left = lab.attempt(falsifier)
        except Exception as caught:  # with several ranks, one has ended and the others cannot continue
            print(f"flip {number} has ended a rank: {caught}", flush=True)
            ended = 1
            break
        outcome = [None]
        if falsifier is not None:
            outcome = [{**judge(hits, alarmed, found, error, left == clean), "in_window": falsifier.in_window}]
        dist.broadcast_object_list(outcome, src=rank)
        flips.append({"rank": rank, **outcome[0]})
        if number % 50 == 49:
            alarms += int(lab.attempt(None)[0])
    return {
        "world": case.world,
        "way": case.way,
        "flags": case.flags.split(),
        "groups": len({(rank, key[:3]) for rank, found in enumerate(by_rank) for key in found}),
        "results": sum(map(len, by_rank)),
        "coverage": coverage,
        "waits": [sum(each) for each in zip(*waits, strict=True)],
        "false_alarms": alarms,
        "ended": ended,
        "seconds": time.monotonic() - began,
        "flips": flips,
    }


def plan(by_rank: list[list[tuple]], case: Case, count: int, seed: int):
    """Choose which result of which rank to flip, taking turns between the groups of results."""
    draw = random.Random(f"flips {seed}")
    groups: dict[tuple, list] = defaultdict(list)
    for rank, found in enumerate(by_rank):
        for index, (*key, floating) in enumerate(found):
            if floating or case.indices:
                groups[tuple(key)].append((rank, index))
    names = sorted(groups, key=str)
    draw.shuffle(names)
    for number in range(count):
        yield draw.choice(groups[names[number % len(names)]])


def judge(hits: list, alarmed: bool, found: list, error: str | None, is_same: bool) -> dict:
    """Return the outcome of a flip, with what was hit.

    The outcomes: "nothing hit"; with an alarm "found", "found elsewhere" (another operator is named) or "error" (the
    iteration has failed, too); without one "masked" (the state is right), "ended" (the iteration has failed), "missed".

    Args:
        hits: what the falsifier has flipped, at most one entry.
        alarmed: whether any rank has found a mismatch.
        found: the mismatches of the rank whose result was flipped.
        error: the exception of the iteration, or None.
        is_same: whether the iteration has led to the same state as one without a flip.
    """
    if not hits:
        return {"outcome": "nothing hit"}
    (hit,) = hits
    names = {one.at.operator for one in found}
    named = hit.operator in names or (hit.execution is None)
    quiet = "ended" if error else "masked" if is_same else "missed"
    outcome = ("error" if error else "found") if alarmed else quiet
    return {
        "outcome": outcome if not alarmed or named else "found elsewhere",
        "error": error,
        "how": sorted({one.how for one in found}),
        "mismatches": len(found),
        **vars(hit),
    }
