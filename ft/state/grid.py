"""Groups of all ranks, where megatron-core tells a rank its own alone."""

import torch.distributed as dist

from megatron.core import parallel_state

_ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
"""In which core lays ranks out."""


def groups_like(mine: list[int], kind: str) -> list[list[int]]:
    """The groups of all ranks, of which ``mine`` is this rank's; the same on every rank.

    Args:
        kind: of core's ``RankGenerator``: "pp", "dp-cp". In an order of one's own, which no kind gives, the other ranks
            are taken for groups of one.
    """
    sizes = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }
    for order in _ORDERS:
        groups = parallel_state.RankGenerator(**sizes, ep=1, order=order).get_ranks(kind)
        if mine in groups:
            return groups
    return [mine, *([rank] for rank in range(dist.get_world_size()) if rank not in mine)]
