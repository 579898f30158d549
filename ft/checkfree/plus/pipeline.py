"""Executes a ``Program``: this stage's units one after the other, and the batches of messages between them.

Forward and backward of a unit are megatron-core's own. A stage at an end of the pipeline embeds, or compares, in some
microbatches and not in others: its model is told before each forward.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ft.schedule.program import Batch, Program
from ft.schedule.units import Unit
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model, get_model_config, get_model_type


class Ends:
    """A stage's model, as the first or last of a microbatch's way or as neither.

    Args:
        chunk: the stage's model, of core, wrapped or not.
    """

    def __init__(self, chunk: torch.nn.Module):
        self._model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        self._block = self._model.decoder
        self._norm = self._block.final_layernorm

    def become(self, *, first: bool, last: bool) -> None:
        """``first``: it embeds tokens. ``last``: it applies final norm and output layer, and compares."""
        for module in (self._model, self._block):
            module.pre_process, module.post_process = first, last
        self._block._modules["final_layernorm"] = self._norm if last else None

    def rest(self) -> None:
        """With everything that the stage has in its place: for who reduces gradients, or saves."""
        self.become(first=hasattr(self._model, "embedding"), last=hasattr(self._model, "output_layer"))


class Execution:
    """One iteration of one stage.

    Args:
        program: of all stages. group: the pipeline's. forward: runs a unit's forward from its input; output, tokens.
            backward: from (input, output, gradient) to the input's gradient. empty: makes room for what is received.
        release: told of an output that has been sent.
    """

    def __init__(
        self,
        program: Program,
        group: dist.ProcessGroup,
        forward: Callable[[Unit, Any], torch.Tensor],
        backward: Callable[[Any, Any, Any], Any],
        empty: Callable[[], torch.Tensor],
        release: Callable[[torch.Tensor], None],
    ):
        self._program, self._group, self._stage = program, group, dist.get_rank(group)
        self._forward, self._backward, self._empty, self._release = forward, backward, empty, release
        self._arrived: dict[Unit, torch.Tensor] = {}
        self._made: dict[Unit, torch.Tensor] = {}
        self._open: dict[int, tuple[Any, Any]] = {}

    def run(self) -> None:
        """All steps of this stage."""
        for step in self._program.stages[self._stage]:
            if isinstance(step, Unit):
                self._work(step)
            elif step:
                self._exchange(step)
            else:
                dist.barrier(self._group)

    def _work(self, unit: Unit) -> None:
        routes = self._program.routes
        source = routes.needs(unit)
        given = None if source is None or source.stage == unit.stage else self._arrived.pop(source)
        if not unit.backward:
            output = self._forward(unit, given)
            self._open[unit.microbatch] = given, output
            result = output
        else:
            taken, output = self._open.pop(unit.microbatch)
            result = self._backward(taken, output, given)
        target = routes.receiver(unit)
        if target is not None and target.stage != unit.stage:
            self._made[unit] = result

    def _exchange(self, batch: Batch) -> None:
        operations, sent = [], []
        for source, target, unit in batch:
            outgoing = source == self._stage
            tensor = self._made.pop(unit) if outgoing else self._empty()
            peer = dist.get_global_rank(self._group, target if outgoing else source)
            if outgoing:
                if not unit.backward:
                    sent.append(tensor)
                operations.append(dist.P2POp(dist.isend, tensor.detach().contiguous(), peer, self._group))
            else:
                self._arrived[unit] = tensor
                operations.append(dist.P2POp(dist.irecv, tensor.detach(), peer, self._group))
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        for tensor in sent:
            self._release(tensor)


def forward_backward(program: Program) -> Callable[..., list[torch.Tensor]]:
    """What core's ``forward_backward_pipelining_without_interleaving`` is for 1F1B, for ``program``. Training only.

    The function returns the losses of those microbatches that ended on this stage. ``expect_no_sync`` prepares for
    gradients that are reduced all at once.
    """

    def run(
        *,
        forward_step_func,
        data_iterator,
        model,
        num_microbatches,
        seq_length,
        micro_batch_size,
        groups,
    ) -> list[torch.Tensor]:
        chunk = model[0] if isinstance(model, list) else model
        config, kind = get_model_config(chunk), get_model_type(chunk)
        ends, ways = Ends(chunk), program.routes.ways
        batches = _read(data_iterator, num_microbatches)
        losses: list[torch.Tensor] = []
        tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        shape = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=None,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )[0]

        def empty() -> torch.Tensor:
            device, dtype = torch.cuda.current_device(), config.pipeline_dtype
            return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)

        def forward(unit: Unit, given: torch.Tensor | None) -> torch.Tensor:
            at = program.routes.position(unit)
            first, last = at == 0, at == len(ways[unit.microbatch]) - 1
            ends.become(first=first, last=last)

            def in_precision(loader: Any, model: Any) -> tuple[torch.Tensor, Any]:
                """Core raises outputs to fp32 on the last stage, whatever the microbatch's last one is."""
                output, loss = forward_step_func(loader, model)
                return output.to(torch.float32 if last else config.pipeline_dtype), loss

            output, counted = schedules.forward_step(
                in_precision,
                iter([batches[unit.microbatch]]) if first or last else None,
                chunk,
                num_microbatches,
                given,
                losses,
                config,
                cp_group_size=groups.cp.size(),
                is_first_microbatch=not losses and not tokens.any(),
                current_microbatch=unit.microbatch,
                is_last_stage=last,
            )
            tokens.add_(counted)
            return output

        def backward(taken: Any, output: Any, gradient: Any) -> Any:
            return schedules.backward_step(taken, output, gradient, kind, config)

        def release(output: torch.Tensor) -> None:
            schedules.deallocate_output_tensor(output, config.deallocate_pipeline_outputs)

        try:
            with _without_sync(config):
                Execution(program, groups.pp, forward, backward, empty, release).run()
        finally:
            ends.rest()
        _finish(config, chunk, tokens, groups)
        return losses

    return run


def in_place(chunk: torch.nn.Module, stage: int, stages: int, run: Callable[[], Any]) -> Any:
    """Runs one of core's schedules, in which only the first stage embeds and only the last one compares."""
    ends = Ends(chunk)
    ends.become(first=stage == 0, last=stage == stages - 1)
    try:
        return run()
    finally:
        ends.rest()


def _read(loader: Iterator | Sequence | None, count: int) -> list[Any]:
    """The microbatches of a step, by number: stages do not take them in one order."""
    loader = loader[0] if isinstance(loader, list) else loader
    return [None] * count if loader is None else [next(loader) for _ in range(count)]


def _without_sync(config: Any) -> contextlib.AbstractContextManager:
    """Gradients are reduced when all are there: which microbatch is the last to touch a parameter differs."""
    functions = config.no_sync_func
    return contextlib.nullcontext() if functions is None else functions()


def _finish(config: Any, chunk: torch.nn.Module, tokens: torch.Tensor, groups: Any) -> None:
    if config.finalize_model_grads_func is None:
        return
    counted = tokens if config.calculate_per_token_loss else None
    config.finalize_model_grads_func([chunk], counted, pg_collection=groups)
