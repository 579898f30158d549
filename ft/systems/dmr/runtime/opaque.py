"""Verify calls whose kernels bypass torch's dispatcher, by executing each call twice as a whole, for DMR (SpareTrain).

DMR (dual modular redundancy) follows operators by a mode of torch's dispatcher. Kernels of Transformer Engine,
flash-attention, Apex, Triton and of CUDA extensions do not pass it, but they are called from classes of
``torch.autograd.Function``. The forward and the backward pass of each such class is executed twice: at first for
comparison only, then everything that this has changed is put back, and the second execution is the one that counts.
Compared bit for bit are the results, what the call keeps for the backward pass, and what it changes in place.
"""

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ft.state.snapshot import rng
from ft.systems.dmr.digest import same
from ft.systems.dmr.runtime.context import FORWARD, Context
from ft.systems.dmr.runtime.findings import AT_ONCE, BEFORE, Mismatch
from ft.systems.dmr.runtime.mode import CHECKER, PRIMARY
from ft.systems.dmr.runtime.reachable import Reachable
from ft.systems.dmr.runtime.strategy import SKIPPED

if TYPE_CHECKING:
    from ft.systems.dmr.runtime.engine import Engine

OPAQUE = "opaque"
"""The set of calls that are executed twice as a whole, in the counts of :class:`mode.DoubleExecution`."""
_VISIBLE = ("torch", "megatron", "ft")
"""Packages whose functions compute by torch's operators, or call others that do."""
_OF_CORE = tuple(
    f"megatron.core.{name}."
    for name in (
        *(f"fusions.fused_{name}" for name in ("softmax", "indices_converter", "mla_yarn_rope_apply")),
        *("transformer.moe.fused_a2a", "transformer.custom_layers.batch_invariant_kernels"),
        "transformer.experimental_attention_variant",
    )
)
"""Modules of megatron-core whose functions call extensions of Apex, DeepEP, cuDNN or Triton kernels."""
_WITH_FUSED_GRADIENTS = "megatron.core.tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication"
"""Adds to the gradient buffer by an extension of Apex, if gradient accumulation is fused."""
_REGIONS = frozenset(
    f"transformer_engine.pytorch.{name}"
    for name in ("distributed._CheckpointFunction", "cpu_offload_v1.GroupCommitFunction")
)
"""Functions that only call others."""
_AFTERWARDS = tuple(
    (f"transformer_engine.pytorch.{module}", "FP8GlobalStateManager", "reduce_and_update_fp8_tensors")
    for module in ("quantization", "fp8")
)
"""(module, class, class method) that changes the state of the class after a call: amax histories and scales. The
class also holds flags that calls change, such as "this is the first layer"."""

_watcher: "OpaqueCalls | None" = None


class OpaqueCalls:
    """Executes each call of an opaque function twice, while an iteration is protected.

    Which tensors a function changes is learnt in the first iteration in which it is called: copies of all reachable
    tensors are taken. Later only those that have ever changed are copied; digests show that the others stay unchanged.
    If one does change, that is a mismatch: the iteration is repeated, and what is changed in it is learnt as well.

    Args:
        engine: the engine of this rank.
        left_out: names of functions that are not reproducible; they are executed once.
        of_core: how the names of opaque functions of megatron-core begin (:func:`functions_of_core`).
        compares: False in a profile, where each call is executed once.
    """

    def __init__(
        self,
        engine: "Engine",
        left_out: Collection[str] = (),
        *,
        of_core: tuple[str, ...] = (),
        compares: bool = True,
    ):
        self._engine, self._left_out, self._compares = engine, frozenset(left_out), compares
        self._of_core = of_core
        self._is_inside = self._is_scratch = False
        self._changed: dict[str, set[str]] = {}
        self._flags: list[type] = []
        self._afterwards: list[Callable[[], Any]] = []
        self._to_learn: set[str] = set()

    def watch(self) -> None:
        """Have all opaque functions that are defined so far call this object, and no other one."""
        global _watcher
        _watcher = self
        for kind in _subclasses(torch.autograd.Function):
            name = f"{kind.__module__}.{kind.__qualname__}"
            own = kind.__module__.partition(".")[0] not in _VISIBLE and name not in _REGIONS
            if own or name.startswith(self._of_core):
                _wrap(kind, name)
        for module, kind_name, method in _AFTERWARDS:
            kind = getattr(sys.modules.get(module), kind_name, None)
            if kind is not None and isinstance(vars(kind).get(method), classmethod):
                _wrap_afterwards(kind, method)
                if kind not in self._flags:
                    self._flags.append(kind)

    @property
    def is_watching(self) -> bool:
        """Return whether the next call is one to verify, and not part of another one."""
        return self._engine.is_active and not self._is_inside

    def restart(self) -> None:
        """Begin an iteration."""
        self._is_inside = self._is_scratch = False
        self._afterwards.clear()
        self._to_learn = set(self._changed) if self._engine.findings.was_wrong else set()

    def call(
        self, name: str, run: Callable[[], Any], roots: Callable[[], dict[str, Any]], *, after: bool = False
    ) -> Any:
        """Execute a call, twice unless it belongs to another one that is.

        Args:
            name: name of the function.
            run: executes it; returns what has to be compared.
            roots: returns what it may read or change.
            after: whether it changes lasting state after other calls. If it is called within one, it is executed
                when that one is verified, and not at all in the execution that is for comparison only.

        Returns:
            The result of the execution that counts; None if there is none.
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

    def _outermost(self, name: str, run: Callable[[], Any], roots: Callable[[], dict[str, Any]]) -> Any:
        self._is_inside = True
        mode = self._engine.mode
        is_passing, mode.is_passing = mode.is_passing, True
        try:
            if not self._compares:
                return run()
            if name in self._left_out:
                mode.counts[SKIPPED] = mode.counts.get(SKIPPED, 0) + 1
                return run()
            mode.counts[OPAQUE] = mode.counts.get(OPAQUE, 0) + 1
            return self._twice(name, run, roots())
        finally:
            self._is_inside, mode.is_passing = False, is_passing

    def _twice(self, name: str, run: Callable[[], Any], roots: dict[str, Any]) -> Any:
        engine, findings = self._engine, self._engine.findings
        at = engine.course.at(name, engine.course.unit.index)
        with engine.unwatched():
            before = Reachable(roots)
            for owner in self._flags:
                before.note_flags(owner)
            if name not in self._changed:
                self._to_learn.add(name)
            changed, learns = self._changed.setdefault(name, set()), name in self._to_learn
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
            made = self._made(CHECKER, name, theirs, before, changed)
            del theirs  # digests stay: the second execution may write its results into the same memory
            before.put_back({path: copies[path] for path in changed if path in copies})
            if generators_after != generators:
                rng.restore(generators)
        ours = run()
        with engine.unwatched():
            paths, digests = self._made(PRIMARY, name, ours, before, changed)
            if paths != made[0] or generators_after != rng.blobs():
                findings.note(Mismatch(at, AT_ONCE, note="it took another course"))
            else:
                findings.tables([(at, AT_ONCE)] * len(paths), made[1], digests)
            found = self._digests(before.contents(path) for path in unchanged)
            findings.tables([(at, BEFORE)] * len(unchanged), expected, found)
        return ours

    def _made(
        self, execution: str, name: str, result: Any, before: Reachable, changed: Collection[str]
    ) -> tuple[list[str], torch.Tensor]:
        """Return (the paths of what an execution has made: its results and what it has changed; their digests)."""
        made = Reachable({"result": result}, known=before).tensors
        values = {path: tensor.detach() for path, tensor in made.items()}
        values |= {path: before.contents(path) for path in sorted(changed) if path in before.tensors}
        self._engine.mode.disturb(execution, name, list(values.values()))
        return list(values), self._digests(values.values())

    def _for_comparison(self, run: Callable[[], Any]) -> Any:
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


def functions_of_core(config: Any) -> tuple[str, ...]:
    """Return how the names of those functions of megatron-core begin that call extensions or Triton kernels.

    Args:
        config: core's configuration of the model.
    """
    return (*_OF_CORE, _WITH_FUSED_GRADIENTS) if config.gradient_accumulation_fusion else _OF_CORE


def _subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _wrap(kind: Any, name: str) -> None:
    """Have the forward and backward pass of a class of ``torch.autograd.Function`` call the watcher."""
    own_setup = kind.setup_context is not torch.autograd.Function.setup_context
    for phase in ("forward", "backward"):
        real = vars(kind).get(phase)
        if isinstance(real, staticmethod) and not hasattr(real.__func__, "seen_by_dmr"):
            has_context = phase != FORWARD or not own_setup
            setattr(kind, phase, staticmethod(_watched(real.__func__, f"{name}.{phase}", phase, has_context)))


def _watched(real: Callable, name: str, phase: str, has_context: bool) -> Callable:
    @functools.wraps(real)
    def watched(*args: Any, **kwargs: Any) -> Any:
        watcher = _watcher
        if watcher is None or not watcher.is_watching:
            return real(*args, **kwargs)
        given = args[0] if has_context and args else None
        if given is None:
            return watcher.call(name, lambda: real(*args, **kwargs), lambda: {"args": [*args, kwargs]})
        rest, first = args[1:], Context(given, phase)

        context = first

        def run() -> tuple[Any, dict[str, Any]]:
            nonlocal context
            context = first.again()
            return real(context, *rest, **kwargs), context.stored()

        result, _ = watcher.call(name, run, lambda: {"args": [*rest, kwargs], "ctx": first.roots()})
        context.hand_over()
        return result

    watched.seen_by_dmr = True
    return watched


def _wrap_afterwards(kind: Any, method: str) -> None:
    real = vars(kind)[method].__func__
    if hasattr(real, "seen_by_dmr"):
        return

    @functools.wraps(real)
    def watched(cls: type, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return real(cls, *args, **kwargs)

        if _watcher is None:
            return run()
        name = f"{kind.__module__}.{kind.__qualname__}.{method}"
        return _watcher.call(name, run, lambda: {kind.__name__: kind}, after=True)

    watched.seen_by_dmr = True
    setattr(kind, method, classmethod(watched))
