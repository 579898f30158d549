"""The content of a checkpoint: converts model, optimizer and other state to a sharded state dict, and back.

An optimizer can have other parameter groups than the one that was saved. ``megatron.patches.torch_adam`` lets core read
and set the state of torch's Adam, which counts steps per parameter.
"""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ft.base.errors import UserError
from ft.state.snapshot import optimizers
from ft.state.snapshot.optimizers import wraps_torch_optimizer
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.utils import unwrap_model
from megatron.ft_trainer.checkpointing import rng
from megatron.patches import stored_types

# Megatron-LM's version number for the layout of weights inside a layer.
_WEIGHT_LAYOUT = 3.0
_CONTENT = "content_metadata"
SIZES = {
    "world_size": "world_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
}
"""Size in a manifest's layout -> its name in the ``args`` of a checkpoint."""


@dataclass
class TrainState:
    """The position of a run, apart from its tensors.

    Args:
        step: number of optimizer steps done.
        consumed_train_samples: number of training samples used, over all ranks.
        consumed_valid_samples: number of validation samples used, over all ranks.
        extra: further values to save; numbers, strings, lists and dicts of them.
    """

    step: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def optimizer_kind(optimizer: Any, fully_reshardable: bool) -> str | None:
    """Return the format in which the state of core's ``optimizer`` is stored.

    Args:
        optimizer: core's optimizer.
        fully_reshardable: value of --dist-ckpt-optim-fully-reshardable.

    Returns:
        None: the optimizer has no state; ``replicated``: it is not core's distributed optimizer;
            ``fully_reshardable``: the state can be loaded into any layout; ``dp_reshardable``: only the data-parallel
            size may change.
    """
    if optimizer is None or getattr(optimizer, "is_stub_optimizer", False):
        return None
    if not any(isinstance(part, DistributedOptimizer) for part in _parts(optimizer)):
        return "replicated"
    return "fully_reshardable" if fully_reshardable else "dp_reshardable"


def sharding_metadata(kind: str | None) -> dict[str, Any]:
    """Return the metadata from which core's ``sharded_state_dict`` methods derive the names and the format of shards.

    All of it except the process group is stored in the checkpoint. ``kind``: see :func:`optimizer_kind`.
    """
    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if kind in ("fully_reshardable", "dp_reshardable"):
        metadata |= {"distrib_optim_sharding_type": kind, "distrib_optim_fully_reshardable_mem_efficient": False}
    return metadata


def model_shards(model: list, metadata: dict) -> dict[str, Any]:
    """Return the sharded state of all model chunks, under the key ``model`` or ``model0``, ``model1``, ..."""
    chunks = unwrap_model(model)
    return {_chunk_key(i, len(chunks)): c.sharded_state_dict(metadata=metadata) for i, c in enumerate(chunks)}


def to_save(
    state: TrainState,
    model: list,
    optimizer: Any,
    scheduler: Any,
    *,
    kind: str | None,
    optimizer_steps: int,
    run: Mapping[str, Any],
    layout: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the state dict to save. Its top-level keys are Megatron-LM's, where Megatron-LM has such a key.

    Args:
        kind: format of the optimizer state (see :func:`optimizer_kind`); None: it has none.
        optimizer_steps: the step count to save, which a checkpoint stores once for all parameters: the maximum of
            :func:`ft.state.snapshot.optimizers.steps` over all ranks.
        run: information about the run, of which ``args`` has the entry ``options`` (all options, by group).
    """
    metadata = sharding_metadata(kind)
    contents: dict[str, Any] = {
        "args": argparse.Namespace(**_megatron_args(state, run, layout, kind)),
        "checkpoint_version": _WEIGHT_LAYOUT,
        "iteration": state.step,
        "consumed_train_samples": state.consumed_train_samples,
        "consumed_valid_samples": state.consumed_valid_samples,
        "extra": _plain(state.extra),
    }
    contents[_CONTENT] = {k: v for k, v in metadata.items() if k != "dp_cp_group"}
    contents |= model_shards(model, metadata)
    if kind is not None:
        with optimizers.counted_alike(optimizer, optimizer_steps):
            contents["optimizer"] = optimizer.sharded_state_dict(contents, metadata=metadata)
    if scheduler is not None:
        contents["opt_param_scheduler"] = scheduler.state_dict()
    contents[rng.KEY] = rng.sharded()
    return contents


def to_load(model: list, optimizer: Any, *, kind: str | None, with_rng: bool) -> dict[str, Any]:
    """Return the sharded state dict of what this rank has to load; the optimizer's has ``kind`` (None: not at all)."""
    metadata = sharding_metadata(kind)
    wanted = model_shards(model, metadata)
    if kind is not None:
        _allocate(optimizer)
        wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
    if with_rng:
        wanted[rng.KEY] = rng.sharded()
    return wanted


def apply(
    loaded: dict[str, Any],
    model: list,
    optimizer: Any,
    scheduler: Any,
    *,
    with_optimizer: bool,
) -> None:
    """Load tensors into model, optimizer and schedule.

    Without ``with_optimizer``, the optimizer copies its main (fp32) weights from the model's, and the schedule stays.
    """
    with stored_types.in_layers():
        for i, chunk in enumerate(model):
            chunk.load_state_dict(loaded[_chunk_key(i, len(model))])
    if with_optimizer:
        load_optimizer(optimizer, loaded["optimizer"])
    elif optimizer is not None and not getattr(optimizer, "is_stub_optimizer", False):
        optimizer.reload_model_params()
    if with_optimizer and scheduler is not None and "opt_param_scheduler" in loaded:
        _load_schedule(scheduler, loaded["opt_param_scheduler"])


def _load_schedule(scheduler: Any, stored: dict[str, Any]) -> None:
    try:
        scheduler.load_state_dict(stored)
    except AssertionError as error:  # megatron-core raises this when flags and checkpoint differ
        raise UserError(
            f"the learning-rate schedule of the flags differs from that of the checkpoint: {error}",
            "add --override-opt-param-scheduler to use that of the flags, or --use-checkpoint-opt-param-scheduler to "
            "use that of the checkpoint",
        ) from error


def apply_state(loaded: dict[str, Any], state: TrainState) -> None:
    """Copy the position of the run from the loaded state dict into ``state``."""
    state.step = loaded["iteration"]
    state.consumed_train_samples = loaded["consumed_train_samples"]
    state.consumed_valid_samples = loaded["consumed_valid_samples"]
    state.extra = dict(loaded["extra"])


def _chunk_key(i: int, chunks: int) -> str:
    return "model" if chunks == 1 else f"model{i}"


def _megatron_args(state: TrainState, run: Mapping, layout: Mapping, kind: str | None) -> dict[str, Any]:
    """Return the values that Megatron-LM looks up in a checkpoint's ``args``, also with --use-checkpoint-args."""
    flat: dict[str, Any] = {}
    for name, value in run.get("options", {}).items():
        flat |= value if isinstance(value, Mapping) else {name: value}
    flat |= {
        "iteration": state.step,
        "consumed_train_samples": state.consumed_train_samples,
        "consumed_valid_samples": state.consumed_valid_samples,
        "ckpt_format": "torch_dist",
        "no_save_optim": kind is None,
        "no_save_rng": False,
    }
    flat |= {theirs: layout[ours] for ours, theirs in SIZES.items() if ours in layout}
    return _plain(flat)


def _plain(value: Any) -> Any:
    """Convert ``value`` to types that ``torch.load(weights_only=True)`` accepts; other types become text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return str(value)


def _parts(optimizer: Any) -> list:
    """Return the optimizers inside a core optimizer: one, or those of the dense and the expert parameters."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _allocate(optimizer: Any) -> None:
    """Allocate the state of those torch optimizers that have made no step: moments and step counts of zero."""
    for part in _parts(optimizer):
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


def load_optimizer(optimizer: Any, loaded: Any) -> None:
    """Load a state, as core's ``dist_checkpointing.load`` has returned it, into core's ``optimizer``."""
    own, numbers = _parts(optimizer), sorted(key for key in loaded if isinstance(key, int))
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
