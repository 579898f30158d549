"""Embedding and head (final norm and output layer) in CheckFree+ (CheckFree, section 4.3): which stages have them, how
a stage's model becomes the first or the last one for a microbatch, how replicas stay equal, and how the optimizer state
of single parameters is reset.

A stage at an end of the pipeline is the first (or last) one on the route of some microbatches and not on that of the
others.

Half of the microbatches take a route on which the first two and the last two pipeline stages are swapped, so both
stages of such a pair need the embedding or the head. The first and the last stage have the originals, the second and
the last but one the copies. Original and copy are equal from the start, and their gradients are summed in every step. A
copy is left out of gradient norms, and is saved in checkpoints as a replica of the same tensor. "Core" is
megatron-core.

Only some microbatches use a stage's embedding or head, so the last microbatch that uses a parameter differs between
parameters. The reduction of a bucket group, megatron-core's unit of gradient reduction, starts in the last backward
pass of this stage that uses any of its parameters. All data-parallel ranks of a stage have the same schedule and the
same bucket groups, so they start their reductions in the same order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ft.base.errors import UserError
from ft.state.grid import groups_like
from ft.state.snapshot import optimizers
from ft.systems.schedule.program import LEAST_STAGES, Routes, Unit
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.patches import step_state


def pairs(stages: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the stages (original, copy) of the embedding, and those of the head.

    Raises:
        ValueError: there are too few stages.
    """
    if stages < LEAST_STAGES:
        raise ValueError(f"with {stages} stages, the first two and the last two stages overlap")
    return (0, 1), (stages - 1, stages - 2)


class StageEnds:
    """Configures the model of one stage."""

    def __init__(self, chunk: torch.nn.Module):
        self._model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        self._block = self._model.decoder
        self._norm = self._block.final_layernorm

    def become(self, *, first: bool, last: bool) -> None:
        """Configure the model for the next forward.

        Args:
            first: whether the model embeds tokens.
            last: whether the model applies final norm and output layer, and computes the loss.
        """
        for module in (self._model, self._block):
            module.pre_process, module.post_process = first, last
        self._block._modules["final_layernorm"] = self._norm if last else None

    def rest(self) -> None:
        """Activate all modules that the stage has, as the reduction of gradients and checkpoints need."""
        self.become(first=hasattr(self._model, "embedding"), last=hasattr(self._model, "output_layer"))


def in_place(chunk: torch.nn.Module, stage: int, stages: int, run: Callable[[], Any]) -> Any:
    """Call ``run`` with the model configured for a schedule of megatron-core, and return its result.

    In such a schedule, only the first stage embeds tokens and only the last one computes the loss.
    """
    ends = StageEnds(chunk)
    ends.become(first=stage == 0, last=stage == stages - 1)
    try:
        return run()
    finally:
        ends.rest()


_TIED = "embedding.word_embeddings.weight"
_PARTS = ("embedding.", "output_layer.", "decoder.final_layernorm.")


Report = torch.Tensor | dict[str, torch.Tensor]
"""What a trainer's loss function reports for a microbatch: the tensor [loss sum, tokens], or a dict with one such
tensor."""


class ReplicatedEnds:
    """The embedding and head of one rank, originals or copies (for :mod:`megatron.patches.swapped_pipeline`).

    The constructor is collective over all ranks, because it creates process groups.

    Attributes:
        stage: pipeline stage of this rank.
        stages: number of stages.
        group: process group of the two ranks that have the original and the copy; both have the same tensor- and
            data-parallel coordinates. None on stages that have neither.
        twin: logical rank of the other member of ``group``; None on stages without a group.
    """

    def __init__(self):
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        self.stage, self.stages = dist.get_rank(pipeline), dist.get_world_size(pipeline)
        self.group, self.twin, self._original = None, None, -1
        for pair in pairs(self.stages):
            for ranks in _all_pairs(pipeline, pair):
                group = dist.new_group(sorted(ranks))
                if dist.get_rank() in ranks:
                    self.group, self._original = group, ranks[0]
                    self.twin = ranks[1] if dist.get_rank() == ranks[0] else ranks[0]

    @property
    def embeds(self) -> bool:
        """Return whether this stage has the embedding."""
        return self.stage < 2

    @property
    def heads(self) -> bool:
        """Return whether this stage has the output layer."""
        return self.stage >= self.stages - 2

    @property
    def holds_copy(self) -> bool:
        """Return whether its embedding or output layer is the copy of another stage's."""
        return self.stage in (1, self.stages - 2)

    def params(self, chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield this stage's parameters of embedding and head, originals or copies, including tied weights."""
        yield from end_parameters(chunk)

    def tied(self, chunk: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return the embedding's weight in a list if it is also the weight of the output layer (tied), else [].

        Four stages have a tied weight.
        """
        return [param for _, param in self.params(chunk) if getattr(param, "shared_embedding", False)]

    def built(self, model: torch.nn.Module) -> None:
        """Give the copies of the embedding and the output layer in a new model the values of the originals.

        The copies are excluded from gradient norms, and are marked as replicas in checkpoints. All ranks of ``group``
        have to call it.
        """
        if self.group is None:
            return
        for name, param in self.params(model):
            value = param.data.cuda()  # with --use-cpu-initialization the model is not there yet
            dist.broadcast(value, self._original, group=self.group)
            param.data.copy_(value)
            if self.holds_copy:
                param.shared = True
                if model.share_embeddings_and_output_weights and name == _TIED:
                    param.shared_embedding = True
        if self.holds_copy:
            model.sharded_state_dict = _as_copies(model.sharded_state_dict)

    def sum_gradients(self, chunk: torch.nn.Module) -> None:
        """Sum the gradients of original and copy, so that both have the gradient of all microbatches.

        megatron-core itself sums the gradients of tied weights. All ranks of ``group`` have to call this method.
        """
        if self.group is None:
            return
        for _, param in self.params(chunk):
            if not getattr(param, "shared_embedding", False):
                dist.all_reduce(param.main_grad, group=self.group)

    def sum_losses(self, reports: list[Report]) -> list[Report]:
        """Return one report for all microbatches on the last stage, [] on the others.

        Collective in the ``group`` of the two stages with a head.

        Raises:
            UserError: a report is of another kind.
        """
        if not self.heads:
            return []
        names = {name for report in reports if isinstance(report, dict) for name in report}
        losses = [each for report in reports for each in (report.values() if isinstance(report, dict) else [report])]
        if len(losses) != len(reports) or len(names) > 1 or any(each.numel() != 2 for each in losses):
            problem = (
                "--ft-checkfree-plus adds up one loss, a tensor [sum, number of tokens]; the loss function reports"
            )
            raise UserError(f"{problem} {reports[0]}", "report the loss as pretrain_gpt.py does")
        device = torch.cuda.current_device()
        total = torch.stack(losses).sum(dim=0) if losses else torch.zeros(2, dtype=torch.float32, device=device)
        dist.all_reduce(total, group=self.group)
        return [] if self.holds_copy else [dict.fromkeys(names, total) or total]

    def sum_tokens(self, tokens: torch.Tensor | None) -> None:
        """Set ``tokens`` to the number of tokens of all microbatches on stages with a head; None is left alone.

        Collective in the ``group`` of the two stages with a head.
        """
        if tokens is not None and self.heads:
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


class EarlyReduction:
    """The gradient reductions of one stage in one iteration. Create it before the iteration's first backward pass."""

    def __init__(self, chunk: torch.nn.Module, routes: Routes, order: Sequence[Unit]):
        self._ends = {param for _, param in end_parameters(chunk)}
        self._due: dict[Unit, list] = {}
        backwards = [unit for unit in order if unit.backward]
        at_ends = [unit for unit in backwards if _is_at_end(routes, unit)]
        self._at_ends = set(at_ends)
        for group in step_state.bucket_groups(chunk):
            step_state.hold_back(group)
            users = at_ends if group.params <= self._ends else backwards
            if users:
                self._due.setdefault(users[-1], []).append(group)
            else:
                step_state.start_at_end(group)

    def before(self, unit: Unit) -> None:
        """Allow the reductions that start in ``unit``, a backward pass that is about to run."""
        unused = set() if unit in self._at_ends else self._ends
        for group in self._due.get(unit, ()):
            step_state.start_when_ready(group, group.params & unused)


def _is_at_end(routes: Routes, unit: Unit) -> bool:
    """Return whether the route of a unit's microbatch begins or ends on the unit's stage."""
    return routes.position(unit) in (0, len(routes.ways[unit.microbatch]) - 1)


def refuse_common_steps(optimizer: Any) -> None:
    """Refuse an optimizer that counts steps for all parameters together: single parameters cannot be reset in it.

    Raises:
        UserError: the optimizer counts steps for all parameters together.
    """
    for part in optimizers.parts(optimizer):
        if not optimizers.wraps_torch_optimizer(part):
            kind = type(part.optimizer).__name__
            raise UserError(
                f"{kind} counts steps for all parameters together: after a stage is rebuilt, the copies of embedding "
                "and output layer of --ft-checkfree-plus would diverge",
                "use --ft-checkfree, or an optimizer of torch's own (without Apex and Transformer Engine)",
            )


@torch.no_grad()
def reset_moments(optimizer: Any, params: Iterable[torch.nn.Parameter]) -> None:
    """Reset this rank's part of the optimizer state of ``params``.

    Afterwards, moments and step counts are 0, and the main parameters have the (rounded) values of the model's weights,
    as on a rank that has received only the weights. The model's weights are unchanged.

    Args:
        params: parameters of the model; those that this rank's optimizer does not update are skipped.
    """
    params = list(params)
    for part in optimizers.parts(optimizer):
        for param in params:
            main = _main(part, param)
            if main is None:
                continue
            _copy_weights(part, param, main)
            state = part.optimizer.state.get(main, {})
            for key, value in state.items():
                state[key] = value.zero_() if isinstance(value, torch.Tensor) else type(value)(0)


def _copy_weights(part: Any, param: torch.nn.Parameter, main: torch.nn.Parameter) -> None:
    """Set the main parameter to the (rounded) value of the model parameter."""
    whole = param.detach().reshape(-1)
    if isinstance(part, DistributedOptimizer):
        mine = part._get_model_param_range_map(param)["param"]
        whole = whole[mine.start : mine.end]
    main.data.view(-1).copy_(whole)


def _main(part: Any, param: torch.nn.Parameter) -> torch.nn.Parameter | None:
    """Return the main parameter that ``part`` of the optimizer updates for ``param``; None if this rank has none."""
    if isinstance(part, DistributedOptimizer):
        if param not in part.model_param_group_index_map:
            return None
        group, order = part.model_param_group_index_map[param]
        return part.optimizer.param_groups[group]["params"][order]
    return getattr(param, "main_param", param)
