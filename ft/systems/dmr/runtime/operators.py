"""The second execution of an operator, immediately (naive DMR) or when its deferred verification is due; and the
properties of an operator that it depends on: does it compute, what does it write, is it random.

An operator that writes in place is verified before it writes: the second execution works on a copy of the written
arguments, or uses the functional variant of the operator. Each execution therefore reads inputs that the other has not
touched.

Some operators return memory, or keep it for the backward pass, that they allocate and never write: padding, or a result
that the chosen way of computing does not need. It holds whatever was there before, so that two executions would seem to
differ. Within a call that is verified as a whole, and within an operator that another package has registered with
``torch.library``, allocated memory is therefore filled with zeros, in each execution and on the stream on which it is
allocated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_NOT_EXECUTED = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_efficientzerotensor"),
        *("_unsafe_view", "_local_scalar_dense", "set_", "resize_", "resize_as_", "_pin_memory", "record_stream"),
        *("_resize_output_", "lift_fresh", "lift", "is_same_size", "is_pinned", "_assert_async"),
        "_has_same_storage_numel",
    )
)
"""Operators that only allocate memory, return their input, or change a tensor's metadata and not its contents."""

COMMUNICATION_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_OF_TORCH = frozenset(("aten", "prim", "prims", "rngprims", "inductor", "quantized", *COMMUNICATION_NAMESPACES))
"""Namespaces of torch's own operators, which write all memory that they return, except those of ``_ATTENTION``."""
_COPIES = frozenset(("aten::copy_", "aten::_to_copy"))

_ATTENTION = frozenset(
    (
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_cudnn_attention", "_flash_attention_forward", "_efficient_attention_forward"),
        "_cudnn_attention_forward",
    )
)
"""Operators that write their first two results. On a GPU they return further memory, of random states, which is written
only with dropout (``mha_fwd``, flash_api.cpp)."""

_RUNNING = ("running_mean", "running_var")
_UNMARKED = {
    f"aten::{name}": _RUNNING
    for name in (
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"),
        *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    )
}
"""Operator -> arguments that it changes in place although its schema does not say so."""


@dataclass(frozen=True, slots=True)
class OperatorProperties:
    """Properties of an operator that matter for its verification.

    Args:
        name: name with overload, without the namespace of torch's own operators: "mm", "add_.Tensor".
        executes: True if the operator computes something and can be executed again. False for views, because the
            memory that they refer to has been verified already.
        communicates: True if the operator communicates with other ranks. Such an operator is not executed again.
        written: arguments that it changes in place, as (position, name); the position of a keyword-only argument is
            None.
        random: True if the operator draws from a random generator.
        functional: for an in-place operator, the variant that returns a new tensor instead.
        copies: True if the operator may copy from one device to another; such a copy is not executed again.
        fresh: for each result, whether it is new, and not one of the written arguments nor a view.
        sent: position of the argument that an operator sends to other ranks; None: it sends nothing.
        is_foreign: whether another package than torch implements it.
    """

    name: str
    executes: bool
    communicates: bool = False
    written: tuple[tuple[int | None, str], ...] = ()
    random: bool = False
    functional: OpOverload | None = None
    copies: bool = False
    fresh: tuple[bool, ...] = ()
    sent: int | None = None
    is_foreign: bool = False

    @property
    def changes_state(self) -> bool:
        """Return whether the operator has results, and changes arguments besides, as a batch norm its running means.
        A second execution begins with the changed arguments then, and comes to something else."""
        return bool(self.written) and any(self.fresh)


_KEPT = "properties_for_dmr"
"""Attribute of an operator under which its properties are kept: to hash an operator takes microseconds."""


def properties_of(func: OpOverload) -> OperatorProperties:
    """Return the properties of ``func``, derived from its schema."""
    found = getattr(func, _KEPT, None)
    if found is None:
        found = replace(_derived(func), is_foreign=func.namespace not in _OF_TORCH)
        setattr(func, _KEPT, found)
    return found


def _derived(func: OpOverload) -> OperatorProperties:
    schema = func._schema
    base = schema.name.removeprefix("aten::")
    name = base if func._overloadname == "default" else f"{base}.{func._overloadname}"
    if schema.name.split("::")[0] in COMMUNICATION_NAMESPACES:
        return OperatorProperties(
            name, executes=False, communicates=True, written=_received(schema), sent=_sent(schema)
        )
    written = tuple(
        (None if argument.kwarg_only else position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in _UNMARKED.get(schema.name, ())
    )
    fresh = tuple(one.alias_info is None for one in schema.returns)
    is_idle = schema.name in _NOT_EXECUTED or torch.Tag.inplace_view in func.tags
    if is_idle or (not schema.returns and not written) or _is_view(schema) or not _yields(schema):
        return OperatorProperties(name, executes=False, written=written, fresh=fresh)
    random = torch.Tag.nondeterministic_seeded in func.tags
    functional = _functional(func) if len(written) == 1 and written[0][0] == 0 and not random else None
    return OperatorProperties(name, True, False, written, random, functional, schema.name in _COPIES, fresh)


def _received(schema: Any) -> tuple[tuple[int | None, str], ...]:
    """Return the arguments that a collective writes to, as in ``OperatorProperties.written``. The schema of a
    collective does not mark them. An operator whose name ends in "_" writes to its first argument; other operators
    write to none."""
    return ((0, schema.arguments[0].name),) if schema.name.endswith("_") else ()


_SENDING = ("allreduce_", "allreduce_coalesced_", "reduce_", "send", "isend")
"""Collectives and messages whose first argument, of any name, is sent."""


def _sent(schema: Any) -> int | None:
    """Return the position of the argument of a collective that other ranks receive, in ``OperatorProperties.sent``. A
    broadcast has none: only one rank sends its argument."""
    if schema.name.partition("::")[2] in _SENDING:
        return 0
    names = [argument.name for argument in schema.arguments]
    is_broadcast = "broadcast" in schema.name
    return next((at for at, name in enumerate(names) if name.startswith("input") and not is_broadcast), None)


class Call(NamedTuple):
    """A call of an operator: its properties, the overload, and the arguments."""

    kind: OperatorProperties
    func: OpOverload
    args: Sequence[Any]
    kwargs: dict[str, Any]


def call_of(func: OpOverload, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Call:
    return Call(properties_of(func), func, args, kwargs or {})


def is_counted(call: Call) -> bool:
    """Return whether plans and profiles contain the operator: it computes, and can be executed again on this rank."""
    return call.kind.executes and not (call.kind.copies and _changes_device(call))


def _changes_device(call: Call) -> bool:
    devices = {tensor.device.type for tensor in tensors_in(call.args)}
    asked = call.kwargs.get("device")
    if asked is not None:
        devices.add(torch.device(asked).type)
    return len(devices) > 1


def _is_view(schema: Any) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)


def _yields(schema: Any) -> bool:
    """Return whether the operator produces tensors, as results or in the arguments that it writes to."""
    return any("Tensor" in str(one.type) for one in schema.returns) or any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
    )


def _functional(func: OpOverload) -> OpOverload | None:
    """Return the functional variant of an in-place operator (``add`` for ``add_``), with the same arguments."""
    base = func._schema.name.removeprefix("aten::")
    if not func._schema.name.startswith("aten::") or not base.endswith("_") or base.endswith("__"):
        return None
    packet = getattr(torch.ops.aten, base[:-1], None)
    other = None if packet is None else getattr(packet, func._overloadname, None)
    if other is None:
        return None
    ours, theirs = func._schema.arguments, other._schema.arguments
    same = len(ours) == len(theirs) and all(a.name == b.name for a, b in zip(ours, theirs, strict=True))
    return other if same and not any(a.alias_info for a in theirs) else None


_CONTAINERS = (list, tuple, dict)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, in order; searches lists, tuples and dicts recursively."""
    if isinstance(values, torch.Tensor):
        return [values]
    found: list[torch.Tensor] = []
    _collect(values, found)
    return found


def _collect(values: Any, found: list[torch.Tensor]) -> None:
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return
    for each in values:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, _CONTAINERS):
            _collect(each, found)


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
    kind = (_device_of(args, kwargs) if tensor is None else tensor.device).type
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, kind.upper()))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def results(call: Call, out: Any) -> list[torch.Tensor]:
    """Return the results of an execution: the tensors that it wrote to, and those that it returned besides."""
    if not call.kind.written:
        return returned(call.kind, out)
    return [*tensors_in(written(call)), *_made(call.kind, out)]


def returned(kind: OperatorProperties, out: Any) -> list[torch.Tensor]:
    """Return the tensors among an operator's results ``out`` that it always writes."""
    return tensors_in(out)[: 2 if kind.name.partition(".")[0] in _ATTENTION else None]


def _made(kind: OperatorProperties, out: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator with written arguments has returned, without those arguments."""
    if not any(kind.fresh):
        return []
    each = out if len(kind.fresh) > 1 else (out,)
    return tensors_in([one for one, is_fresh in zip(each, kind.fresh, strict=True) if is_fresh])


def written(call: Call) -> list[Any]:
    """Return the arguments that the operator changes in place; None for each that was not given."""
    args, kwargs = call.args, call.kwargs
    return [
        kwargs[name] if name in kwargs else args[position] if position is not None and position < len(args) else None
        for position, name in call.kind.written
    ]


def execute_again(call: Call, state: torch.Tensor | None) -> Any:
    """Execute the operator again and return its result. If ``state`` is given, set the random generator to it before,
    and restore the generator afterwards."""
    _, func, args, kwargs = call
    if state is None:
        return execute(func, args, kwargs)
    generator = _generator_of(args, kwargs)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return execute(func, args, kwargs)
    finally:
        generator.set_state(now)


_COPY, _ZERO = "copy_", "zero_"


def is_verified_by_inspection(call: Call) -> bool:
    """Return whether the result of the operator is known beforehand (``copy_``, ``zero_``), so that it can be verified
    by inspection, at half the cost of a second execution. A tensor that is copied onto itself, as by ``values[i] +=
    1``, is excepted, because it would be compared with itself."""
    if call.kind.name != _COPY:
        return call.kind.name == _ZERO
    return call.args[0].untyped_storage()._cdata != _source(call).untyped_storage()._cdata


def _source(copy: Call) -> torch.Tensor:
    return copy.args[1] if len(copy.args) > 1 else copy.kwargs["src"]


def expected(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (contents that a ``copy_`` or ``zero_`` has written, contents that it should have written), to be compared
    bit by bit. For ``zero_``, each is one bool: whether any bit is set."""
    target = call.args[0]
    if call.kind.name == _COPY:
        return target, _source(call).to(target.dtype).expand(target.shape)
    flat = target if target.is_contiguous() else target.contiguous()
    size = next(
        n for n in (8, 4, 2, 1) if flat.nbytes % n == 0 and flat.storage_offset() * flat.element_size() % n == 0
    )
    return flat.reshape(-1).view(_INTEGERS[size]).any().bool(), torch.zeros((), dtype=torch.bool, device=target.device)


def check_in_place(call: Call) -> list[torch.Tensor]:
    """Return what ``results`` will return for an in-place operator, computed in separate memory. Its arguments and the
    random generator stay unchanged."""
    kind, func, args, kwargs = call
    target = args[0] if args else None
    if kind.functional is not None and _fits(target):
        again = tensors_in(kind.functional(*args, **kwargs))
        if all(a.dtype == b.dtype for a, b in zip(again, tensors_in(target), strict=True)):
            return again
    copies = {name: _copy(value) for (_, name), value in zip(kind.written, written(call), strict=True)}
    others = list(args)
    for position, name in kind.written:
        if position is not None and position < len(others):
            others[position] = copies[name]
    named = {**kwargs, **{name: copy for name, copy in copies.items() if name in kwargs}}
    out = execute_again(Call(kind, func, others, named), state_before(call))
    return [*tensors_in(list(copies.values())), *_made(kind, out)]


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


def state_before(call: Call) -> torch.Tensor | None:
    """Return the state of the generator that the operator will draw from; None if it draws nothing."""
    return _generator_of(call.args, call.kwargs).get_state() if call.kind.random else None


def _generator_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator:
    """Return the generator that is given as an argument, else the default generator of the operator's device."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    device = _device_of(args, kwargs)
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device that an operator with these arguments is executed on."""
    device = kwargs.get("device")
    if device is None:
        device = next((tensor.device for tensor in tensors_in((args, kwargs))), "cpu")
    return torch.device(device)
