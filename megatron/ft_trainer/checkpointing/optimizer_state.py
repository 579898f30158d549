"""What of the state of core's optimizers a checkpoint has, and loading it into optimizers with other groups.

``megatron.patches.torch_adam`` lets core read and set the state of torch's Adam, which counts steps per parameter.
"""

from collections.abc import Iterable
from typing import Any

from ft.state.snapshot import optimizers
from ft.state.snapshot.optimizers import wraps_torch_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys


def parts(optimizer: Any) -> list:
    """Return the optimizers inside a core optimizer: one, or those of the dense and the expert parameters."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def allocate(optimizer: Any) -> None:
    """Allocate the state of those torch optimizers that have made no step: moments and step counts of zero."""
    for part in parts(optimizer):
        if wraps_torch_optimizer(part):
            optimizers.allocate(part.optimizer)


def has_moments(keys: Iterable[str]) -> bool:
    """Return whether a checkpoint with these keys has optimizer state beside the main (fp32) weights."""
    return any("optimizer." in key and "optimizer.state.fp32_param." not in key for key in keys)


def without_moments(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return a sharded state dict of core's optimizer without the moments of optimizers that are not distributed.

    Core saves none before an optimizer's first step: with fp16, updates are skipped until the loss scale fits. An
    optimizer that such a state is loaded into starts without moments again.
    """
    if "param_groups" in wanted:
        return {**wanted, "state": {}}
    return {key: without_moments(value) if isinstance(value, dict) else value for key, value in wanted.items()}


def load(optimizer: Any, loaded: Any) -> None:
    """Load a state, as core's ``dist_checkpointing.load`` has returned it, into core's ``optimizer``."""
    own, numbers = parts(optimizer), sorted(key for key in loaded if isinstance(key, int))
    saved = [loaded] if "optimizer" in loaded else [loaded[number] for number in numbers]
    if len(saved) == len(own) or not all(isinstance(part, DistributedOptimizer) for part in own):
        optimizer.load_state_dict(loaded)
        return
    for i, part in enumerate(own):
        tensors = (loaded if len(own) == 1 else loaded[i])["param_state"]
        part.load_state_dict({**_regrouped(part, saved), "param_state": tensors})


def _regrouped(part: DistributedOptimizer, saved: list[dict]) -> dict:
    """Return the state of ``part`` except its tensors, from saved optimizers that had other parameter groups.

    Expert parameters have an optimizer of their own if the experts are spread over ranks; otherwise they are in the
    optimizer of the dense parameters.
    """
    groups = []
    for group in part.optimizer.param_groups:
        same = [g for s in saved for g in s["optimizer"]["param_groups"] if _kind(g) == _kind(group)]
        groups.append({**(same or saved[0]["optimizer"]["param_groups"])[0], **_identity(group)})
    return {**saved[0], "optimizer": {**saved[0]["optimizer"], "param_groups": groups}}


def _identity(group: dict) -> dict:
    """Return the keys by which core distinguishes parameter groups."""
    return {key: group[key] for key in param_group_identifier_keys if key in group}


def _kind(group: dict) -> dict:
    return {key: value for key, value in _identity(group).items() if key != "is_expert_parallel"}
