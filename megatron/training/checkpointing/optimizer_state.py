"""Loading into core's optimizers, with the care that torch's Adam needs below them.

Core was written for the optimizers of Apex and Transformer Engine, which count steps per group and not per parameter.
With those of torch, which serve where neither is installed, core's distributed optimizer

* asks for the state of a first step that a fresh optimizer has not made (an assertion without a message);
* loads one and the same step tensor into all parameters: torch adds 1 to it once for each of them, so that bias
  correction runs ahead after a resume;
* looks for a step among the tensors of ``fully_reshardable`` checkpoints, which have none (a ``KeyError``), and puts
  that of the fresh optimizer over the one loaded from ``dp_reshardable`` ones.

So its step counters are put aside while it loads, and set from its parameter groups afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ft.state.snapshot.optimizers import is_torchs
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys


def parts(optimizer: Any) -> list:
    """The optimizers that one of core's consists of: dense and expert parameters have one each."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def allocate(optimizer: Any) -> None:
    """Gives fresh optimizers of torch the state that their first step makes; no weight changes."""
    for part in parts(optimizer):
        if is_torchs(part) and not part.optimizer.state:
            _step_without_effect(part.optimizer)


def steps(optimizer: Any) -> int:
    """The most that a parameter of this rank has counted, where torch's optimizers count; else 0."""
    return max((int(held["step"]) for held, _ in _counting(optimizer)), default=0)


@contextmanager
def counted_alike(optimizer: Any, steps: int) -> Iterator[None]:
    """Within, every parameter's count is ``steps``, and Adam's moments mean the same as before.

    After CheckFree has rebuilt a stage its parameters count from there on, and checkpoints have one count for all. The
    moments are scaled by the ratio of their bias corrections: m (1 - beta^steps) / (1 - beta^own).
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


def _counting(optimizer: Any) -> Iterator[tuple[dict, tuple[float, ...]]]:
    """(state, betas) of each parameter that counts its steps."""
    for part in parts(optimizer):
        if not is_torchs(part):
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                held = {} if parameter is None else part.optimizer.state.get(parameter, {})
                if "step" in held:
                    yield held, group.get("betas", ())


def load(optimizer: Any, loaded: Any) -> None:
    """Puts a loaded state into ``optimizer``; ``loaded`` is what core's loading made of its sharded state."""
    own = parts(optimizer)
    if not all(is_torchs(part) and isinstance(part, DistributedOptimizer) for part in own):
        optimizer.load_state_dict(loaded)
        return
    numbers = sorted(key for key in loaded if isinstance(key, int))
    saved = [loaded] if "optimizer" in loaded else [loaded[number] for number in numbers]
    for i, part in enumerate(own):
        tensors = (loaded if len(own) == 1 else loaded[i])["param_state"]
        common = saved[i] if len(saved) == len(own) else _regrouped(part, saved)
        _load_distributed(part, common, tensors)


def _regrouped(part: DistributedOptimizer, saved: list[dict]) -> dict:
    """What ``part`` needs beside its tensors, from optimizers whose parameters were shared out differently.

    Experts have an optimizer of their own where they are spread over ranks, and share that of the rest where not.
    """
    groups = []
    for group in part.optimizer.param_groups:
        same = [g for s in saved for g in s["optimizer"]["param_groups"] if _kind(g) == _kind(group)]
        groups.append({**(same or saved[0]["optimizer"]["param_groups"])[0], **_identity(group)})
    return {**saved[0], "optimizer": {**saved[0]["optimizer"], "param_groups": groups}}


def _identity(group: dict) -> dict:
    """What core tells parameter groups apart by."""
    return {key: group[key] for key in param_group_identifier_keys if key in group}


def _kind(group: dict) -> dict:
    return {key: value for key, value in _identity(group).items() if key != "is_expert_parallel"}


@torch.no_grad()
def _load_distributed(part: DistributedOptimizer, common: dict, tensors: Any) -> None:
    """Loads one optimizer; ``common`` is what is not sharded of its state, ``tensors`` the rest."""
    part.load_state_dict({key: value for key, value in common.items() if key != "param_state"})
    inner = part.optimizer
    for of_parameter in inner.state.values():
        of_parameter.pop("step", None)
    if common["param_state_sharding_type"] == "fully_reshardable":
        part.load_parameter_state_from_fully_reshardable(tensors)
    else:
        part.load_parameter_state_from_dp_reshardable(tensors)
    for group in inner.param_groups:
        step = float(group.pop("step"))
        for parameter in group["params"]:
            inner.state[parameter]["step"] = torch.tensor(step)


def _step_without_effect(inner: torch.optim.Optimizer) -> None:
    """A step with gradients of zero and a rate of zero."""
    rates = [group["lr"] for group in inner.param_groups]
    parameters = [p for group in inner.param_groups for p in group["params"]]
    for group in inner.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    inner.step()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in parameters:
        parameter.grad = None
