"""Replaces the kernels that megatron-core (core) takes from Transformer Engine and Apex by those of torch and core.

DMR (dual modular redundancy, SpareTrain) executes every operator twice. It intercepts operators in torch's dispatcher,
which the kernels of these packages bypass. If neither package is installed, core uses the same replacements already.
"""

import copy
import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from megatron.patches.replace import replace

_CORE = "megatron.core."
_NORM = "megatron.core.transformer.torch_norm"


def apply() -> None:
    for module, values in chosen().items():
        for symbol, value in values.items():
            replace(_CORE + module, symbol, value)
    plain_norm = import_module(_NORM).WrappedTorchNorm.__new__
    replace(_NORM, "WrappedTorchNorm.__new__", staticmethod(under_sequence_parallel(plain_norm)))


def chosen() -> dict[str, dict[str, Any]]:
    """Return a dict: module below ``megatron.core`` -> name in that module -> the name's replacement."""
    utils, norm = import_module("megatron.core.utils"), import_module(_NORM).WrappedTorchNorm
    scale = {"multi_tensor_scale_impl": utils.local_multi_tensor_scale}
    return {
        "optimizer": {"Adam": torch.optim.AdamW, "SGD": torch.optim.SGD, "USING_PYTORCH_OPTIMIZER": True},
        "optimizer.distrib_optimizer": {
            "Adam": torch.optim.Adam,
            "HAVE_APEX_OR_TE": False,
            "USING_TE_OPTIMIZER": False,
            "USING_APEX_OPTIMIZER": False,
        },
        "optimizer.optimizer": scale,
        "optimizer.clip_grads": {
            "l2_norm_impl": utils.local_multi_tensor_l2_norm,
            **scale,
            "multi_tensor_scale_tensor_impl": None,
        },
        "transformer.transformer_block": {"LayerNormImpl": norm},
        "models.backends": {"LNImpl": norm},
        "models.gpt.gpt_layer_specs": {"LNImpl": norm},
        "transformer.moe.moe_utils": {"te_general_gemm": None},
    }


def under_sequence_parallel(plain: Callable) -> Callable:
    """Wrap `plain`, so that under sequence parallelism the norm's parameters are marked for an all-reduce.

    Each tensor-parallel rank sees a part of the sequence only, so gradients have to be summed over these ranks. Apex's
    norm does the same.
    """

    @functools.wraps(plain)
    def new(cls, config, *args, **kwargs):
        if not config.sequence_parallel:
            return plain(cls, config, *args, **kwargs)
        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        norm = plain(cls, unsplit, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new
