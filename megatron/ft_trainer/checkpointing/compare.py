"""Checks whether a checkpoint fits a run: by its manifest first, then by its tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.ft_trainer.checkpointing.manifest import Manifest

# The model options that decide which tensors exist, their shapes, or what their values mean.
SHAPING = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "vocab_size",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "squared_relu",
    "quick_geglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "apply_layernorm_1p",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
)
FORMATS = ("torch_dist", "fully_reshardable", "dp_reshardable", "replicated")
_SHOWN = 5


def check_run(path: Path, manifest: Manifest, run: Mapping[str, Any], finetune: bool) -> str | None:
    """Check that the checkpoint at ``path`` belongs to this run's model and tokenizer.

    Args:
        path: the checkpoint's folder.
        manifest: the checkpoint's manifest.
        run: as ``run_info`` of ``Checkpointer``.
        finetune: value of --finetune.

    Returns:
        a notice for the user if the checkpoint was trained on other data, otherwise None.

    Raises:
        UserError: the model or the tokenizer differs.
    """
    different = option_differences(manifest.run.get("model", {}), run.get("model", {}))
    if different:
        raise UserError(
            f"{path} is of another model:" + "".join(f"\n    {line}" for line in different),
            "give the options that the checkpoint was saved with, or another --load",
        )
    there, here = manifest.run.get("fingerprints", {}), run.get("fingerprints", {})
    differ = [name for name in ("tokenizer", "data") if name in there and name in here and there[name] != here[name]]
    if "tokenizer" in differ and not finetune:
        raise UserError(
            f"{path} was trained with tokenizer {there['tokenizer']}, this run has {here['tokenizer']}",
            "use the same tokenizer, or --finetune to go on with another one on purpose",
        )
    return f"{path.name} was trained on other data than this run's; sample counts go on" if "data" in differ else None


def check_format(path: Path, manifest: Manifest) -> None:
    """Check that this trainer reads the formats of the checkpoint at ``path`` and of its optimizer state.

    Raises:
        UserError: it does not.
    """
    strange = [f for f in (manifest.ckpt_format, manifest.optimizer or "replicated") if f not in FORMATS]
    if strange:
        raise UserError(
            f"{path} is in the format {strange[0]}, which this trainer does not read",
            "save it again with the release of this project that wrote it, without --ckpt-format torch",
        )


def check_optimizer(path: Path, manifest: Manifest, ours: str | None, here: Mapping[str, int]) -> str | None:
    """Return the format of the optimizer state at ``path`` (see ``content``); None if this run has no optimizer.

    Args:
        path: the checkpoint's folder.
        manifest: the checkpoint's manifest.
        ours: the format in which this run would store its own optimizer state; None: it has no optimizer.
        here: this run's sizes ``pp``, ``tp`` and ``ep``.

    Raises:
        UserError: the checkpoint has no optimizer state, or the state cannot be loaded into this run's optimizer.
    """
    if ours is None:
        return None
    advice = "add --finetune to begin at step 0 with these weights and a fresh optimizer"
    if manifest.optimizer is None:
        raise UserError(f"{path} holds no optimizer state", advice)
    stored = manifest.optimizer
    if (stored == "replicated") != (ours == "replicated"):
        raise UserError(
            f"{path} holds a {stored} optimizer state, and this run's is {ours}",
            f"switch --use-distributed-optimizer, or {advice}",
        )
    there = {name: manifest.layout.get(name, 1) for name in here}
    if stored == "dp_reshardable" and here != there:
        raise UserError(
            f"{path} was saved with --no-dist-ckpt-optim-fully-reshardable from {sizes_in_words(there)} "
            f"and does not load into {sizes_in_words(here)}",
            f"use the old sizes, or {advice}",
        )
    return stored


def sizes_in_words(sizes: Mapping[str, int]) -> str:
    """Format sizes of parallel dimensions, for example as "PP2 x TP1"."""
    return " x ".join(f"{name.upper()}{size}" for name, size in sizes.items())


def option_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the options in ``SHAPING`` that both sides have and that differ, one line each."""
    return [
        f"{name}: {saved[name]} in the checkpoint, {current[name]} in this run"
        for name in SHAPING
        if name in saved and name in current and _comparable(saved[name]) != _comparable(current[name])
    ]


def tensor_differences(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Return the first tensors and objects that the checkpoint lacks or holds in another shape, one line each.

    Args:
        wanted: sharded state dict to load.
        stored: the result of core's ``load_sharded_metadata``, by key.
    """
    shapes = {s.key: tuple(s.global_shape) for s in stored.values() if isinstance(s, ShardedTensor)}
    keys = {s.key for s in stored.values()}
    found: dict[str, str] = {}
    for shard in _shards(wanted):
        if shard.key not in keys:
            found[shard.key] = f"{shard.key}: not in the checkpoint"
            continue
        # core allows a mismatch of tensors that are padded along the vocabulary, whose sizes check_run has compared
        is_tensor = isinstance(shard, ShardedTensor) and not shard.allow_shape_mismatch
        if is_tensor and shard.key in shapes and shapes[shard.key] != tuple(shard.global_shape):
            there, here = _shape(shapes[shard.key]), _shape(shard.global_shape)
            found[shard.key] = f"{shard.key}: {there} in the checkpoint, {here} in this run"
    return [found[key] for key in sorted(found)][:_SHOWN]


def _shards(wanted: Mapping[str, Any]) -> list[ShardedBase]:
    shards = []
    for value in nested_values(wanted):
        if isinstance(value, ShardedTensorFactory):
            shards += [s for s in nested_values(_listed(value.build())) if isinstance(s, ShardedBase)]
        elif isinstance(value, ShardedBase):
            shards.append(value)
    return shards


def _listed(built: Any) -> Any:
    return built if isinstance(built, dict | list) else [built]


def _shape(sizes: Any) -> str:
    return " x ".join(str(s) for s in sizes) or "a scalar"


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
