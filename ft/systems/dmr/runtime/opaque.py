"""Verify calls whose kernels bypass torch's dispatcher, by executing each call twice as a whole.

Kernels of Transformer Engine, flash-attention, Apex, Triton and of CUDA extensions do not pass it, and neither do those
that ``torch.compile`` generates. What calls them (:mod:`ft.systems.dmr.runtime.functions`, compiled graphs in
:mod:`ft.systems.dmr.runtime.engine`) is executed twice: at first for comparison only, then everything that this has
changed is put back, and the second execution is the one that counts. Compared bit for bit are the results, what the
call keeps for the backward pass, and what it changes in place.

Within an activation-checkpointing segment the recomputation is the second execution, as it is for operators, if the
call changes nothing (SpareTrain, Method 1).

Whether a call is executed once or twice must not differ between ranks, because functions communicate with each other
from within. So each rank notes what it sees, all ranks put their notes together at the end of an iteration, and only
what they have agreed on decides.

The second execution has to begin with what the first one began with: in-place results, histories that each call moves,
memory that a call frees, flags and caches in Python objects.
"""

import functools
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from ft.base.errors import UserError
from ft.state.snapshot import rng
from ft.systems.dmr.digest import same
from ft.systems.dmr.plan.trace import PIGGYBACK, UNCHECKED
from ft.systems.dmr.runtime.findings import AT_ONCE, BEFORE, RECOMPUTATION, Mismatch
from ft.systems.dmr.runtime.mode import CHECKER, PRIMARY
from ft.systems.dmr.runtime.strategy import AT_ONCE as TWICE
from ft.systems.dmr.runtime.strategy import WITH_RECOMPUTATION

if TYPE_CHECKING:
    from ft.systems.dmr.runtime.cursor import OperatorCall
    from ft.systems.dmr.runtime.engine import Engine
    from ft.systems.dmr.runtime.findings import Rows
    from ft.systems.dmr.runtime.segments import Segment

_PLAIN = (str, bytes, int, float, complex, bool, type(None), types.ModuleType, types.BuiltinFunctionType, Enum, type)
_FOREIGN = ("torch", "builtins", "threading", "_thread", "logging", "ctypes", "numpy")
"""Packages into whose objects the search does not go; layers (torch.nn.Module) are searched all the same."""
_CLOSED = ("ft", "megatron.ft_trainer", "megatron.core.model_parallel_config")
"""Packages and modules into whose objects the search does not go, nor into those of subclasses: configurations refer to
functions of the trainer, from which the optimizer and DMR itself can be reached."""
_APART = ("main_param",)
"""Attributes of parameters that only the optimizer uses."""
_MOST = 20_000


class Reachable:
    """The tensors and the changeable objects that can be reached from some roots, and their contents so far.

    Args:
        roots: name -> where the search begins. A class stands for its attributes.
        known: what was reachable before; it is not listed again.

    Attributes:
        tensors: path from a root, such as "args[0].main_grad" -> tensor with memory. Tensors that consist of others
            (subclasses such as quantised ones) are listed by their parts.

    Raises:
        UserError: more objects can be reached than a call can work with.
    """

    def __init__(self, roots: Mapping[str, Any], known: "Reachable | None" = None):
        self.tensors: dict[str, torch.Tensor] = {}
        self._memory: dict[str, torch.Tensor] = {}
        self._contents: list[tuple[Any, Any]] = []
        self._seen: dict[int, Any] = {} if known is None else dict(known._seen)
        for name, root in roots.items():
            if isinstance(root, type):
                values = {key: value for key, value in vars(root).items() if not key.startswith("__")}
                self._contents.append((root, values))
                for key, value in values.items():
                    if not callable(value) and not isinstance(value, classmethod | staticmethod | property):
                        self._visit(f"{name}.{key}", value)
            else:
                self._visit(name, root)

    def note_flags(self, owner: type) -> None:
        """Have the attributes of a class, and of objects of its package that they hold, put back as well.

        The search does not go on from them: only what the attributes refer to is noted.
        """
        values = {key: value for key, value in vars(owner).items() if not key.startswith("__")}
        self._contents.append((owner, values))
        for value in values.values():
            if not callable(value) and _package(type(value)) == _package(owner):
                self._contents.append((value, _attributes(value)))

    def contents(self, path: str) -> torch.Tensor:
        """Return a tensor by its path; an empty one if its memory was freed."""
        tensor = self.tensors[path].detach()
        return tensor if tensor.untyped_storage().nbytes() >= _end(tensor) else tensor.new_empty(0)

    def copies(self, paths: Collection[str]) -> dict[str, torch.Tensor]:
        """Return copies of the contents of some tensors, by path."""
        return {path: self.contents(path).clone() for path in paths if path in self.tensors}

    def put_back(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Restore all objects, the memory of all tensors, and the contents of those of which there are ``copies``."""
        for container, contents in self._contents:
            _restore(container, contents)
        for path, memory in self._memory.items():
            tensor = self.tensors[path]
            if tensor.data_ptr() != memory.data_ptr() or tensor.shape != memory.shape:
                tensor.data = memory
            storage, end = memory.untyped_storage(), _end(memory)
            if storage.nbytes() < end:
                storage.resize_(end)
        for path, copy in copies.items():
            # ``data`` has a version counter of its own: autograd does not take this for a change
            self._memory[path].copy_(copy)

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if len(self._seen) > _MOST:
            raise UserError(
                f"DMR cannot put back what a call changes: over {_MOST:,} objects can be reached from its arguments",
                "leave the function out with --ft-dmr-unstable",
            )
        if isinstance(value, torch.Tensor):
            self._visit_tensor(path, value)
        else:
            for name, inner in self._inner(value):
                self._visit(path + name, inner)

    def _inner(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield (end of the path, object) for what ``value`` holds, and note the contents of what can be changed."""
        if isinstance(value, list | tuple | deque):
            contents = list(value)
            if not isinstance(value, tuple):
                self._contents.append((value, contents))
            yield from ((f"[{number}]", each) for number, each in enumerate(contents))
        elif isinstance(value, dict):
            self._contents.append((value, dict(value)))
            yield from ((f"[{key!r}]", each) for key, each in list(value.items()))
        elif isinstance(value, set):
            self._contents.append((value, set(value)))
        elif isinstance(value, weakref.ref):
            yield "", value()
        elif isinstance(value, functools.partial):
            yield from (("", value.func), ("", value.args), ("", value.keywords))
        elif isinstance(value, types.MethodType):
            yield ".__self__", value.__self__
            yield "", value.__func__
        elif isinstance(value, types.FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield from ((f".{name}", cell.cell_contents) for name, cell in cells if cell != types.CellType())
            yield from ((f".__defaults__[{number}]", each) for number, each in enumerate(value.__defaults__ or ()))
        elif isinstance(value, torch.nn.Module) or not (_package(type(value)) in _FOREIGN or _is_closed(type(value))):
            contents = _attributes(value)
            self._contents.append((value, contents))
            # hooks belong to the model and to other systems, from which all of it can be reached
            yield from ((f".{name}", each) for name, each in contents.items() if "hook" not in name)

    def _visit_tensor(self, path: str, tensor: torch.Tensor) -> None:
        attributes = _attributes(tensor)
        self._contents.append((tensor, attributes))
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            for name, each in attributes.items():
                self._visit(f"{path}.{name}", each)
            return
        if tensor.layout is torch.strided and not tensor.is_meta:
            self.tensors[path] = tensor
            self._memory[path] = tensor.data
        for name, each in attributes.items():
            if isinstance(each, torch.Tensor) and name not in _APART:
                self._visit(f"{path}.{name}", each)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


@functools.cache
def _is_closed(kind: type) -> bool:
    return any(f"{each.__module__}.".startswith(f"{name}.") for each in kind.__mro__ for name in _CLOSED)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object: those in its dict and those in slots."""
    found = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _restore(container: Any, contents: Any) -> None:
    """Make the contents of a container or the attributes of an object those that were noted."""
    if isinstance(container, list | deque):
        if len(container) != len(contents) or any(a is not b for a, b in zip(container, contents, strict=True)):
            container.clear()
            container.extend(contents)
    elif isinstance(container, set | dict):
        if not _is_same(container, contents):
            container.clear()
            container.update(contents)
    else:
        present = dict(vars(container)) if isinstance(container, type) else _attributes(container)
        # the functions of ``object``, because classes such as frozen dataclasses refuse changes by their own
        change = setattr if isinstance(container, type) else object.__setattr__
        for name, value in contents.items():
            if present.get(name) is not value or name not in present:
                change(container, name, value)
        for name in present.keys() - contents.keys():
            if not isinstance(container, type):
                object.__delattr__(container, name)


def _is_same(container: Any, contents: Any) -> bool:
    if len(container) != len(contents):
        return False
    if isinstance(container, set):
        return container == contents
    return all(name in container and container[name] is value for name, value in contents.items())


def _end(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the beginning of its storage to the end of a tensor."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.element_size()


@dataclass(slots=True)
class Knowledge:
    """What is known of a function, on one rank or on all.

    Attributes:
        is_pure: whether it has never changed anything that it can reach.
        in_forward: paths of what it makes in the forward pass of each activation-checkpointing segment; None: it was
            not called there.
        keeps_more: whether it makes more than that in the recomputation, because gradients are recorded there.
        is_recomputed: whether each recomputation has called the same function at the same place; None: none yet.
    """

    is_pure: bool = True
    in_forward: frozenset[str] | None = None
    keeps_more: bool = False
    is_recomputed: bool | None = None

    @property
    def can_wait(self) -> bool:
        """Return whether the recomputation of a segment can be the second execution of the function."""
        return self.is_pure and bool(self.is_recomputed) and self.in_forward is not None

    def made_in_forward(self, paths: Sequence[str]) -> None:
        """Note what a call in the forward pass of a segment has made."""
        self.in_forward = frozenset(paths) if self.in_forward is None else self.in_forward.intersection(paths)

    def made_again(self, paths: Sequence[str]) -> None:
        """Note what a call in the recomputation of a segment has made."""
        self.keeps_more |= self.in_forward is not None and not self.in_forward.issuperset(paths)

    def was_called_again(self, is_same: bool) -> None:
        """Note whether the recomputation has called the same function where the forward pass has called this one."""
        self.is_recomputed = self.is_recomputed is not False and is_same

    def and_of(self, other: "Knowledge") -> "Knowledge":
        """Return what holds on both of two ranks."""
        paths = [known.in_forward for known in (self, other) if known.in_forward is not None]
        return Knowledge(
            self.is_pure and other.is_pure,
            frozenset.intersection(*paths) if paths else None,
            self.keeps_more or other.keeps_more,
            self.is_recomputed and other.is_recomputed,
        )


def agree(told: Sequence[Mapping[str, Knowledge]]) -> dict[str, Knowledge]:
    """Return the knowledge that holds on all ranks, given that of each, by names of functions."""
    agreed: dict[str, Knowledge] = {}
    for of_rank in told:
        for name, one in of_rank.items():
            agreed[name] = agreed[name].and_of(one) if name in agreed else one
    return agreed


OPAQUE = "opaque"
"""Key in ``DoubleExecutionMode.counts`` for calls that are executed twice as a whole."""


@dataclass(frozen=True, slots=True)
class Executed:
    """One execution of a call.

    Attributes:
        value: what it has returned.
        kept: what it keeps besides, for the backward pass for example.
        context: the :class:`ft.systems.dmr.runtime.functions.FunctionContext` that it was executed with, if any.
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
        left_out: names of functions that are not reproducible; they are executed once.
        compares: False in a profile, where each call is executed once.

    Attributes:
        flags: classes whose attributes calls change, such as "this is the first layer".
    """

    def __init__(self, engine: "Engine", left_out: Collection[str] = (), *, compares: bool = True):
        self._engine, self._left_out, self._compares = engine, frozenset(left_out), compares
        self.flags: list[type] = []
        self._is_inside = self._is_scratch = False
        self._seen: dict[str, Knowledge] = defaultdict(Knowledge)
        self._changed: dict[str, set[str]] = defaultdict(set)
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
        self._learns, self._learnt = learns, set() if learns else set(self._seen)

    @property
    def has_news(self) -> bool:
        """Return whether this rank has noted what it has not told the others yet."""
        return self._seen != self._told

    def share(self, exchange: Callable[[Any], Sequence[Any]]) -> None:
        """Agree with all ranks on what is known. Collective. ``exchange`` gives a value to all ranks, and returns those
        of all ranks."""
        self._told = {name: replace(seen) for name, seen in self._seen.items()}
        self._agreed = agree(exchange(self._told))

    def call(
        self, name: str, run: Callable[[], Executed], roots: Callable[[], Mapping[str, Any]], *, after: bool = False
    ) -> Executed | None:
        """Execute a call, twice unless it belongs to another one that is. Return the execution that counts, None if
        there is none.

        Args:
            roots: returns what the function may read or change.
            after: whether it changes lasting state after other calls. If it is called within one, it is executed when
                that one is verified, and not at all in the execution that is for comparison only.
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
                mode.count(UNCHECKED)
                if mode.segment is not None:
                    mode.segment.unchecked()
                return run()
            return self._verified(name, run, roots())
        finally:
            self._is_inside, mode.is_passing = False, is_passing

    def _verified(self, name: str, run: Callable[[], Executed], roots: Mapping[str, Any]) -> Executed:
        mode, cursor = self._engine.mode, self._engine.cursor
        self._number += 1
        at = replace(cursor.at(name, cursor.unit.index), call=self._number)
        with self._engine.unwatched():
            before = Reachable(roots)
        call = _Call(at, run, before, self._seen[name], self._changed[name], self._agreed.get(name))
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
        call.seen.made_in_forward(ours.made)
        return ours

    def _in_recomputation(self, segment: "Segment", call: "_Call") -> "_Seen":
        """Execute a call in the recomputation of a segment: once, if the forward pass was the first execution and made
        all that is made now."""
        name, mode, known = call.at.operator, self._engine.mode, call.known
        partner = segment.called()
        if partner is not None:
            self._seen[partner].was_called_again(partner == name)
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
        call.seen.made_again(ours.made)
        return ours

    def _twice(self, call: "_Call") -> "_Seen":
        """Execute a call twice and compare; return the second execution."""
        engine, findings = self._engine, self._engine.findings
        at, before, changed = call.at, call.before, call.changed
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
        """Execute a call once, as PRIMARY or CHECKER. With ``learnt_from``, the effects of this execution do not count,
        so that its communication opens no windows and is not recorded; what differs from these copies afterwards is
        what the call changes."""
        engine, mode, changed = self._engine, self._engine.mode, call.changed
        self._is_scratch, engine.is_active = learnt_from is not None, learnt_from is None
        mode.sent = sent = engine.findings.rows()
        try:
            one = call.run()
        finally:
            self._is_scratch, engine.is_active, mode.sent = False, True, None
        with engine.unwatched():
            before = call.before
            changed |= {path for path, copy in (learnt_from or {}).items() if not same(before.contents(path), copy)}
            call.seen.is_pure = not changed
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
    """A call that is to be verified: its place in the iteration, what executes it, what it can reach as it is before,
    what this rank has seen of the function and which tensors it has ever changed, by path, and what all ranks have
    agreed on about it (None: nothing yet)."""

    at: "OperatorCall"
    run: Callable[[], Executed]
    before: Reachable
    seen: Knowledge
    changed: set[str]
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
