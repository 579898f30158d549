"""Run a training iteration of a megatron-core model by a planned pipeline schedule of CheckFree+ (CheckFree, section
4.3).

Half of the microbatches take a route on which the first two and the last two stages are swapped. A schedule is a
:class:`ft.systems.schedule.program.Program`: for each stage, the order of its units (the forward or backward of one
microbatch) and messages. The forward and backward of a unit are done by megatron-core ("core"). A stage at an end of
the pipeline computes the embedding or the loss in some microbatches and not in others, so its model is configured
before each forward.

Messages overlap with computation: a stage goes on while a batch of messages is in flight, and waits for the batch when
it needs a tensor from it, or before it posts the next batch. The order of batches and units is that of the program, and
a stage only waits later than the program does. Therefore a program that cannot deadlock with immediate waits cannot
deadlock here, because the messages of a batch proceed together: gloo buffers them, and over NCCL
``batch_isend_irecv`` launches them as one (``ft.state.groups.registry``).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ft.base.errors import UserError
from ft.systems.checkfree.plus.ends import EarlyReduction, ReplicatedEnds, Report, StageEnds, in_place
from ft.systems.schedule.program import Batch, Program, Unit
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model, get_model_config, get_model_type
from megatron.patches import double_execution, instances, swapped_pipeline
from megatron.patches.releases import backward_step


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

    instances.around(config, "finalize_model_grads_func", finalize_replicated_ends)
    swapped_pipeline.use(run, plainly)
