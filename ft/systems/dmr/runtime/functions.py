"""Find the functions whose kernels bypass torch's dispatcher, and have each call of them verified.

Kernels of Transformer Engine, flash-attention, Apex, DeepEP and Triton are called from classes of
``torch.autograd.Function``. The forward and the backward pass of each such class are opaque calls
(:class:`ft.systems.dmr.runtime.opaque.OpaqueCalls`).
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ft.systems.dmr.runtime.opaque import Executed, OpaqueCalls
from megatron.patches.manifest import FUNCTIONS_OF_CORE, FUSED_GRADIENTS

FORWARD = "forward"
_RECORDED = (
    "mark_dirty",
    "mark_non_differentiable",
    "set_materialize_grads",
    "save_for_forward",
    "mark_shared_storage",
)


class FunctionContext:
    """What a function of ``torch.autograd.Function`` gets as ``ctx`` in one execution.

    It holds what the function stores in it; :meth:`hand_over` gives that to the real context. Saved tensors are taken
    from the real context once, because hooks that fetch them (from the host, for example) may work only once.
    """

    def __init__(self, record: "_Record"):
        self.__dict__["_ft"] = record
        self.__dict__.update(record.attributes)

    @classmethod
    def of(cls, real: Any, phase: str) -> "FunctionContext":
        """Return the context of the first execution of a phase, "forward" or "backward"."""
        return cls(_Record(real, dict(real.__dict__), () if phase == FORWARD else real.saved_tensors))

    def again(self) -> "FunctionContext":
        """Return a context with the contents that the real one has had before the first execution."""
        return FunctionContext(_Record(self._ft.real, self._ft.attributes, self._ft.tensors))

    def roots(self) -> dict[str, Any]:
        """Return what a function can reach from the context."""
        return {**self._ft.attributes, "saved_tensors": self._ft.tensors}

    def stored(self) -> dict[str, Any]:
        """Return what the function has stored in this context."""
        own = {name: value for name, value in self.__dict__.items() if name != "_ft"}
        return {**own, "saved": self._ft.saved}

    @property
    def saved_tensors(self) -> Sequence[torch.Tensor | None]:
        return self._ft.tensors

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self._ft.saved = tensors

    def __getattr__(self, name: str) -> Any:
        if name in _RECORDED:
            return lambda *args: self._ft.calls.append((name, args))
        return getattr(self._ft.real, name)

    def hand_over(self) -> None:
        """Give the real context what the function has stored in this one."""
        record, own = self._ft, {name: value for name, value in self.__dict__.items() if name != "_ft"}
        for name, value in own.items():
            setattr(record.real, name, value)
        for name in record.attributes.keys() - own.keys():
            delattr(record.real, name)
        if record.saved is not None:
            record.real.save_for_backward(*record.saved)
        for name, args in record.calls:
            getattr(record.real, name)(*args)


@dataclass
class _Record:
    """What a context holds beside the function's own attributes.

    Attributes:
        attributes: attributes of the real context before the execution.
        tensors: the tensors that the forward pass has saved; empty in the forward pass.
        saved: what the function saves in this execution; None: nothing.
        calls: (method, arguments) of calls that the real context gets later.
    """

    real: Any
    attributes: dict[str, Any]
    tensors: Sequence[torch.Tensor | None]
    saved: Sequence[torch.Tensor | None] | None = None
    calls: list[tuple[str, tuple]] = field(default_factory=list)


_VISIBLE = ("torch", "megatron", "ft")
"""Packages whose functions compute by torch's operators, or call others that do."""
_REGIONS = frozenset(
    f"transformer_engine.pytorch.{name}"
    for name in (
        *("distributed._CheckpointFunction", "cpu_offload.GroupCommitFunction"),
        "cpu_offload_v1.GroupCommitFunction",
    )
)
"""Functions that only call others."""
_AFTERWARDS = tuple(
    (f"transformer_engine.pytorch.{module}", "FP8GlobalStateManager", "reduce_and_update_fp8_tensors")
    for module in ("quantization", "fp8")
)
"""(module, class, class method) that changes the state of the class after a call: amax histories and scales. The
class also holds flags that calls change, such as "this is the first layer"."""

_watcher: OpaqueCalls | None = None
_watched_of_core: tuple[str, ...] = ()


def watch(calls: OpaqueCalls, of_core: tuple[str, ...] = ()) -> None:
    """Have all opaque functions call ``calls``, and no other object. ``of_core``: how the names of opaque functions of
    megatron-core begin (:func:`functions_of_core`)."""
    global _watcher, _watched_of_core
    _watcher, _watched_of_core = calls, of_core
    for kind in _subclasses(torch.autograd.Function):
        _consider(kind)
    if "__init_subclass__" not in vars(torch.autograd.Function):  # for those that are defined from now on
        torch.autograd.Function.__init_subclass__ = classmethod(_is_defined)
    for module, kind_name, method in _AFTERWARDS:
        kind = getattr(sys.modules.get(module), kind_name, None)
        if kind is not None and isinstance(vars(kind).get(method), classmethod):
            _wrap_afterwards(kind, method)
            if kind not in calls.flags:
                calls.flags.append(kind)


def functions_of_core(config: Any) -> tuple[str, ...]:
    """Return how the names of those functions of megatron-core begin that call extensions or Triton kernels."""
    of_core = tuple(f"{module}." for module in FUNCTIONS_OF_CORE)
    fused = f"megatron.core.tensor_parallel.layers.{FUSED_GRADIENTS}"
    return (*of_core, fused) if config.gradient_accumulation_fusion else of_core


def _is_defined(kind: type, **kwargs: Any) -> None:
    super(torch.autograd.Function, kind).__init_subclass__(**kwargs)
    _consider(kind)


def _consider(kind: type) -> None:
    """Have a class call the watcher if its kernels may bypass the dispatcher."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    own = kind.__module__.partition(".")[0] not in _VISIBLE and name not in _REGIONS
    if own or name.startswith(_watched_of_core):
        _wrap(kind, name)


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
            return watcher.call(name, lambda: Executed(real(*args, **kwargs)), lambda: {"args": [*args, kwargs]}).value
        rest, first = args[1:], FunctionContext.of(given, phase)

        def run() -> Executed:
            context = first.again()
            return Executed(real(context, *rest, **kwargs), context.stored(), context)

        executed = watcher.call(name, run, lambda: {"args": [*rest, kwargs], "ctx": first.roots()})
        executed.context.hand_over()
        return executed.value

    watched.seen_by_dmr = True
    return watched


def _wrap_afterwards(kind: Any, method: str) -> None:
    real = vars(kind)[method].__func__
    if hasattr(real, "seen_by_dmr"):
        return

    @functools.wraps(real)
    def watched(cls: type, *args: Any, **kwargs: Any) -> Any:
        def run() -> Executed:
            return Executed(real(cls, *args, **kwargs))

        if _watcher is None:
            return run().value
        name = f"{kind.__module__}.{kind.__qualname__}.{method}"
        executed = _watcher.call(name, run, lambda: {kind.__name__: kind}, after=True)
        return None if executed is None else executed.value

    watched.seen_by_dmr = True
    setattr(kind, method, classmethod(watched))
