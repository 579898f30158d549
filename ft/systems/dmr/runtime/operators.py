"""Determine the properties of a torch operator that DMR needs: does it compute, what does it write, is it random.

DMR (dual modular redundancy, SpareTrain) verifies operators by executing them a second time.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload

_NOT_EXECUTED = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_efficientzerotensor"),
        *("_unsafe_view", "_local_scalar_dense", "set_", "resize_", "resize_as_", "_pin_memory", "record_stream"),
        *(
            "_resize_output_",
            "lift_fresh",
            "lift",
            "is_same_size",
            "is_pinned",
            "_assert_async",
            "_has_same_storage_numel",
        ),
    )
)
"""Operators that only allocate memory, return their input, or change a tensor's metadata and not its contents."""

COMMUNICATION_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_OF_TORCH = frozenset(("aten", "prim", "prims", "rngprims", "inductor", "quantized", *COMMUNICATION_NAMESPACES))
"""Namespaces whose operators torch itself implements; they write all memory that they return."""
_COPIES = frozenset(("aten::copy_", "aten::_to_copy"))


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
        functional: for an in-place operator, the variant that returns a new tensor instead; None if there is none.
        copies: True if the operator may copy from one device to another; such a copy is not executed again.
        fresh: for each result, whether it is new, and not one of the written arguments nor a view.
        sent: of an operator that communicates, position of the argument that it sends to other ranks; None: it sends
            nothing.
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
    name = _short(func)
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
    """Return the arguments that a collective writes to, as in ``OperatorProperties.written``.

    The schema of a collective does not mark them. An operator whose name ends in "_" writes to its first argument;
    other operators write to none.
    """
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


def is_counted(kind: OperatorProperties, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether plans and profiles contain the operator: it computes, and can be executed again on this rank.

    Args:
        kind: properties of the operator.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    return kind.executes and not (kind.copies and _changes_device(args, kwargs))


def _changes_device(args: Any, kwargs: dict[str, Any]) -> bool:
    devices = {tensor.device.type for tensor in tensors_in(args)}
    asked = kwargs.get("device")
    if asked is not None:
        devices.add(torch.device(asked).type)
    return len(devices) > 1


def _short(func: OpOverload) -> str:
    base = func._schema.name.removeprefix("aten::")
    return base if func._overloadname == "default" else f"{base}.{func._overloadname}"


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
