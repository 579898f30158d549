"""Execute an operator a second time for DMR, immediately (naive DMR) or when its deferred verification is due.

DMR (dual modular redundancy, SpareTrain) verifies an operator by executing it twice and comparing the results.

An operator that writes in place is verified before it writes: the second execution works on a copy of the written
arguments, or uses the functional variant of the operator. Each execution therefore reads inputs that the other has not
touched.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ft.systems.dmr.runtime.execution import execute
from ft.systems.dmr.runtime.operators import OperatorProperties, tensors_in

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def results(kind: OperatorProperties, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[torch.Tensor]:
    """Return the results of an execution: the tensors that it wrote to, and those that it returned besides."""
    if not kind.written:
        return tensors_in(out)
    return [*tensors_in(written(kind, args, kwargs)), *_made(kind, out)]


def _made(kind: OperatorProperties, out: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator with written arguments has returned, without those arguments."""
    if not any(kind.fresh):
        return []
    each = out if len(kind.fresh) > 1 else (out,)
    return tensors_in([one for one, is_fresh in zip(each, kind.fresh, strict=True) if is_fresh])


def written(kind: OperatorProperties, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that the operator changes in place; arguments that were not given are left out."""
    found = []
    for position, name in kind.written:
        if name in kwargs:
            found.append(kwargs[name])
        elif position is not None and position < len(args):
            found.append(args[position])
    return found


def execute_again(func: Any, args: Sequence[Any], kwargs: dict[str, Any], state: torch.Tensor | None) -> Any:
    """Execute the operator again and return its result. If ``state`` is given, set the random generator to it before,
    and restore the generator afterwards."""
    if state is None:
        return execute(func, args, kwargs)
    generator = generator_of(args, kwargs)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return execute(func, args, kwargs)
    finally:
        generator.set_state(now)


_COPY, _ZERO = "copy_", "zero_"


def is_verified_by_inspection(kind: OperatorProperties, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the result of the operator is known beforehand (``copy_``, ``zero_``), so that it can be verified
    by inspection, at half the cost of a second execution. A tensor that is copied onto itself, as by ``values[i] +=
    1``, is excepted, because it would be compared with itself."""
    if kind.name != _COPY:
        return kind.name == _ZERO
    source = args[1] if len(args) > 1 else kwargs["src"]
    return args[0].untyped_storage()._cdata != source.untyped_storage()._cdata


def expected(
    kind: OperatorProperties, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (contents that a ``copy_`` or ``zero_`` has written, contents that it should have written), to be compared
    bit by bit. For ``zero_``, each is one bool: whether any bit is set."""
    target = args[0]
    if kind.name == _COPY:
        source = args[1] if len(args) > 1 else kwargs["src"]
        return target, source.to(target.dtype).expand(target.shape)
    flat = target if target.is_contiguous() else target.contiguous()
    size = next(
        n for n in (8, 4, 2, 1) if flat.nbytes % n == 0 and flat.storage_offset() * flat.element_size() % n == 0
    )
    return flat.reshape(-1).view(_INTEGERS[size]).any().bool(), torch.zeros((), dtype=torch.bool, device=target.device)


def check_in_place(
    kind: OperatorProperties, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Return what ``results`` will return for an in-place operator, computed in separate memory. Its arguments and the
    random generator stay unchanged."""
    target = args[0] if args else None
    if kind.functional is not None and _fits(target):
        again = tensors_in(kind.functional(*args, **kwargs))
        if all(a.dtype == b.dtype for a, b in zip(again, tensors_in(target), strict=True)):
            return again
    copies = {name: _copy(value) for (_, name), value in zip(kind.written, _given(kind, args, kwargs), strict=True)}
    others = list(args)
    for position, name in kind.written:
        if position is not None and position < len(others):
            others[position] = copies[name]
    named = {**kwargs, **{name: copy for name, copy in copies.items() if name in kwargs}}
    out = execute_again(func, others, named, state_before(kind, args, kwargs))
    return [*tensors_in(list(copies.values())), *_made(kind, out)]


def _given(kind: OperatorProperties, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [
        kwargs[name] if name in kwargs else args[position] if position is not None and position < len(args) else None
        for position, name in kind.written
    ]


def _fits(target: Any) -> bool:
    """Return whether the target is contiguous. The result of the functional variant then has the same memory layout as
    the target, so that both are computed with the same instructions and give the same bits."""
    return all(tensor.is_contiguous() for tensor in tensors_in(target))


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return copy.copy_(value)
    if isinstance(value, list | tuple):
        return [_copy(each) for each in value]
    return value


def state_before(kind: OperatorProperties, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the state of the generator that the operator will draw from; None if it draws nothing."""
    return generator_of(args, kwargs).get_state() if kind.random else None


def generator_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator:
    """Return the generator that is given as an argument, else the default generator of the operator's device."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    device = kwargs.get("device")
    if device is None:
        device = next((tensor.device for tensor in tensors_in((args, kwargs))), None)
    device = torch.device("cpu" if device is None else device)
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
