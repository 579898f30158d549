"""Computes the parallel groups of all ranks; megatron-core gives a rank only the groups that the rank belongs to."""

import torch.distributed as dist

from megatron.core import parallel_state

_ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
"""In which core lays ranks out."""


def groups_like(mine: list[int], kind: str) -> list[list[int]]:
    """Return all parallel groups of a kind, each as a list of ranks. The result is the same on every rank.

    Args:
        mine: ranks of the group that this rank belongs to.
        kind: name of the groups in megatron-core's ``RankGenerator``, such as "pp" or "dp-cp". If ``mine`` is not one
            of the groups of this kind, because the ranks have a custom order, each other rank forms a group of its own.
    """
    sizes = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }
    for order in _ORDERS:
        groups: list[list[int]] = parallel_state.RankGenerator(**sizes, ep=1, order=order).get_ranks(kind)
        if mine in groups:
            return groups
    return [mine, *([rank] for rank in range(dist.get_world_size()) if rank not in mine)]
