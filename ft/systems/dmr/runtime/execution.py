"""Executes operators so that memory which no kernel writes is the same in each execution, for DMR (SpareTrain).

Some operators return memory, or keep it for the backward pass, that they allocate and never write: padding, or a result
that the chosen way of computing does not need. It holds whatever was there before, so that two executions would seem to
differ. Within a call that is verified as a whole, and within an operator that another package has registered with
``torch.library``, allocated memory is therefore filled with zeros, in each execution and on the stream on which it is
allocated.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ft.systems.dmr.runtime.operators import properties_of, tensors_in

_ATEN = torch.ops.aten
_ALLOCATING = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}


class _Zeroing(TorchDispatchMode):
    """Fills all memory that operators allocate with zeros."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return execute_zeroed(func, args, kwargs or {})


_ZEROING = _Zeroing()


def execute(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Execute an operator, and return its result. Memory that an operator of another package allocates is zeroed."""
    if not properties_of(func).is_foreign:
        return func(*args, **kwargs)
    with _ZEROING:
        # from its kernel on: the mode is to see what the operator calls, and not the operator
        return func.redispatch(_backend(args, kwargs), *args, **kwargs)


def execute_zeroed(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Execute an operator as :func:`execute` does; if it allocates memory and nothing else, zero that."""
    out = execute(func, args, kwargs)
    if func.overloadpacket in _ALLOCATING and type(out) is torch.Tensor:
        out.zero_()
    return out


def _backend(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch._C.DispatchKeySet:
    tensor = next(iter(tensors_in((args, kwargs))), None)
    device = kwargs.get("device") if tensor is None else tensor.device
    kind = torch.device("cpu" if device is None else device).type
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, kind.upper()))
