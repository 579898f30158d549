"""Builds manifests for checkpoints that have none, such as those of Megatron-LM, from values stored in them."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_common_state_dict, load_sharded_metadata
from megatron.ft_trainer.checkpointing import naming, rng
from megatron.ft_trainer.checkpointing.compare import SHAPING
from megatron.ft_trainer.checkpointing.manifest import Manifest, ManifestError
from megatron.patches.releases import load_strategy

SIZES = {
    "world_size": "world_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}
"""Size in a manifest's layout -> its name in the ``args`` of a checkpoint."""


def describe(path: Path) -> Manifest:
    """Return a manifest without files for the checkpoint at ``path``, which has none.

    Raises:
        ManifestError: the checkpoint cannot be read, or lacks the values that Megatron-LM stores in every checkpoint.
    """
    try:
        if (path / naming.METADATA).exists():
            return _of_sharded(path)
        return _of_legacy(next(path.glob(f"mp_rank_*/{naming.LEGACY}")))
    except Exception as error:  # whatever a damaged file makes torch and megatron-core raise
        raise ManifestError(f"there is none, and the checkpoint cannot be read: {error}") from error


def arguments(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``args`` in the part of a checkpoint that is not sharded, normalised so that they can be compared.

    Values without effect are removed, and ``add_qkv_bias``, which ``add_bias_linear`` implies, is False then.
    """
    args = dict(vars(stored.get("args", argparse.Namespace())))
    if not args.get("group_query_attention"):
        args.pop("num_query_groups", None)
    if not args.get("num_experts"):
        args.pop("moe_ffn_hidden_size", None)
    if args.get("add_bias_linear"):
        args["add_qkv_bias"] = False
    return args


def _of_sharded(path: Path) -> Manifest:
    common = load_common_state_dict(str(path))
    metadata = load_sharded_metadata(str(path), load_strategy(path))
    states = [s for s in metadata.values() if isinstance(s, ShardedObject) and s.key == rng.KEY]
    kind = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type", "replicated")
    has_optimizer = any("optimizer." in s.key for s in metadata.values())
    return _manifest(common, kind if has_optimizer else None, list(states[0].global_shape) if states else None)


def _of_legacy(file: Path) -> Manifest:
    stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    args = stored["args"]
    kind = "legacy" if (file.with_name(naming.LEGACY_OPTIMIZER)).exists() else "replicated"
    grid = [args.pipeline_model_parallel_size, args.tensor_model_parallel_size]
    manifest = _manifest(stored, kind if "optimizer" in stored else None, grid if rng.KEY in stored else None)
    return replace(manifest, ckpt_format="torch")


def _manifest(stored: Mapping[str, Any], optimizer: str | None, rng_grid: list[int] | None) -> Manifest:
    args = arguments(stored)
    # --vocab-size may differ from the size of the tokenizer's vocabulary; only the padded size shapes the model.
    shaping = {*SHAPING, "padded_vocab_size"} - {"vocab_size"}
    model = {name: args[name] for name in sorted(shaping) if args.get(name) is not None}
    return Manifest(
        step=stored["iteration"],
        serial=0,
        saved_at="",
        layout={ours: args[theirs] for ours, theirs in SIZES.items() if theirs in args},
        versions={},
        optimizer=optimizer,
        rng_grid=rng_grid,
        run={"model": model, "fingerprints": {}, "options": {"core": args, "tokenizer": args, "data": args}},
    )
