"""Fingerprint of a run: the properties that determine which operators an iteration executes, and when it waits.

A DMR plan (dual modular redundancy, SpareTrain) determines when each operator of an iteration is executed a second
time. The fingerprint is stored in the plan, and a run with another fingerprint refuses the plan.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from megatron import core
from megatron.patches import platform
from megatron.training.arguments import Layout, Options

_NOT_DECIDING = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),  # in the grid
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "distributed_backend", "local_rank"),
    *("distributed_timeout_minutes", "use_tp_pp_dp_mapping", "log_num_zeros_in_grad"),
)
"""Options of megatron-core that leave the operators of an iteration as they are."""


def fingerprint(options: Options, layout: Layout) -> dict[str, str | int]:
    """Return the fingerprint of a run: property -> value.

    "model" is a digest of all relevant options that have no property of their own. The number of microbatches is that
    of the final global batch size, after a batch-size ramp.
    """
    values, training = options.as_dict(), options.training
    shape = {name: value for name, value in values["core"].items() if name not in _NOT_DECIDING}
    shape["seq_length"] = options.data.seq_length
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
