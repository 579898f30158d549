"""The fingerprint of the operators that a run executes: a plan made for one run must not be applied to another."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from megatron import core
from megatron.patches import platform
from megatron.training.arguments import Layout, Options

_DECIDE = ("model", "moe", "kernels", "precision", "recompute")
_OTHERS = {
    "data": ("seq_length",),
    "parallel": (
        *("sequence_parallel", "use_distributed_optimizer", "num_distributed_optimizer_instances"),
        *("overlap_grad_reduce", "overlap_p2p_communication", "microbatch_group_size_per_virtual_pipeline_stage"),
        *("context_parallel_size", "expert_tensor_parallel_size"),
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    ),
    "training": ("calculate_per_token_loss",),
    "optimizer": ("optimizer", "clip_grad"),
}


def fingerprint(options: Options, layout: Layout) -> dict[str, str | int]:
    """Return the settings that decide which operators a run executes and where it waits, by name. "model" is a digest
    of all settings without a name of their own. The batch size is the one after a ramp."""
    told, training = options.as_dict(), options.training
    shape = {name: told[name] for name in _DECIDE}
    shape |= {f"{concern}.{name}": told[concern][name] for concern, names in _OTHERS.items() for name in names}
    here = platform()
    return {
        "model": _digest(shape),
        "tp": layout.tp,
        "pp": layout.pp,
        "vpp": layout.vpp or 1,
        "dp": layout.dp,
        "ep": layout.ep,
        "micro_batch": training.micro_batch_size,
        "microbatches": training.global_batch_size // (training.micro_batch_size * layout.dp),
        "torch": torch.__version__.split("+")[0],
        "core": core.__version__,
        "device": torch.cuda.get_device_name() if here.name == "cuda" else "cpu",
    }


def _digest(shape: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()[:16]
