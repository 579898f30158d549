"""An operator executed twice at once (naive DMR), and a deferred one executed again.

What is written in place is verified before it is written: the second execution works on a copy of just that, or is the
same operator with a result of its own. So both read what the other has not touched.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ft.systems.dmr.runtime.operators import Nature, tensors_in

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def results(kind: Nature, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[torch.Tensor]:
    """What an execution has produced: what it returned, or what it wrote to."""
    return tensors_in(out) or [tensor for value in written(kind, args, kwargs) for tensor in tensors_in(value)]


def written(kind: Nature, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that it changes in place; those not given are left out."""
    found = []
    for position, name in kind.written:
        if name in kwargs:
            found.append(kwargs[name])
        elif position is not None and position < len(args):
            found.append(args[position])
    return found


def execute_again(func: Any, args: Sequence[Any], kwargs: dict[str, Any], state: torch.Tensor | None) -> Any:
    """Once more, with the generator in the state it had; leaves the generator as it finds it."""
    if state is None:
        return func(*args, **kwargs)
    generator = generator_of(args, kwargs)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return func(*args, **kwargs)
    finally:
        generator.set_state(now)


_COPY, _ZERO = "copy_", "zero_"


def checked_by_looking(kind: Nature, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """What it leaves is known beforehand: looking at it is as good as a second execution, and costs half. Not so where
    something is copied onto itself, as ``values[i] += 1`` does: it would be compared with itself."""
    if kind.name != _COPY:
        return kind.name == _ZERO
    source = args[1] if len(args) > 1 else kwargs["src"]
    return args[0].untyped_storage()._cdata != source.untyped_storage()._cdata


def expected(kind: Nature, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(what there is after a copy_ or zero_, what there has to be), to be compared bit by bit."""
    target = args[0]
    if kind.name == _COPY:
        source = args[1] if len(args) > 1 else kwargs["src"]
        return target, source.to(target.dtype).expand(target.shape)
    flat = target if target.is_contiguous() else target.contiguous()
    size = next(
        n for n in (8, 4, 2, 1) if flat.nbytes % n == 0 and flat.storage_offset() * flat.element_size() % n == 0
    )
    return flat.reshape(-1).view(_INTEGERS[size]).any().bool(), torch.zeros((), dtype=torch.bool, device=target.device)


def check_in_place(kind: Nature, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What the operator is about to write, computed beside; nothing is written, the generator is left as it was."""
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
    execute_again(func, others, named, state_before(kind, args, kwargs))
    return [tensor for copy in copies.values() for tensor in tensors_in(copy)]


def _given(kind: Nature, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [
        kwargs[name] if name in kwargs else args[position] if position is not None and position < len(args) else None
        for position, name in kind.written
    ]


def _fits(target: Any) -> bool:
    """A result of its own is computed with the same instructions: it lies in memory as the target does."""
    return all(tensor.is_contiguous() for tensor in tensors_in(target))


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return copy.copy_(value)
    if isinstance(value, list | tuple):
        return [_copy(each) for each in value]
    return value


def state_before(kind: Nature, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The state of the generator that an operator is about to draw from; None for one that draws nothing."""
    return generator_of(args, kwargs).get_state() if kind.random else None


def generator_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator:
    """The generator that is named, else the default one of the operator's device."""
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
