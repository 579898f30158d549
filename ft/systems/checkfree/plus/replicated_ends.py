"""Replication of embedding and head (final norm and output layer) for CheckFree+ (CheckFree, section 4.3).

Half of the microbatches take a route on which the first two and the last two pipeline stages are swapped, so both
stages of such a pair need the embedding or the head. The first and the last stage have the originals, the second and
the last but one the copies. Original and copy are equal from the start, and their gradients are summed in every step. A
copy is left out of gradient norms, and is saved in checkpoints as a replica of the same tensor. "Core" is
megatron-core.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ft.base.errors import UserError
from ft.state.grid import groups_like
from ft.systems.checkfree.plus.roles import Roles, pairs
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.utils import get_attr_wrapped_model

_TIED = "embedding.word_embeddings.weight"
_PARTS = ("embedding.", "output_layer.", "decoder.final_layernorm.")


class ReplicatedEnds:
    """The embedding and head of one rank, originals or copies.

    The constructor is collective over all ranks, because it creates process groups.

    Attributes:
        roles: roles of this stage: whether it has the embedding or the head, and the original or the copy.
        group: process group of the two ranks that have the original and the copy; both have the same tensor- and
            data-parallel coordinates. None on stages that have neither.
        twin: logical rank of the other member of ``group``; None on stages without a group.
    """

    def __init__(self):
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        stages = dist.get_world_size(pipeline)
        self.roles = Roles(dist.get_rank(pipeline), stages)
        self.group, self.twin, self._original = None, None, -1
        for pair in pairs(stages):
            for ranks in _all_pairs(pipeline, pair):
                group = dist.new_group(sorted(ranks))
                if dist.get_rank() in ranks:
                    self.group, self._original = group, ranks[0]
                    self.twin = ranks[1] if dist.get_rank() == ranks[0] else ranks[0]

    def params(self, chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield this stage's parameters of embedding and head, originals or copies, including tied weights."""
        yield from end_parameters(chunk)

    def tied(self, chunk: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return the embedding's weight in a list if it is also the weight of the output layer (tied), else [].

        Four stages have a tied weight.
        """
        return [param for _, param in self.params(chunk) if getattr(param, "shared_embedding", False)]

    def mark(self, chunk: torch.nn.Module) -> None:
        """Exclude the copies from gradient norms and mark them as replicas in checkpoints.

        Must be called before the optimizer is created.
        """
        if not self.roles.holds_copy:
            return
        model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        for name, param in self.params(chunk):
            param.shared = True
            if model.share_embeddings_and_output_weights and name == _TIED:
                param.shared_embedding = True
        model.sharded_state_dict = _as_copies(model.sharded_state_dict)

    def equalize(self, chunk: torch.nn.Module) -> None:
        """Set the copy to the value of the original. All ranks of ``group`` have to call it."""
        if self.group is None:
            return
        for _, param in self.params(chunk):
            dist.broadcast(param.data, self._original, group=self.group)

    def sum_gradients(self, chunk: torch.nn.Module) -> None:
        """Sum the gradients of original and copy, so that both have the gradient of all microbatches.

        megatron-core itself sums the gradients of tied weights. All ranks of ``group`` have to call this method.
        """
        if self.group is None:
            return
        for _, param in self.params(chunk):
            if not getattr(param, "shared_embedding", False):
                dist.all_reduce(param.main_grad, group=self.group)

    def sum_losses(self, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return one tensor [loss sum, tokens] for all microbatches on the last stage, [] on the others.

        Collective in the ``group`` of the two stages with a head.
        """
        if not self.roles.heads:
            return []
        device = torch.cuda.current_device()
        total = torch.stack(losses).sum(dim=0) if losses else torch.zeros(2, dtype=torch.float32, device=device)
        dist.all_reduce(total, group=self.group)
        return [] if self.roles.holds_copy else [total]

    def sum_tokens(self, tokens: torch.Tensor | None) -> None:
        """Set ``tokens`` to the number of tokens of all microbatches on stages with a head; None is left alone.

        Collective in the ``group`` of the two stages with a head.
        """
        if tokens is not None and self.roles.heads:
            dist.all_reduce(tokens, group=self.group)


def end_parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (name, parameter) of embedding and head in a stage's model ``chunk``, wrapped (for example in DDP) or not.

    A stage has at most one of the two.
    """
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    for name, param in model.named_parameters():
        if name.startswith(_PARTS):
            yield name, param


def _all_pairs(pipeline: dist.ProcessGroup, stages: tuple[int, int]) -> list[list[int]]:
    """Return the ranks [original, copy] of every pipeline of the run, in an order that is the same on all ranks.

    Args:
        pipeline: the pipeline-parallel process group of this rank.
        stages: the stages of original and copy.

    Raises:
        UserError: core has assigned the ranks to the process grid in an unknown order.
    """
    lines = groups_like(dist.get_process_group_ranks(pipeline), "pp")
    if any(len(line) != dist.get_world_size(pipeline) for line in lines):
        raise UserError("CheckFree+ does not support this order of ranks", "drop it, or --ft-checkfree-plus")
    return [[line[stage] for stage in stages] for line in lines]


def _as_copies(state_dict: Callable[..., dict]) -> Callable[..., dict]:
    def of_copies(*args: Any, **kwargs: Any) -> dict:
        found = state_dict(*args, **kwargs)
        for name, value in found.items():
            if name.startswith(_PARTS):
                for each in nested_values({name: value}):
                    if isinstance(each, ShardedBase):
                        each.replica_id = _copied(each.replica_id)
        return found

    return of_copies


def _copied(replica: Any) -> Any:
    """Return the replica id of a copy; its first number counts the replicas on different pipeline stages."""
    return (1, *replica[1:]) if isinstance(replica, tuple) else 1
