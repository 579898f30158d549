"""The content of a checkpoint: converts model, optimizer and other state to a sharded state dict, and back."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ft.base.errors import UserError
from ft.state.snapshot import optimizers
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model
from megatron.ft_trainer.checkpointing import optimizer_state, rng
from megatron.patches import stored_types

# Megatron-LM's version number for the layout of weights inside a layer.
_WEIGHT_LAYOUT = 3.0
_CONTENT = "content_metadata"
_SIZES = {
    "world_size": "world_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
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
    if not any(isinstance(part, DistributedOptimizer) for part in optimizer_state.parts(optimizer)):
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
        optimizer_state.allocate(optimizer)
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
        optimizer_state.load(optimizer, loaded["optimizer"])
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
    flat |= {theirs: layout[ours] for ours, theirs in _SIZES.items() if ours in layout}
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
