"""Inspections of runs that are too large to be simulated: what each rank says when training hangs because of one rank.

The others wait as they do when that rank stops within a layer of one stage: its tensor-parallel ranks in their
collective, the context-parallel ring one behind the other, its experts in their exchange, the other stages for messages
from their neighbours, and all other model replicas in the reduction of gradients.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ft.faults.hang.inspection import DEAD, RECV, SEND, Inspection, Operation, Rank, Thread
from tests.simulation.hangs.machine import Layout

FAULTS = ("busy", "node", "mismatch", "link", "scattered")
"""One rank computes; its node of 8 ranks is lost; it has started another collective; everybody has started the same
collective, and it does not end; every rank has started a collective of another size."""

_DONE = 40


class _Place(NamedTuple):
    tp: int
    cp: int
    dp: int
    pp: int


class _Run:
    """The ranks and groups of a layout, and the rank at fault, which is in the middle."""

    def __init__(self, layout: Layout):
        self.layout = layout
        sizes = (layout.pp, layout.dp, layout.cp, layout.tp)
        self.places = [_Place(t, c, d, p) for p, d, c, t in product(*map(range, sizes))]
        self.guilty = self.places[len(self.places) // 2]
        self.groups: dict[str, list[int]] = defaultdict(list)
        for rank, place in enumerate(self.places):
            for kind in ("tp", "cp", "ep", "pp", "dp"):
                self.groups[self.group(kind, place)].append(rank)

    def rank(self, place: _Place) -> int:
        size = self.layout
        return place.tp + size.tp * (place.cp + size.cp * (place.dp + size.dp * place.pp))

    def group(self, kind: str, place: _Place) -> str:
        t, c, d, p = place
        block = d // self.layout.ep
        key = {"tp": (c, d, p), "cp": (t, d, p), "ep": (t, c, block, p), "pp": (t, c, d), "dp": (t, p)}[kind]
        return f"{kind}/{'.'.join(map(str, key))}"

    def waits_in(self, place: _Place) -> Operation:
        """Return the operation in which a rank waits because of the one at fault."""
        _, c, d, p = self.guilty
        if place.dp // self.layout.ep != d // self.layout.ep:
            return self.collective("dp", "reduce_scatter", place)
        if place.pp != p:
            stage = place.pp + (1 if place.pp < p else -1)
            return self.message(RECV, "pp", place, place._replace(pp=stage))
        if place.dp != d:
            return self.collective("ep", "all_to_all", place)
        if place.cp != c:
            return self.message(RECV, "cp", place, place._replace(cp=(place.cp - 1) % self.layout.cp))
        return self.collective("tp", "all_gather", place)

    def collective(self, kind: str, name: str, place: _Place) -> Operation:
        return Operation(self.group(kind, place), name, _DONE + 1, sizes=("bfloat16[32, 8]",), site="step.py:1 step")

    def message(self, name: str, kind: str, place: _Place, other: _Place) -> Operation:
        sizes = ("bfloat16[64, 8]",)
        return Operation(self.group(kind, place), name, _DONE + 1, self.rank(other), sizes, site="step.py:2 step")

    def done(self, place: _Place) -> dict[str, Operation]:
        """Return the last operation of each channel of a rank."""
        found = [self.collective(kind, "all_reduce", place) for kind in ("tp", "ep", "dp")]
        for kind, axis, wraps in (("cp", "cp", True), ("pp", "pp", self.layout.vpp > 1)):
            at, size = getattr(place, axis), getattr(self.layout, axis)
            for step, name in product((1, -1), (SEND, RECV)):
                if size > 1 and (wraps or 0 <= at + step < size):
                    other = place._replace(**{axis: (at + step) % size})
                    found.append(self.message(name, kind, place, other))
        return {one.channel: replace(one, sequence=_DONE, done=True, awaited=False) for one in found}


def large_inspection(layout: Layout, fault: str) -> Inspection:
    """Return an inspection of a run that hangs.

    Args:
        layout: the layout.
        fault: one of ``FAULTS``.
    """
    run = _Run(layout)
    guilty = run.rank(run.guilty)
    ranks = {}
    for rank, place in enumerate(run.places):
        worker, node, done = f"n{rank // 8}.w{rank % 8}", f"n{rank // 8}", run.done(place)
        if fault == "node" and rank // 8 == guilty // 8:
            ranks[rank] = Rank(rank, worker, node, DEAD, answers=False)
            continue
        started = (_started(run, place, fault, rank),) if rank != guilty or fault not in ("busy", "node") else ()
        counts = {key: one.sequence for key, one in done.items()}
        counts |= {one.channel: one.sequence for one in started}
        operations = (*(one for key, one in done.items() if counts[key] == _DONE), *started)
        threads = (Thread("MainThread", ("train.py:88 my_metric",), trains=True),)
        ranks[rank] = Rank(rank, worker, node, step=2, counts=counts, operations=operations, threads=threads)
    return Inspection(ranks, {name: tuple(members) for name, members in run.groups.items()})


def _started(run: _Run, place: _Place, fault: str, rank: int) -> Operation:
    if fault == "link":
        return run.collective("dp", "reduce_scatter", place)
    if fault == "scattered":
        return replace(run.collective("dp", "reduce_scatter", place), sizes=(f"bfloat16[{rank}]",))
    if place == run.guilty:
        kind = "tp" if run.layout.tp > 1 else "dp"
        return run.collective(kind, "broadcast", place)
    return run.waits_in(place)
