"""Run a training iteration of a megatron-core model by a planned pipeline schedule of CheckFree+.

In CheckFree+ (CheckFree, section 4.3), half of the microbatches take a route on which the first two and the last two
stages are swapped. A schedule is a :class:`ft.systems.schedule.program.Program`: for each stage, the order of its units
(the forward or backward of one microbatch) and messages. The forward and backward of a unit are done by megatron-core
("core"). A stage at an end of the pipeline computes the embedding or the loss in some microbatches and not in others,
so its model is configured before each forward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ft.systems.checkfree.plus.execution import Execution
from ft.systems.checkfree.plus.reduction import EarlyReduction
from ft.systems.checkfree.plus.stage_ends import StageEnds
from ft.systems.schedule.program import Program
from ft.systems.schedule.units import Unit
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config, get_model_type
from megatron.patches import double_execution
from megatron.patches.releases import backward_step


@dataclass(frozen=True)
class Sizes:
    """The sizes of one iteration.

    Attributes:
        num_microbatches: number of microbatches.
        micro_batch_size: samples per microbatch.
        seq_length: tokens per sample.
    """

    num_microbatches: int
    micro_batch_size: int
    seq_length: int


class Iteration:
    """One training iteration on one stage. Implements :class:`ft.systems.checkfree.plus.execution.Work`.

    Args:
        program: the schedule of all stages.
        chunk: the stage's model.
        step: the trainer's forward step function, as core's schedules take it.
        batches: the data of the microbatches by number; each is None on a stage that reads no tokens.
        sizes: sizes of the iteration.
        groups: core's ``ProcessGroupCollection``.

    Attributes:
        losses: losses of the microbatches whose route ends on this stage.
        tokens: number of tokens in these microbatches, as the loss function counts them.
    """

    def __init__(
        self, program: Program, chunk: torch.nn.Module, step: Callable, batches: Sequence, sizes: Sizes, groups: Any
    ):
        self._program, self._chunk, self._step, self._batches = program, chunk, step, batches
        self._count, self._groups = sizes.num_microbatches, groups
        self._config, self._ends = get_model_config(chunk), StageEnds(chunk)
        self._kind = get_model_type(chunk)
        self._device = torch.cuda.current_device()
        self._shape = schedules.get_tensor_shapes(
            seq_length=sizes.seq_length,
            micro_batch_size=sizes.micro_batch_size,
            decoder_seq_length=None,
            config=self._config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )[0]
        self._is_begun = False
        self._reduction: EarlyReduction | None = None
        self.losses: list[torch.Tensor] = []
        self.tokens = torch.zeros([], dtype=torch.int, device=self._device)

    def run(self) -> None:
        """Execute all units of this stage, and reduce the gradients."""
        config = self._config
        double_execution.follow([[place.stage for place in way] for way in self._program.routes.ways])
        if config.no_sync_func is not None:
            order = self._program.order(self._groups.pp.rank())
            self._reduction = EarlyReduction(self._chunk, self._program.routes, order)
        try:
            Execution(self._program, self._groups.pp, self).run()
        finally:
            self._ends.rest()
        if config.finalize_model_grads_func is not None:
            counted = self.tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func([self._chunk], counted, pg_collection=self._groups)

    def forward(self, unit: Unit, given: torch.Tensor | None) -> torch.Tensor:
        """Run the forward of a unit and return its output; see ``Work.forward``."""
        routes, number = self._program.routes, unit.microbatch
        at = routes.position(unit)
        first, last = at == 0, at == len(routes.ways[number]) - 1
        self._ends.become(first=first, last=last)

        def in_precision(loader: Any, model: Any) -> tuple[torch.Tensor, Any]:
            """Run the forward step and convert its output to the right dtype.

            The conversion is needed because core converts outputs to fp32 on the last stage of the pipeline, which is
            not the last one of every microbatch's route.
            """
            output, loss = self._step(loader, model)
            return output.to(torch.float32 if last else self._config.pipeline_dtype), loss

        output, counted = schedules.forward_step(
            in_precision,
            iter([self._batches[number]]) if first or last else None,
            self._chunk,
            self._count,
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

    def backward(
        self, unit: Unit, taken: torch.Tensor | None, output: torch.Tensor, gradient: torch.Tensor | None
    ) -> Any:
        """Run the backward of a unit and return the gradient of its input; see ``Work.backward``."""
        if self._reduction is not None:
            self._reduction.before(unit)
        return backward_step(taken, output, gradient, self._kind, self._config)

    def empty(self) -> torch.Tensor:
        """Return a new tensor with the shape of an activation; see ``Work.empty``."""
        return torch.empty(self._shape, dtype=self._config.pipeline_dtype, device=self._device, requires_grad=True)

    def release(self, output: torch.Tensor) -> None:
        """Free the memory of an output that has been sent; see ``Work.release``."""
        schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)


def forward_backward(program: Program) -> Callable[..., list[torch.Tensor]]:
    """Return the counterpart of core's ``forward_backward_pipelining_without_interleaving`` (1F1B) for ``program``.

    The returned function is for training only. It takes core's keywords for data, model and sizes, and ``groups``. It
    returns the losses of those microbatches whose route ends on this stage.
    """

    def run(*, forward_step_func, data_iterator, model, groups, **sizes) -> list[torch.Tensor]:
        given = Sizes(**sizes)
        chunk = model[0] if isinstance(model, list) else model
        batches = _read(data_iterator, given.num_microbatches)
        iteration = Iteration(program, chunk, forward_step_func, batches, given, groups)
        iteration.run()
        return iteration.losses

    return run


def _read(loader: Iterator | Sequence | None, count: int) -> list[Any]:
    """Return all microbatches of a step in a list, because stages execute them in different orders."""
    loader = loader[0] if isinstance(loader, list) else loader
    return [None] * count if loader is None else [next(loader) for _ in range(count)]
