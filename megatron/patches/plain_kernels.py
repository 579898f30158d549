"""Replaces the kernels that megatron-core (core) takes from Transformer Engine and Apex by those of torch and core.

DMR (dual modular redundancy, SpareTrain) executes every operator twice. It intercepts operators in torch's dispatcher,
which the kernels of these packages bypass. If neither package is installed, core uses the same replacements already.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from megatron.core import utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.patches.manifest import Patch

NORM_SIGNATURES = (
    "(cls, config, hidden_size, eps=1e-05, persist_layer_norm=False, zero_centered_gamma=False, "
    "normalization='LayerNorm')",
)


def under_sequence_parallel(plain: Callable, cls: type, config: Any, *args: Any, **given: Any) -> torch.nn.Module:
    """Return the norm that `plain` makes; under sequence parallelism its parameters are marked for an all-reduce.

    Each tensor-parallel rank sees a part of the sequence only, so gradients have to be summed over these ranks. Apex's
    norm does the same.
    """
    if not config.sequence_parallel:
        return plain(cls, config, *args, **given)
    unsplit = copy.copy(config)
    unsplit.sequence_parallel = False
    norm = plain(cls, unsplit, *args, **given)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


_WHY = (
    "core uses the kernels of Transformer Engine or Apex where installed, which DMR cannot intercept; with DMR, "
    "torch's kernels are used"
)
_OPTIONAL = ("multi_tensor_scale_tensor_impl", "te_general_gemm")
_SCALE = {"multi_tensor_scale_impl": utils.local_multi_tensor_scale}
PATCHES = (
    *(
        Patch(f"megatron.core.{module}", symbol, _WHY, new=new, added=symbol in _OPTIONAL)
        for module, symbols in {
            "optimizer": {"Adam": torch.optim.AdamW, "SGD": torch.optim.SGD, "USING_PYTORCH_OPTIMIZER": True},
            "optimizer.distrib_optimizer": {
                "Adam": torch.optim.Adam,
                "HAVE_APEX_OR_TE": False,
                "USING_TE_OPTIMIZER": False,
                "USING_APEX_OPTIMIZER": False,
            },
            "optimizer.optimizer": _SCALE,
            "optimizer.clip_grads": {
                "l2_norm_impl": utils.local_multi_tensor_l2_norm,
                **_SCALE,
                "multi_tensor_scale_tensor_impl": None,
            },
            "transformer.transformer_block": {"LayerNormImpl": WrappedTorchNorm},
            "models.backends": {"LNImpl": WrappedTorchNorm},
            "models.gpt.gpt_layer_specs": {"LNImpl": WrappedTorchNorm},
            "transformer.moe.moe_utils": {"te_general_gemm": None},
        }.items()
        for symbol, new in symbols.items()
    ),
    Patch(WrappedTorchNorm.__module__, "WrappedTorchNorm.__new__", _WHY, under_sequence_parallel, NORM_SIGNATURES),
)
