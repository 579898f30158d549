"""Execute a planned pipeline schedule of CheckFree+ on one stage.

The schedule is a :class:`ft.systems.schedule.program.Program`: for each stage, a sequence of units (the forward or
backward of one microbatch) and batches of point-to-point messages. The route of a microbatch is the order in which it
passes through the stages.

Messages overlap with computation: a stage goes on while a batch of messages is in flight, and waits for the batch when
it needs a tensor from it, or before it posts the next batch. The order of batches and units is that of the program, and
a stage only waits later than the program does. Therefore a program that cannot deadlock with immediate waits cannot
deadlock here, as long as the messages of a batch proceed together, as with gloo. With NCCL they do not: for process
groups that a recovery can interrupt, torch launches the messages of a batch one by one, on one stream for each pair of
ranks, and both ends begin with their send. Messages that are larger than NCCL's buffers can then deadlock.
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

    def backward(
        self, unit: Unit, taken: torch.Tensor | None, output: torch.Tensor, gradient: torch.Tensor | None
    ) -> Any:
        """Run the backward of ``unit``, and return the gradient of its input.

        Args:
            unit: the backward.
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
        self._requests: list[dist.Work] = []
        self._awaited: set[Unit] = set()
        self._in_flight: list[dist.P2POp] = []
        self._outputs: list[torch.Tensor] = []

    def run(self) -> None:
        """Execute all steps of this stage."""
        for step in self._program.stages[self._stage]:
            if isinstance(step, Unit):
                self._execute(step)
            elif step:
                self._exchange(step)
            else:
                self._wait()
                dist.barrier(self._group)
        self._wait()

    def _execute(self, unit: Unit) -> None:
        routes = self._program.routes
        source = routes.needs(unit)
        given = None if source is None or source.stage == unit.stage else self._received(source)
        if not unit.backward:
            output = self._work.forward(unit, given)
            self._open[unit.microbatch] = given, output
            result = output
        else:
            taken, output = self._open.pop(unit.microbatch)
            result = self._work.backward(unit, taken, output, given)
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
        for source, target, unit in batch:
            outgoing = source == self._stage
            tensor = self._made.pop(unit) if outgoing else self._work.empty()
            peer = dist.get_global_rank(self._group, target if outgoing else source)
            call = dist.isend if outgoing else dist.irecv
            self._in_flight.append(dist.P2POp(call, tensor.detach().contiguous(), peer, self._group))
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
            self._work.release(tensor)
        self._requests, self._in_flight, self._outputs = [], [], []
        self._awaited.clear()
