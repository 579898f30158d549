"""Execute a ``Program`` on one stage: its units one after the other, and the batches of messages between them."""

from typing import Any, Protocol

import torch
import torch.distributed as dist

from ft.systems.schedule.program import Batch, Program
from ft.systems.schedule.units import Unit


class Work(Protocol):
    """What a stage does in its units."""

    def forward(self, unit: Unit, given: torch.Tensor | None) -> torch.Tensor:
        """Return a unit's output from its input; ``given`` is None if the unit begins the microbatch's route."""

    def backward(self, taken: torch.Tensor | None, output: torch.Tensor, gradient: torch.Tensor | None) -> Any:
        """Return the gradient of ``taken``, the input of the forward. ``gradient``: that of its output; None if the
        route ends here."""

    def empty(self) -> torch.Tensor:
        """Return a tensor into which a message from another stage is received."""

    def release(self, output: torch.Tensor) -> None:
        """Release an output that has been sent."""


class Execution:
    """One iteration of one stage.

    Args:
        program: the program of all stages.
        group: process group of the pipeline.
        work: executes the units.
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
