"""Verify calls whose kernels bypass torch's dispatcher, by executing each call twice as a whole, for DMR (SpareTrain).

DMR (dual modular redundancy) follows operators by a mode of torch's dispatcher. Kernels of Transformer Engine,
flash-attention, Apex, Triton and of CUDA extensions do not pass it, and neither do those that ``torch.compile``
generates. What calls them (:mod:`functions`, :mod:`compiled`) is executed twice: at first for comparison only, then
everything that this has changed is put back, and the second execution is the one that counts. Compared bit for bit are
the results, what the call keeps for the backward pass, and what it changes in place.

Within an activation-checkpointing segment the recomputation is the second execution, as it is for operators, if the
call changes nothing (SpareTrain, Method 1).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ft.state.snapshot import rng
from ft.systems.dmr.digest import same
from ft.systems.dmr.plan.assign import PIGGYBACK
from ft.systems.dmr.runtime.findings import AT_ONCE, BEFORE, RECOMPUTATION, Mismatch
from ft.systems.dmr.runtime.knowledge import Knowledge, Notes, agree
from ft.systems.dmr.runtime.mode import CHECKER, PRIMARY
from ft.systems.dmr.runtime.reachable import Reachable
from ft.systems.dmr.runtime.strategy import AT_ONCE as TWICE
from ft.systems.dmr.runtime.strategy import SKIPPED, WITH_RECOMPUTATION

if TYPE_CHECKING:
    from ft.systems.dmr.runtime.cursor import OperatorCall
    from ft.systems.dmr.runtime.engine import Engine
    from ft.systems.dmr.runtime.segments import Segment

OPAQUE = "opaque"
"""The set of calls that are executed twice as a whole, in the counts of :class:`mode.DoubleExecution`."""


@dataclass(frozen=True, slots=True)
class Executed:
    """One execution of a call.

    Attributes:
        value: what it has returned.
        kept: what it keeps besides, for the backward pass for example.
        context: the context that it was executed with (:class:`context.Context`); None: it has none.
    """

    value: Any
    kept: Any = None
    context: Any = None


class OpaqueCalls:
    """Executes each opaque call twice, while an iteration is protected.

    Which tensors a function changes is learnt in the first iteration in which it is called: copies of all reachable
    tensors are taken. Later only those that have ever changed are copied; digests show that the others stay unchanged.
    If one does change, that is a mismatch: the iteration is repeated, and what is changed in it is learnt as well.

    Args:
        engine: the engine of this rank.
        left_out: names of functions that are not reproducible; they are executed once.
        compares: False in a profile, where each call is executed once.

    Attributes:
        flags: classes whose attributes calls change, such as "this is the first layer".
    """

    def __init__(self, engine: "Engine", left_out: Collection[str] = (), *, compares: bool = True):
        self._engine, self._left_out, self._compares = engine, frozenset(left_out), compares
        self.flags: list[type] = []
        self._is_inside = self._is_scratch = False
        self._notes: dict[str, Notes] = {}
        self._agreed: dict[str, Knowledge] = {}
        self._told: dict[str, Knowledge] = {}
        self._learns, self._learnt = False, set[str]()
        self._afterwards: list[Callable[[], Any]] = []

    @property
    def is_watching(self) -> bool:
        """Return whether the next call is one to verify, and not part of another one."""
        return self._engine.is_active and not self._is_inside

    def restart(self, *, learns: bool = False) -> None:
        """Begin an iteration. ``learns``: whether all ranks look anew at what each function changes, because the
        iteration before was wrong."""
        self._is_inside = self._is_scratch = False
        self._afterwards.clear()
        self._learns, self._learnt = learns, set() if learns else set(self._notes)

    @property
    def has_news(self) -> bool:
        """Return whether this rank has noted what it has not told the others yet."""
        return self._knowledge() != self._told

    def share(self, exchange: Callable[[Any], Sequence[Any]]) -> None:
        """Agree with all ranks on what is known. Collective.

        Args:
            exchange: gives a value to all ranks, and returns those of all ranks.
        """
        self._told = self._knowledge()
        self._agreed = agree(exchange(self._told))

    def _knowledge(self) -> dict[str, Knowledge]:
        return {name: notes.knowledge() for name, notes in self._notes.items()}

    def call(
        self, name: str, run: Callable[[], Executed], roots: Callable[[], Mapping[str, Any]], *, after: bool = False
    ) -> Executed | None:
        """Execute a call, twice unless it belongs to another one that is.

        Args:
            name: name of the function.
            run: executes it.
            roots: returns what it may read or change.
            after: whether it changes lasting state after other calls. If it is called within one, it is executed
                when that one is verified, and not at all in the execution that is for comparison only.

        Returns:
            The execution that counts; None if there is none.
        """
        if after and self._is_scratch:
            return None
        if after and self._is_inside:
            # what it changes must not be taken for a change by the call that it follows
            self._afterwards.append(lambda: self.call(name, run, roots, after=True))
            return None
        if not self.is_watching:
            return run()
        result = self._outermost(name, run, roots)
        while self._afterwards:
            self._afterwards.pop(0)()
        return result

    def _outermost(self, name: str, run: Callable[[], Executed], roots: Callable[[], Mapping[str, Any]]) -> Executed:
        self._is_inside = True
        mode = self._engine.mode
        is_passing, mode.is_passing = mode.is_passing, True
        try:
            if not self._compares:
                return run()
            if name in self._left_out:
                mode.count(SKIPPED)
                if mode.segment is not None:
                    mode.segment.unchecked()
                return run()
            return self._verified(name, run, roots())
        finally:
            self._is_inside, mode.is_passing = False, is_passing

    def _verified(self, name: str, run: Callable[[], Executed], roots: Mapping[str, Any]) -> Executed:
        mode, course = self._engine.mode, self._engine.course
        at, notes = course.at(name, course.unit.index), self._notes.setdefault(name, Notes())
        with self._engine.unwatched():
            before = Reachable(roots)
        if mode.segment is None:
            return self._twice(at, notes, run, before)[0]
        execute = self._in_recomputation if mode.again else self._in_forward
        ours, made = execute(mode.segment, at, notes, run, before)
        mode.segment.returned(made.values(), before.tensors.values())
        return ours

    def _in_forward(
        self, segment: "Segment", at: "OperatorCall", notes: Notes, run: Callable[[], Executed], before: Reachable
    ) -> tuple[Executed, dict[str, torch.Tensor]]:
        """Execute a call in the forward pass of a segment: once, if the recomputation will be the second execution."""
        name, mode, known = at.operator, self._engine.mode, self._agreed.get(at.operator)
        waits = mode.uses_recomputation and segment.is_comparable and not self._learns
        waits = waits and known is not None and known.can_wait
        segment.calls(name)
        segment.settle(WITH_RECOMPUTATION if waits else TWICE, name, again=False)
        if waits:
            mode.count(PIGGYBACK)
            ours = run()
            made = self._made(PRIMARY, at, ours, before)
            with self._engine.unwatched():
                segment.primary(at, _chosen(made, known.in_forward))
        else:
            ours, made = self._twice(at, notes, run, before)
            if known is None or not known.is_recomputed:
                segment.unchecked()
        notes.made_in_forward(made)
        return ours, made

    def _in_recomputation(
        self, segment: "Segment", at: "OperatorCall", notes: Notes, run: Callable[[], Executed], before: Reachable
    ) -> tuple[Executed, dict[str, torch.Tensor]]:
        """Execute a call in the recomputation of a segment: once, if the forward pass was the first execution and made
        all that is made now."""
        name, mode, known = at.operator, self._engine.mode, self._agreed.get(at.operator)
        partner = segment.called()
        if partner is not None:
            self._notes[partner].was_called_again(partner == name)
        has_waited = segment.settle(TWICE, name, again=True) is not TWICE
        if has_waited:
            segment.is_extra(name)  # whether this is the place in the recomputation at which the function is expected
        if has_waited and not known.keeps_more:
            mode.count(PIGGYBACK)
            ours = run()
            made = self._made(CHECKER, at, ours, before)
            if not known.in_forward.issuperset(made):
                self._engine.findings.note(Mismatch(at, RECOMPUTATION, note="it keeps more than in earlier steps"))
        else:
            ours, made = self._twice(at, notes, run, before)
        if has_waited:
            with self._engine.unwatched():
                segment.again(at, _chosen(made, known.in_forward))
        elif partner is not None and (known is None or not known.is_recomputed):
            segment.unchecked()
        notes.made_again(made)
        return ours, made

    def _twice(
        self, at: "OperatorCall", notes: Notes, run: Callable[[], Executed], before: Reachable
    ) -> tuple[Executed, dict[str, torch.Tensor]]:
        """Execute a call twice and compare. Return the second execution, and what it has made, by paths."""
        engine, findings, changed = self._engine, self._engine.findings, notes.changed
        engine.mode.count(OPAQUE)
        learns = at.operator not in self._learnt
        with engine.unwatched():
            for owner in self.flags:
                before.note_flags(owner)
            copies = before.copies(before.tensors if learns else changed)
            if engine.queue:
                engine.queue.before_change([before.tensors[path] for path in copies])
            unchanged = [path for path in before.tensors if path not in copies]
            expected = self._digests(before.contents(path) for path in unchanged)
            generators = rng.blobs()
        theirs = self._for_comparison(run)
        with engine.unwatched():
            generators_after = rng.blobs()
            if learns:
                changed |= {path for path, copy in copies.items() if not same(before.contents(path), copy)}
            made = self._made(CHECKER, at, theirs, before, changed)
            paths, digests = list(made), self._digests(made.values())
            del theirs, made  # digests stay: the second execution may write its results into the same memory
            before.put_back({path: copies[path] for path in changed if path in copies})
            if generators_after != generators:
                rng.restore(generators)
        ours = run()
        with engine.unwatched():
            made = self._made(PRIMARY, at, ours, before, changed)
            if list(made) != paths or generators_after != rng.blobs():
                findings.note(Mismatch(at, AT_ONCE, note="it took another course"))
            else:
                findings.tables([(at, AT_ONCE)] * len(paths), digests, self._digests(made.values()))
            found = self._digests(before.contents(path) for path in unchanged)
            findings.tables([(at, BEFORE)] * len(unchanged), expected, found)
        return ours, made

    def _made(
        self, execution: str, at: "OperatorCall", one: Executed, before: Reachable, changed: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Return path -> tensor for what an execution has made: its results and what it has changed."""
        with self._engine.unwatched():
            made = Reachable({"result": (one.value, one.kept)}, known=before).tensors
            values = {path: tensor.detach() for path, tensor in made.items()}
            values |= {path: before.contents(path) for path in sorted(changed) if path in before.tensors}
            self._engine.mode.disturb(execution, at.operator, list(values.values()))
            return values

    def _for_comparison(self, run: Callable[[], Executed]) -> Executed:
        """Execute a call whose effects do not count: its communication opens no windows and is not recorded."""
        engine = self._engine
        self._is_scratch, engine.is_active = True, False
        try:
            return run()
        finally:
            self._is_scratch, engine.is_active = False, True

    def _digests(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        rows = self._engine.findings.rows()
        for tensor in tensors:
            rows.add(tensor)
        return rows.table()


def _chosen(made: Mapping[str, torch.Tensor], paths: Collection[str]) -> list[torch.Tensor]:
    """Return the tensors at some paths, in the order of their names; an empty tensor where there is none."""
    return [made[path] if path in made else torch.empty(0) for path in sorted(paths)]
