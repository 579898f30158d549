"""CheckFree+: recovery of the first and the last pipeline stage without checkpoints (CheckFree, section 4.3).

Half of the microbatches take a route on which the first two and the last two stages are swapped. The two stages of a
pair thereby learn to do each other's work, so that a lost one can be rebuilt as a copy of the other. So both need the
embedding or the head (final norm and output layer): the first and the last stage have the originals, the second and the
last but one the copies. Original and copy are equal from the start, and their gradients are summed in every step. A
copy is left out of gradient norms, and is saved in checkpoints as a replica of the same tensor. "Core" is
megatron-core.

Only some microbatches use a stage's embedding or head, so its model is configured before each forward, and the last
microbatch that uses a parameter differs between parameters. The reduction of a bucket group, core's unit of gradient
reduction, starts in the last backward pass of this stage that uses any of its parameters. All data-parallel ranks of a
stage have the same schedule and the same bucket groups, so they start their reductions in the same order.

An iteration runs by a planned schedule, a :class:`ft.systems.schedule.program.Program`: for each stage, the order of
its units, which core executes, and of its messages. Messages overlap with computation: a stage goes on while a batch of
messages is in flight, and waits for the batch when it needs a tensor from it, or before it posts the next batch. The
order of batches and units is that of the program, and a stage only waits later than the program does. Therefore a
program that cannot deadlock with immediate waits cannot deadlock here, because the messages of a batch proceed
together: gloo buffers them, and over NCCL ``batch_isend_irecv`` launches them as one
(``ft.state.groups.registry``).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ft.base.errors import UserError
from ft.state.grid import groups_like
from ft.state.snapshot import optimizers
from ft.systems.schedule.program import LEAST_STAGES, Batch, Program, Routes, Unit
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model, get_model_config, get_model_type
from megatron.patches import double_execution, step_state, swapped_pipeline
from megatron.patches.releases import backward_step
from megatron.patches.replace import wrap_attribute


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
        """Copy the weights of the embedding and the output layer of a new model to the stages that hold copies of them.

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


class Iteration:
    """One training iteration on one stage.

    Args:
        step: the trainer's forward step function, as core's schedules take it.
        batches: the data of the microbatches by number; each is None on a rank that reads no tokens.

    Attributes:
        losses: what the loss function reports for the microbatches whose route ends on this stage.
        tokens: number of tokens in these microbatches, as the loss function counts them.
    """

    def __init__(
        self,
        program: Program,
        chunk: torch.nn.Module,
        step: Callable,
        batches: Sequence,
        groups: Any,
        micro_batch_size: int,
        seq_length: int,
    ):
        self._program, self._chunk, self._step, self._batches = program, chunk, step, batches
        self._groups, self._stage = groups, groups.pp.rank()
        self._config, self._ends = get_model_config(chunk), StageEnds(chunk)
        self._kind = get_model_type(chunk)
        self._device = torch.cuda.current_device()
        self._shape = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=None,
            config=self._config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )[0]
        self._is_begun = False
        self._reduction: EarlyReduction | None = None
        self._arrived: dict[Unit, torch.Tensor] = {}
        self._made: dict[Unit, torch.Tensor] = {}
        self._open: dict[int, tuple[Any, Any]] = {}
        self._requests: list[dist.Work] = []
        self._awaited: set[Unit] = set()
        self._in_flight: list[dist.P2POp] = []
        self._outputs: list[torch.Tensor] = []
        self.losses: list[Report] = []
        self.tokens = torch.zeros([], dtype=torch.int, device=self._device)

    def run(self) -> None:
        """Execute all steps of this stage, and reduce the gradients."""
        config = self._config
        double_execution.follow([[place.stage for place in way] for way in self._program.routes.ways])
        if config.no_sync_func is not None:
            order = self._program.order(self._stage)
            self._reduction = EarlyReduction(self._chunk, self._program.routes, order)
        try:
            self._execute_all()
        finally:
            self._ends.rest()
        if config.finalize_model_grads_func is not None:
            counted = self.tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func([self._chunk], counted, pg_collection=self._groups)

    def _execute_all(self) -> None:
        for step in self._program.stages[self._stage]:
            if isinstance(step, Unit):
                self._execute(step)
            else:
                self._exchange(step)
        self._wait()

    def _execute(self, unit: Unit) -> None:
        routes = self._program.routes
        source = routes.needs(unit)
        given = None if source is None or source.stage == unit.stage else self._received(source)
        if not unit.backward:
            output = self._forward(unit, given)
            self._open[unit.microbatch] = given, output
            result = output
        else:
            taken, output = self._open.pop(unit.microbatch)
            result = self._backward(unit, taken, output, given)
        target = routes.receiver(unit)
        if target is not None and target.stage != unit.stage:
            self._made[unit] = result

    def _received(self, unit: Unit) -> torch.Tensor:
        """Return the result of ``unit``, which another stage has sent; wait for it if it is in flight."""
        if unit in self._awaited:
            self._wait()
        return self._arrived.pop(unit)

    def _exchange(self, batch: Batch) -> None:
        """Post the messages of ``batch`` without waiting for them."""
        self._wait()
        group = self._groups.pp
        for source, target, unit in batch:
            outgoing = source == self._stage
            tensor = self._made.pop(unit) if outgoing else self._empty()
            peer = dist.get_global_rank(group, target if outgoing else source)
            call = dist.isend if outgoing else dist.irecv
            self._in_flight.append(dist.P2POp(call, tensor.detach().contiguous(), peer, group))
            if not outgoing:
                self._arrived[unit] = tensor
                self._awaited.add(unit)
            elif not unit.backward:
                self._outputs.append(tensor)
        self._requests = dist.batch_isend_irecv(self._in_flight)

    def _wait(self) -> None:
        """Wait for the batch that is in flight, if any, and only then release the memory of what it has sent."""
        for request in self._requests:
            request.wait()
        for tensor in self._outputs:
            schedules.deallocate_output_tensor(tensor, self._config.deallocate_pipeline_outputs)
        self._requests, self._in_flight, self._outputs = [], [], []
        self._awaited.clear()

    def _forward(self, unit: Unit, given: torch.Tensor | None) -> torch.Tensor:
        """Run the forward of ``unit`` with the input ``given``, and return its output.

        ``given`` is None if the microbatch's route begins on this stage.
        """
        routes, number = self._program.routes, unit.microbatch
        at = routes.position(unit)
        first, last = at == 0, at == len(routes.ways[number]) - 1
        self._ends.become(first=first, last=last)

        def in_precision(loader: Any, model: Any) -> tuple[torch.Tensor, Any]:
            """Run the forward step and convert its output to the right dtype.

            The conversion is needed because core converts outputs to fp32 on the last stage of the pipeline, which is
            not the last one of every microbatch's route.
            """
            with swapped_pipeline.placed(first=first, last=last):
                output, loss = self._step(loader, model)
            return output.to(torch.float32 if last else self._config.pipeline_dtype), loss

        batch = self._batches[number]
        output, counted = schedules.forward_step(
            in_precision,
            None if batch is None else iter([batch]),
            self._chunk,
            len(self._batches),
            given,
            self.losses,
            self._config,
            cp_group_size=self._groups.cp.size(),
            is_first_microbatch=not self._is_begun,
            current_microbatch=number,
            is_last_stage=last,
        )
        self._is_begun = True
        self.tokens.add_(counted)
        return output

    def _backward(
        self, unit: Unit, taken: torch.Tensor | None, output: torch.Tensor, gradient: torch.Tensor | None
    ) -> Any:
        """Run the backward of ``unit``, and return the gradient of its input.

        Args:
            taken: input of the forward; None if the microbatch's route begins on this stage.
            output: output of the forward.
        """
        if self._reduction is not None:
            self._reduction.before(unit)
        return backward_step(taken, output, gradient, self._kind, self._config)

    def _empty(self) -> torch.Tensor:
        """Return a new tensor into which a message from another stage is received: an activation or its gradient."""
        return torch.empty(self._shape, dtype=self._config.pipeline_dtype, device=self._device, requires_grad=True)


def _read(loader: Iterator | Sequence | None, count: int) -> list[Any]:
    """Return all microbatches of a step in a list, because stages execute them in different orders."""
    loader = loader[0] if isinstance(loader, list) else loader
    return [None] * count if loader is None else [next(loader) for _ in range(count)]


def install(chunk: torch.nn.Module, ends: ReplicatedEnds, plan: Callable[[int], Program]) -> None:
    """Train ``chunk`` by planned schedules. Call it after core's callbacks have been set.

    Args:
        plan: returns the schedule for a number of microbatches.

    Raises:
        UserError: the model is none of core's class GPTModel, which alone is built with swapped ends.
    """
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    if not isinstance(model, GPTModel):
        problem = f"--ft-checkfree-plus swaps the ends of core's GPTModel, and the model is a {type(model).__name__}"
        raise UserError(problem, "use --ft-checkfree")
    config = chunk.config
    planned = cache(plan)

    def finalize_replicated_ends(
        finalize: Callable, model: Any, tokens: torch.Tensor | None = None, **groups: Any
    ) -> None:
        ends.sum_tokens(tokens)
        finalize(model, tokens, **groups)
        ends.sum_gradients(chunk)

    def run(
        *, forward_step_func: Callable, data_iterator: Any, model: Any, groups: Any, num_microbatches: int, **sizes: int
    ) -> list[Report]:
        """Train one step in place of core's schedule, with its keywords; return the losses of the last stage."""
        stage_model = model[0] if isinstance(model, list) else model
        batches = _read(data_iterator, num_microbatches)
        program = planned(num_microbatches)
        iteration = Iteration(program, stage_model, forward_step_func, batches, groups, **sizes)
        iteration.run()
        return ends.sum_losses(iteration.losses)

    def plainly(by_core: Callable[[], Any]) -> Any:
        return in_place(chunk, ends.stage, ends.stages, by_core)

    wrap_attribute(config, "finalize_model_grads_func", finalize_replicated_ends)
    swapped_pipeline.use(run, plainly)
