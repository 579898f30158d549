"""Attention over a sequence that is divided among ranks (context parallelism), without Transformer Engine.

megatron-core's own attention is for whole sequences; the one of Transformer Engine needs a GPU. Here each rank gathers
the keys and values of all ranks within a function of its own, as Transformer Engine does with ``--cp-comm-type
all_gather``. Everything else of context parallelism is core's.
"""

import copy

import torch
import torch.distributed as dist


def positions(rank: int, size: int, length: int) -> torch.Tensor:
    """Return the positions of a rank's tokens in the sequence: core gives each rank a chunk from both ends."""
    chunk = length // 2
    return torch.cat([torch.arange(chunk) + chunk * number for number in (rank, 2 * size - 1 - rank)])


def attend(q, k, v, mask, scale):
    """Return attention [tokens, batch, heads, width] of queries [tokens, ...] to keys and values [all tokens, ...]."""
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) * scale
    return torch.einsum("bhij,jbhd->ibhd", scores.masked_fill(mask, float("-inf")).softmax(-1), v)


class GatheredAttention(torch.autograd.Function):
    """Attention of a rank's queries to the keys and values of all ranks."""

    @staticmethod
    def forward(ctx, q, k, v, scale, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        whole = [gathered(each, group) for each in (k, v)]
        mine, all_ = (positions(rank, size, len(q)), torch.cat([positions(r, size, len(q)) for r in range(size)]))
        ctx.mask, ctx.scale, ctx.group = all_[None, :] > mine[:, None], scale, group
        ctx.save_for_backward(q, *whole)
        return attend(q, *whole, ctx.mask, scale)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            given = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            out = attend(*given, ctx.mask, ctx.scale)
        q, *whole = torch.autograd.grad(out, given, gradient)
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        for each in whole:
            dist.all_reduce(each, group=ctx.group)
        return (q, *(each.view(size, -1, *each.shape[1:])[rank].clone() for each in whole), None, None)


def gathered(tensor, group) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def plant() -> None:
    """Have core's attention accept context parallelism. Call it before the model is built."""
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    built = DotProductAttention.__init__

    def build(self, config, *args, **kwargs):
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        built(self, alone, *args, **kwargs)
        self.config = config

    def forward(self, query, key, value, attention_mask, *args, **kwargs):
        shared = query.shape[2] // key.shape[2]  # queries that share a group of keys and values
        key, value = (each.repeat_interleave(shared, dim=2) for each in (key, value))
        group = parallel_state.get_context_parallel_group()
        return GatheredAttention.apply(query, key, value, self.softmax_scale, group).flatten(2)

    DotProductAttention.__init__, DotProductAttention.forward = build, forward
