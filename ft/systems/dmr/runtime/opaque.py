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
from dataclasses import dataclass, replace
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
    from ft.systems.dmr.runtime.findings import Rows
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
        self._number = 0

    @property
    def is_watching(self) -> bool:
        """Return whether the next call is one to verify, and not part of another one."""
        return self._engine.is_active and not self._is_inside

    def restart(self, *, learns: bool = False) -> None:
        """Begin an iteration. ``learns``: whether all ranks look anew at what each function changes, because the
        iteration before was wrong."""
        self._is_inside = self._is_scratch = False
        self._number = 0
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
        self._number += 1
        at = replace(course.at(name, course.unit.index), call=self._number)
        with self._engine.unwatched():
            before = Reachable(roots)
        call = _Call(at, run, before, self._notes.setdefault(name, Notes()), self._agreed.get(name))
        if mode.segment is None:
            return self._twice(call).executed
        ours = (self._in_recomputation if mode.again else self._in_forward)(mode.segment, call)
        mode.segment.returned(ours.made.values(), before.tensors.values())
        return ours.executed

    def _in_forward(self, segment: "Segment", call: "_Call") -> "_Seen":
        """Execute a call in the forward pass of a segment: once, if the recomputation will be the second execution."""
        name, mode, known = call.at.operator, self._engine.mode, call.known
        waits = mode.uses_recomputation and segment.is_comparable and not self._learns
        waits = waits and known is not None and known.can_wait
        segment.calls(name)
        segment.settle(WITH_RECOMPUTATION if waits else TWICE, name, again=False)
        if waits:
            mode.count(PIGGYBACK)
            ours = self._see(PRIMARY, call)
            with self._engine.unwatched():
                segment.primary(call.at, _chosen(ours.made, known.in_forward), ours.sent)
        else:
            ours = self._twice(call)
            if known is None or not known.is_recomputed:
                segment.unchecked()
        call.notes.made_in_forward(ours.made)
        return ours

    def _in_recomputation(self, segment: "Segment", call: "_Call") -> "_Seen":
        """Execute a call in the recomputation of a segment: once, if the forward pass was the first execution and made
        all that is made now."""
        name, mode, known = call.at.operator, self._engine.mode, call.known
        partner = segment.called()
        if partner is not None:
            self._notes[partner].was_called_again(partner == name)
        has_waited = segment.settle(TWICE, name, again=True) is not TWICE
        if has_waited:
            segment.is_extra(name)  # whether this is the place in the recomputation at which the function is expected
        if has_waited and not known.keeps_more:
            mode.count(PIGGYBACK)
            ours = self._see(CHECKER, call)
            if not known.in_forward.issuperset(ours.made):
                self._engine.findings.note(Mismatch(call.at, RECOMPUTATION, note="it keeps more than in earlier steps"))
        else:
            ours = self._twice(call)
        if has_waited:
            with self._engine.unwatched():
                segment.again(call.at, _chosen(ours.made, known.in_forward), ours.sent)
        elif partner is not None and (known is None or not known.is_recomputed):
            segment.unchecked()
        call.notes.made_again(ours.made)
        return ours

    def _twice(self, call: "_Call") -> "_Seen":
        """Execute a call twice and compare; return the second execution."""
        engine, findings = self._engine, self._engine.findings
        at, before, changed = call.at, call.before, call.notes.changed
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
        theirs = self._see(CHECKER, call, learnt_from=copies if learns else {})
        with engine.unwatched():
            generators_after = rng.blobs()
            paths, digests, sent = list(theirs.made), self._digests(theirs.made.values()), theirs.sent
            del theirs  # digests stay: the second execution may write its results into the same memory
            before.put_back({path: copies[path] for path in changed if path in copies})
            if generators_after != generators:
                rng.restore(generators)
        ours = self._see(PRIMARY, call)
        with engine.unwatched():
            if list(ours.made) != paths or generators_after != rng.blobs() or sent.count != ours.sent.count:
                findings.note(Mismatch(at, AT_ONCE, note="it took another course"))
            else:
                parts = [(replace(at, part=number), AT_ONCE) for number in range(1, sent.count + 1)]
                findings.tables(parts, sent.table(), ours.sent.table())
                findings.tables([(at, AT_ONCE)] * len(paths), digests, self._digests(ours.made.values()))
            found = self._digests(before.contents(path) for path in unchanged)
            findings.tables([(at, BEFORE)] * len(unchanged), expected, found)
        return ours

    def _see(self, execution: str, call: "_Call", learnt_from: Mapping[str, torch.Tensor] | None = None) -> "_Seen":
        """Execute a call once.

        Args:
            execution: PRIMARY or CHECKER.
            call: the call.
            learnt_from: not None: the effects of this execution do not count, so that its communication opens no
                windows and is not recorded; what differs from these copies afterwards is what the call changes.
        """
        engine, mode, changed = self._engine, self._engine.mode, call.notes.changed
        self._is_scratch, engine.is_active = learnt_from is not None, learnt_from is None
        mode.sent = sent = engine.findings.rows()
        try:
            one = call.run()
        finally:
            self._is_scratch, engine.is_active, mode.sent = False, True, None
        with engine.unwatched():
            before = call.before
            changed |= {path for path, copy in (learnt_from or {}).items() if not same(before.contents(path), copy)}
            made = Reachable({"result": (one.value, one.kept)}, known=before).tensors
            values = {path: tensor.detach() for path, tensor in made.items()}
            values |= {path: before.contents(path) for path in sorted(changed) if path in before.tensors}
            mode.disturb(execution, call.at.operator, list(values.values()))
        return _Seen(one, values, sent)

    def _digests(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        rows = self._engine.findings.rows()
        for tensor in tensors:
            rows.add(tensor)
        return rows.table()


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that is to be verified.

    Attributes:
        at: its place in the iteration.
        run: executes it.
        before: what it can reach, as it is before.
        notes: what this rank has seen of the function.
        known: what all ranks have agreed on about the function; None: nothing yet.
    """

    at: "OperatorCall"
    run: Callable[[], Executed]
    before: Reachable
    notes: Notes
    known: Knowledge | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """One execution of a call, with what it has made and changed, by paths, and digests of what it has sent."""

    executed: Executed
    made: dict[str, torch.Tensor]
    sent: "Rows"


def _chosen(made: Mapping[str, torch.Tensor], paths: Collection[str]) -> list[torch.Tensor]:
    """Return the tensors at some paths, in the order of their names; an empty tensor where there is none."""
    return [made[path] if path in made else torch.empty(0) for path in sorted(paths)]
