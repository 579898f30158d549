"""Stands in for the context of an autograd function while DMR (SpareTrain) executes the function twice."""

from collections.abc import Sequence
from typing import Any

import torch

FORWARD = "forward"
_RECORDED = (
    "mark_dirty",
    "mark_non_differentiable",
    "set_materialize_grads",
    "save_for_forward",
    "mark_shared_storage",
)


class Context:
    """What a function of ``torch.autograd.Function`` gets as ``ctx`` in one execution.

    It holds what the function stores in it; :meth:`hand_over` gives that to the real context. Saved tensors are taken
    from the real context once, because hooks that fetch them (from the host, for example) may work only once.

    Args:
        real: the real context.
        phase: "forward" or "backward".
    """

    def __init__(self, real: Any, phase: str):
        self.__dict__["_ft"] = _Record(real, phase)
        self.__dict__.update(self._ft.attributes)

    def again(self) -> "Context":
        """Return a context with the contents that the real one has had before the first execution."""
        other = object.__new__(Context)
        other.__dict__["_ft"] = self._ft.again()
        other.__dict__.update(self._ft.attributes)
        return other

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


class _Record:
    """What a context holds beside the function's own attributes.

    Attributes:
        real: the real context.
        attributes: its attributes before the execution.
        tensors: the tensors that the forward pass has saved; empty in the forward pass.
        saved: what the function saves in this execution; None: nothing.
        calls: (method, arguments) of calls that the real context gets later.
    """

    def __init__(self, real: Any, phase: str):
        self.real, self.phase = real, phase
        self.attributes = dict(real.__dict__)
        self.tensors: Sequence[torch.Tensor | None] = () if phase == FORWARD else real.saved_tensors
        self.saved: Sequence[torch.Tensor | None] | None = None
        self.calls: list[tuple[str, tuple]] = []

    def again(self) -> "_Record":
        other = object.__new__(_Record)
        other.real, other.phase, other.attributes, other.tensors = self.real, self.phase, self.attributes, self.tensors
        other.saved, other.calls = None, []
        return other
