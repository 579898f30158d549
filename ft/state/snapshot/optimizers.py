"""Reads and writes the state of the torch optimizers that megatron-core's optimizers wrap.

Snapshots and checkpoints use it.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ft.base.errors import UserError

_WEIGHT = "master_param"
"""Key of a weight, or of its lower bits, in the state of the optimizers of Transformer Engine and megatron-core."""


_SCALE = ".scale"
"""End of the name of a scale, which Transformer Engine's optimizer keeps outside of its state."""


def parts(optimizer: Any) -> list[Any]:
    """Return the parts of a chained megatron-core optimizer, such as one for dense and one for expert parameters.

    If ``optimizer`` is not chained, it is the only part. Stubs without tensors are left out.
    """
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if getattr(part, "optimizer", None) is not None]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor (torch's FSDP2), which shares its memory; other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def holders(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that hold the weights, moments and step counts of ``optimizer``: mostly itself.

    megatron-core's HybridDeviceOptimizer (--optimizer-cpu-offload) has several, on the host and on the device, with
    weights that are copies of its parameters. It gives them the numbers of its parameter groups before each step.
    """
    return getattr(optimizer, "sub_optimizers", [optimizer])


def groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, and those of its :func:`holders`, some of which count steps."""
    return [group for each in dict.fromkeys((optimizer, *holders(optimizer))) for group in each.param_groups]


def model_parameters(part: Any) -> list[torch.Tensor]:
    """Return the parameters of the model that a part of megatron-core's optimizer trains.

    With a distributed optimizer these are all parameters of its buffers, of which this rank may have no shard.
    """
    if hasattr(part, "buffers"):  # DistributedOptimizer
        return [p for buffer in part.buffers for bucket in buffer.buckets for p in bucket.params]
    if hasattr(part, "float16_groups"):  # Float16OptimizerWithFloat16Params
        return [p for groups in (part.float16_groups, part.fp32_from_fp32_groups) for group in groups for p in group]
    return [p for group in part.optimizer.param_groups for p in group["params"]]


def wraps_torch_optimizer(part: Any) -> bool:
    """Return whether a megatron-core optimizer wraps optimizers of torch, which count steps for each parameter.

    The optimizers of Apex and Transformer Engine count steps for each parameter group.
    """
    return all(type(each).__module__.startswith("torch.optim") for each in holders(part.optimizer))


@torch.no_grad()
def allocate(inner: torch.optim.Optimizer) -> None:
    """Allocate the missing optimizer state of parameters, as before the first step.

    The optimizer makes it in a step with gradients of zero, and the step counts are set back. Nothing else of the state
    is written to, because it may hold the weights. Weights do not change. The state is allocated for one parameter at a
    time, so that extra memory is needed for only one gradient.

    Optimizers of torch whose state is known to be zeros make that of a parameter with one element instead: a step with
    all parameters would write each of them and their state several times, while a recovery waits.
    """
    if holders(inner) != [inner]:
        for holder in holders(inner):
            allocate(holder)
        hybrid: Any = inner
        hybrid._sync_sub_optimizers_state_to_hdo()
        return
    if type(inner) in _MAKE_ZEROS:
        _allocate_zeros(inner)
    everyone = [p for group in inner.param_groups for p in group["params"] if p is not None]
    fresh = [p for p in everyone if not inner.state.get(p)]
    if not fresh:
        return
    kept = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
    with warnings.catch_warnings():  # warnings about gradients of views, as megatron-core's shards are
        warnings.simplefilter("ignore", UserWarning)
        gradients = [p.grad for p in everyone]
        for p in everyone:
            p.grad = None
        for group in inner.param_groups:
            group.update({key: 0.0 for key in ("lr", "weight_decay") if key in group})
        for p in fresh:
            p.grad = torch.zeros_like(p)
            inner.step()
            p.grad = None
        for p, gradient in zip(everyone, gradients, strict=True):
            p.grad = gradient
    for state in (inner.state[p] for p in fresh if "step" in inner.state.get(p, {})):
        state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], torch.Tensor) else 0
    for group, values in zip(inner.param_groups, kept, strict=True):
        set_numbers(group, values)


_MAKE_ZEROS = (torch.optim.Adam, torch.optim.AdamW)


def _allocate_zeros(inner: torch.optim.Optimizer) -> None:
    made: dict[tuple[int, torch.dtype, torch.device], dict[str, torch.Tensor]] = {}
    kind_of_optimizer: Any = type(inner)
    for number, group in enumerate(inner.param_groups):
        for p in (p for p in group["params"] if p is not None and not inner.state.get(p)):
            kind = number, p.dtype, p.device
            if kind not in made:
                one = torch.zeros(1, dtype=p.dtype, device=p.device)
                one.grad = torch.zeros_like(one)
                optimizer = kind_of_optimizer([{**group, "params": [one]}])
                optimizer.step()
                made[kind] = {key: value.zero_() for key, value in optimizer.state[one].items()}
            inner.state[p] = {
                key: torch.zeros_like(p, dtype=value.dtype) if value.dim() else value.clone()
                for key, value in made[kind].items()
            }


@torch.no_grad()
def forget(inner: torch.optim.Optimizer) -> None:
    """Reset the optimizer state to that before the first step. Parameters keep their values.

    A copy of a weight in the state becomes that of the parameter, and the lower bits of a weight, as integers, zero.
    """
    main = torch.Tensor()
    if holders(inner) != [inner]:
        for holder in holders(inner):
            forget(holder)
        return
    for name, _, of, key in list(entries(inner)):
        if key == "main":
            main = of[key]
        elif name.endswith(_SCALE):
            continue  # the scale of zeros has no meaning, and that of a weight is set with it
        elif key == _WEIGHT and of[key].dtype is torch.float16 and hasattr(inner, "set_scaled_state"):
            inner.set_scaled_state(main, key, main.detach().float())
        elif key == _WEIGHT and of[key].is_floating_point():
            of[key].copy_(main)
        elif isinstance(of[key], torch.Tensor):
            of[key].zero_()
        elif of[key] is not None:
            of[key] = type(of[key])(0)
    for group in inner.param_groups:
        if isinstance(group.get("step"), torch.Tensor):
            group["step"].zero_()
        else:
            group.pop("step", None)  # optimizers that count steps by group start without the key


def entries(inner: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str]]:
    """Iterate over every parameter and every value of the optimizer state.

    Transformer Engine's FusedAdam keeps half-precision state in units of a scale for each tensor, which it keeps in
    ``_scales`` and changes in place: (parameter -> key of the state -> tensor of one float).

    Yields:
        (name, parameter group, the mapping that holds the value, key of the value in that mapping). The key of a
        parameter is "main".
    """
    if holders(inner) != [inner]:
        for at, holder in enumerate(holders(inner)):
            yield from ((f"{at}/{name}", group, of, key) for name, group, of, key in entries(holder))
        return
    scales = getattr(inner, "_scales", {})
    for number, group in enumerate(inner.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter is None:
                continue
            name = f"{number}/{index}"
            yield f"{name}/main", group, {"main": parameter}, "main"
            state = inner.state.get(parameter, {})
            for key in sorted(key for key, value in state.items() if not _is_beside(value, parameter)):
                yield f"{name}/{key}", group, state, key
                if getattr(state[key], "dtype", None) is torch.float16 and key in scales.get(parameter, {}):
                    yield f"{name}/{key}{_SCALE}", group, scales[parameter], key


def _is_beside(value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a value of the optimizer state is none: core's HybridDeviceOptimizer puts the weight itself there,
    and a mark of padding from checkpoints.
    """
    return value is parameter or isinstance(value, bool)


_NO_NUMBERS = (torch.Tensor, type)
"""Kinds of values of a parameter group that are not part of :func:`numbers`."""


def numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return those values of a parameter group, schedule or loss scaler that are neither tensors nor classes.

    Raises:
        UserError: a value cannot be represented in JSON.
    """
    kept = {key: value for key, value in values.items() if key != "params" and not isinstance(value, _NO_NUMBERS)}
    for key, value in kept.items():
        if not _is_plain(value):
            raise UserError(
                f"{key!r} of an optimizer or schedule is of type {type(value).__name__}, which no snapshot can hold",
                "use an optimizer and a schedule whose state is tensors, numbers and text",
            )
    return kept


def set_numbers(values: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore the values that :func:`numbers` returned as ``saved``.

    Keys that are not in ``saved`` are removed, except those of tensors, classes and parameters.
    """
    for key in [k for k, v in values.items() if k not in saved and k != "params" and not isinstance(v, _NO_NUMBERS)]:
        del values[key]
    for key, value in saved.items():
        values[key] = tuple(value) if isinstance(values.get(key), tuple) and isinstance(value, list) else value


def scaler_state(part: Any) -> dict[str, Any] | None:
    """Return the state of an optimizer's loss scaler ({"scale": float, counters}), None if there is no loss scaler."""
    scaler = getattr(part, "grad_scaler", None)
    if scaler is None:
        return None
    return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in scaler.state_dict().items()}


def set_scaler(part: Any, saved: dict[str, Any] | None) -> None:
    """Restore the state of a loss scaler that :func:`scaler_state` returned as ``saved``."""
    if saved:
        state = {**saved, "scale": torch.tensor([saved["scale"]], dtype=torch.float)}
        part.grad_scaler.load_state_dict(state)


def set_schedule(scheduler: Any, saved: dict[str, Any]) -> None:
    """Restore a learning-rate schedule's state.

    megatron-core's own ``load_state_dict`` is not used, because it would add to the present step count, and prints.
    """
    if all(key in vars(scheduler) for key in saved):
        vars(scheduler).update(saved)
    else:
        scheduler.load_state_dict(saved)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def steps(optimizer: Any) -> int:
    """Return the maximum step count of this rank's parameters; 0 if the optimizers are not torch's."""
    return max((int(held["step"]) for held, _ in _counting(optimizer)), default=0)


@contextmanager
def counted_alike(optimizer: Any, steps: int) -> Iterator[None]:
    """Return a context in which every parameter's step count is ``steps``, with Adam's moments rescaled accordingly.

    A checkpoint has one step count for all parameters, but after CheckFree has rebuilt a lost pipeline stage, the
    parameters of that stage count from zero. The moments are scaled by the ratio of their bias corrections, where own
    is the parameter's count: m (1 - beta^steps) / (1 - beta^own).
    """
    kept = []
    for held, betas in _counting(optimizer):
        own = int(held["step"])
        if own == steps:
            continue
        kept.append((held, dict(held)))
        held["step"] = torch.full_like(held["step"], steps) if isinstance(held["step"], torch.Tensor) else steps
        for key, beta in zip(("exp_avg", "exp_avg_sq"), betas, strict=False):
            if own and key in held:
                held[key] = held[key] * ((1 - beta**steps) / (1 - beta**own))
    try:
        yield
    finally:
        for held, before in kept:
            held.update(before)


def _counting(optimizer: Any) -> Iterator[tuple[dict[str, Any], tuple[float, ...]]]:
    """Yield (optimizer state, Adam's betas) of each parameter whose state has a step count."""
    for part in parts(optimizer):
        if not wraps_torch_optimizer(part):
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                held = {} if parameter is None else part.optimizer.state.get(parameter, {})
                if "step" in held:
                    yield held, group.get("betas", ())
