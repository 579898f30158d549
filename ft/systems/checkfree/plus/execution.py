"""Execute a planned pipeline schedule of CheckFree+ on one stage.

The schedule is a :class:`ft.systems.schedule.program.Program`: for each stage, a sequence of units (the forward or
backward of one microbatch) and batches of point-to-point messages. The route of a microbatch is the order in which it
passes through the stages.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist

from ft.systems.schedule.program import Batch, Program
from ft.systems.schedule.units import Unit


class Work(Protocol):
    """Interface to the computation of a stage."""

    def forward(self, unit: Unit, given: torch.Tensor | None) -> torch.Tensor:
        """Run the forward of ``unit`` with the input ``given``, and return its output.

        ``given`` is None if the microbatch's route begins on this stage.
        """

    def backward(self, taken: torch.Tensor | None, output: torch.Tensor, gradient: torch.Tensor | None) -> Any:
        """Run the backward of a unit, and return the gradient of its input.

        Args:
            taken: input of the forward; None if the microbatch's route begins on this stage.
            output: output of the forward.
            gradient: gradient of ``output``; None if the microbatch's route ends on this stage.
        """

    def empty(self) -> torch.Tensor:
        """Return a new tensor into which a message from another stage is received."""

    def release(self, output: torch.Tensor) -> None:
        """Release the memory of an output that has been sent."""


class Execution:
    """One iteration of one stage.

    Args:
        program: the schedule of all stages.
        group: process group of the pipeline.
        work: the computation of this stage.
    """

    def __init__(self, program: Program, group: dist.ProcessGroup, work: Work):
        self._program, self._group, self._work = program, group, work
        self._stage = dist.get_rank(group)
        self._arrived: dict[Unit, torch.Tensor] = {}
        self._made: dict[Unit, torch.Tensor] = {}
        self._open: dict[int, tuple[Any, Any]] = {}

    def run(self) -> None:
        """Execute all steps of this stage."""
        for step in self._program.stages[self._stage]:
            if isinstance(step, Unit):
                self._execute(step)
            elif step:
                self._exchange(step)
            else:
                dist.barrier(self._group)

    def _execute(self, unit: Unit) -> None:
        routes = self._program.routes
        source = routes.needs(unit)
        given = None if source is None or source.stage == unit.stage else self._arrived.pop(source)
        if not unit.backward:
            output = self._work.forward(unit, given)
            self._open[unit.microbatch] = given, output
            result = output
        else:
            taken, output = self._open.pop(unit.microbatch)
            result = self._work.backward(taken, output, given)
        target = routes.receiver(unit)
        if target is not None and target.stage != unit.stage:
            self._made[unit] = result

    def _exchange(self, batch: Batch) -> None:
        operations, sent = [], []
        for source, target, unit in batch:
            outgoing = source == self._stage
            tensor = self._made.pop(unit) if outgoing else self._work.empty()
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
            self._work.release(tensor)
