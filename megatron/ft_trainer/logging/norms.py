"""Computes the norm of all parameters of the model."""

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate


def params_norm(chunks: list[torch.nn.Module]) -> float:
    """Return the L2 norm over all parameters of the model, each counted once. All ranks have to call it, and get the
    same result.
    """
    dense = torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
    experts = torch.zeros_like(dense)
    for param in (p for chunk in chunks for p in chunk.parameters()):
        if getattr(param, "shared", False):  # tied embeddings are counted on the first stage
            continue
        if getattr(param, "allreduce", True):
            if param_is_not_tensor_parallel_duplicate(param):
                dense += param.detach().double().square().sum()
        else:
            experts += param.detach().double().square().sum()
    dist.all_reduce(dense, group=parallel_state.get_model_parallel_group())
    dist.all_reduce(experts, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return (dense + experts).sqrt().item()
