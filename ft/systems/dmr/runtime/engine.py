"""The DMR engine of one rank: follow megatron-core through a training iteration and have every operator verified.

An operator is verified immediately, with the recomputation of activation checkpointing, or later in a window, a time in
which the rank waits for communication. Transfers between pipeline stages and all-reduces are verified by digests of
what was sent and received.

The kernels of a compiled graph bypass torch's dispatcher. What the backward pass needs of a forward graph is among the
graph's results, and the backward pass is a graph of its own. So each call of a graph is an opaque call
(:class:`ft.systems.dmr.runtime.opaque.OpaqueCalls`), whose results are all that has to be compared.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ft.systems.dmr.runtime import functions
from ft.systems.dmr.runtime.collectives import (
    RECEIVED_BACKWARD,
    RECEIVED_FORWARD,
    SENT_BACKWARD,
    SENT_FORWARD,
    Begun,
    Collectives,
    Messages,
)
from ft.systems.dmr.runtime.cursor import NO_LAYER, ExecutionCursor
from ft.systems.dmr.runtime.findings import Findings, Mismatch
from ft.systems.dmr.runtime.mode import DoubleExecutionMode
from ft.systems.dmr.runtime.opaque import Executed, OpaqueCalls
from ft.systems.dmr.runtime.operators import tensors_in
from ft.systems.dmr.runtime.queue import Queue
from ft.systems.dmr.runtime.segments import RecomputationSteps, Segment

if TYPE_CHECKING:
    from ft.systems.dmr.runtime.injection import Falsifier

_OPERATOR = re.compile(r"torch\.ops\.\w+\.(\w+)")
_MOST_NAMED = 4
_NAME = "name_for_dmr"
"""Attribute of a graph under which its name is kept."""


def name_of(graph: Any) -> str:
    """Return a name that is equal on all ranks that compute the same: the graph's first operators, and a hash of it."""
    name = getattr(graph, _NAME, "")
    if not name:
        text = getattr(graph, "inductor_post_grad_graph_str", "") or getattr(graph, "source_code", "")
        operators = list(dict.fromkeys(_OPERATOR.findall(text)))
        shown = ", ".join(operators[:_MOST_NAMED]) + (", ..." if len(operators) > _MOST_NAMED else "")
        name = f"compiled graph {hashlib.sha256(text.encode()).hexdigest()[:8]} ({shown})"
        setattr(graph, _NAME, name)
    return name


class Engine:
    """The DMR engine of one rank. ``megatron.patches.double_execution`` calls it, and it calls the other parts of DMR.

    Args:
        messages: digests of the activations and gradients that cross pipeline stages; None: they are not compared.
        falsifier: corrupts received tensors in fault-injection experiments.

    Attributes:
        is_active: True while an iteration is being protected.
    """

    def __init__(
        self,
        cursor: ExecutionCursor,
        findings: Findings,
        queue: Queue,
        mode: DoubleExecutionMode,
        messages: Messages | None = None,
        falsifier: "Falsifier | None" = None,
    ):
        self.cursor, self.findings, self.queue, self.mode = cursor, findings, queue, mode
        self._messages, self._falsifier = messages, falsifier
        self._collectives = Collectives(findings, None if falsifier is None else self._falsify_reduced)
        self._scripts = RecomputationSteps()
        self._opaque: OpaqueCalls | None = None
        self._of_core: tuple[str, ...] = ()
        self.is_active = False

    @contextlib.contextmanager
    def iteration(self, microbatches: int, *, learns: bool = False) -> Iterator[None]:
        """Return a context in which the operators of one iteration are verified. ``learns``: whether the iteration
        before was wrong on any rank; see
        :meth:`ft.systems.dmr.runtime.opaque.OpaqueCalls.restart`."""
        self.cursor.restart()
        self.findings.restart()
        self.queue.restart()
        self._collectives.restart()
        if self._messages is not None:
            self._messages.restart(microbatches)
        self.mode.restart()
        if self._opaque is not None:
            self._opaque.restart(learns=learns)
            functions.watch(self._opaque, self._of_core)
        self.is_active = True
        try:
            with self.mode:
                yield
        finally:
            self.is_active = False

    def watch_opaque_calls(self, calls: OpaqueCalls, of_core: tuple[str, ...] = ()) -> None:
        """Have calls that bypass torch's dispatcher verified by ``calls``. ``of_core``: how the names of such functions
        of megatron-core begin (:func:`functions.functions_of_core`)."""
        self._opaque, self._of_core = calls, of_core

    def before_update(self) -> None:
        """Execute all deferred verifications, because the optimizer is about to change the parameters that they
        read."""
        with self.unwatched():
            self.queue.drain()
            self._collectives.finish()
        self.cursor.update()

    def coverage(self) -> dict[str, int]:
        """Return the number of operators of the last iteration by how they were verified.

        Deferred operators are counted as "in windows", "early" (verified before their window, because their memory was
        about to be changed or is scarce) or "late" (no window was left). "unverified" operators were compared with
        nothing. "not in the plan" counts operators that the plan of this run does not contain at that place, however
        they were verified.
        """
        queue = {"in windows": self.queue.in_windows, "early": self.queue.early, "late": self.queue.late}
        misfits = {"not in the plan": self.mode.misfits} if self.mode.misfits else {}
        return {**self.mode.counts, **queue, "unverified": self.findings.unverified, **misfits}

    def flag(self) -> torch.Tensor:
        """Return 1 if this rank has found any mismatch (in operators, collectives or messages between stages), else 0,
        as int32 [1]. All ranks have to call it."""
        self.queue.drain()
        active, self.is_active = self.is_active, False  # DMR's own collectives are not recorded
        try:
            if self._messages is not None:
                self._messages.compare()
            self._collectives.compare()
        finally:
            self.is_active = active
        return self.findings.flag()

    @property
    def has_news(self) -> bool:
        """Return whether the ranks have to agree on what is known of functions; see :meth:`share`."""
        return self._opaque is not None and self._opaque.has_news

    def share(self, exchange: Callable[[Any], Sequence[Any]]) -> None:
        """Agree with all ranks on what is known of the functions that are executed as a whole. All ranks have to call
        it if ``has_news`` on any. ``exchange`` gives a value to all ranks, and returns those of all ranks."""
        if self._opaque is not None:
            self._opaque.share(exchange)

    def passed(self) -> None:
        """Forget what was compared so far and found equal on all ranks; the next ``flag`` covers the rest alone."""
        self.findings.passed()
        self._collectives.restart()
        if self._messages is not None:
            self._messages.restart(1)

    def settle(self) -> list[Mismatch]:
        """Return the mismatches of this rank. If ``flag`` is 1 on any rank, all ranks have to call this method."""
        self._collectives.settle()
        return self.findings.settle()

    def watch_layers(self, chunks: Sequence[torch.nn.Module], layer_class: type) -> None:
        """Register hooks on the transformer layers of ``chunks`` that record which layer an operator belongs to, in
        forward and backward."""
        for chunk in chunks:
            layers = [module for module in chunk.modules() if isinstance(module, layer_class)]
            for position, layer in enumerate(layers):
                layer.register_forward_pre_hook(self._layer_begins(layer.layer_number, is_first=not position))
                layer.register_forward_hook(self._layer_ends(layer.layer_number))

    def _layer_begins(self, number: int, *, is_first: bool) -> Callable:
        def begins(_module, inputs):
            self.cursor.layer = number
            if is_first and inputs and self.is_active:
                self._mark(inputs[0], NO_LAYER)

        return begins

    def _layer_ends(self, number: int) -> Callable:
        def ends(_module, _inputs, outputs):
            self.cursor.layer = NO_LAYER
            if self.is_active:
                for tensor in tensors_in(outputs)[:1]:
                    self._mark(tensor, number)

        return ends

    def _mark(self, tensor: Any, number: int) -> None:
        """Register a hook that sets the current layer to ``number`` when the backward pass reaches ``tensor``."""
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():

            def enter(_gradient: torch.Tensor) -> None:
                self.cursor.layer = number

            tensor.register_hook(enter)

    def follow(self, ways: Sequence[Sequence[int]]) -> None:
        """Note the order in which each microbatch of this iteration passes through the pipeline stages.

        Call it only if that is not the order of the stages' numbers.
        """
        if self._messages is not None:
            self._messages.follow(ways)

    def forward_step(
        self,
        step: Callable[[], Any],
        chunk: int,
        inputs: Any,
        outputs_of: Callable[[Any], Any],
        number: int | None = None,
    ) -> Any:
        """Run ``step``, the forward pass of a microbatch of ``chunk``, and return its result.

        Args:
            inputs: what the chunk has received from the stage before; tensors may be nested.
            outputs_of: takes the result of ``step`` and returns what is sent to the next stage.
            number: number of the microbatch; None: the next one of the chunk.
        """
        microbatch = self.cursor.forward(chunk, number)
        self._received(RECEIVED_FORWARD, chunk, microbatch, inputs)
        result = step()
        made = outputs_of(result)
        self._exchanged(SENT_FORWARD, chunk, microbatch, tensors_in(made))
        for tensor in tensors_in(made):
            self.cursor.made(tensor, chunk, microbatch)
        self.cursor.outside()
        return result

    def backward_step(self, step: Callable[[], Any], output: Any, gradients: Any) -> Any:
        """Run ``step``, the backward pass from ``output``, and return its result."""
        first = next(iter(tensors_in(output)), output)
        chunk, microbatch = self.cursor.backward(first)
        self._received(RECEIVED_BACKWARD, chunk, microbatch, gradients)
        result = step()
        self._exchanged(SENT_BACKWARD, chunk, microbatch, tensors_in(result))
        self.cursor.outside()
        return result

    def recomputed(self, function: Callable) -> Callable:
        """Wrap an activation-checkpointed function so that its forward call and its recomputation are compared."""
        calls = 0
        segment: Segment | None = None

        def watched(*args):
            nonlocal calls, segment
            calls += 1
            if not self.is_active:
                return function(*args)
            if calls == 1:
                # A segment within another segment is recomputed, and so compared, as part of the enclosing segment.
                if self.mode.segment is not None:
                    return function(*args)
                segment = Segment(self.findings, self._scripts)
                return self._primary(segment, function, args)
            # A second recomputation (of a retained autograd graph) has no other execution to be compared with: all its
            # operators are verified immediately.
            return self._again(segment if calls == 2 else None, function, args)

        return watched

    def window(self, kind: str) -> None:
        """Execute the verifications that are due in this window: communication is in flight, and this rank is about to
        wait for it. ``kind``: kind of the window, see ``ft.systems.dmr.plan.trace``."""
        if self.is_active and self.queue:
            with self.unwatched():
                self.queue.window(self.mode.position)

    def waited(self) -> None:
        """Do nothing at the end of a window. (The profiling engine overrides this method.)"""

    def communicates(
        self,
        kind: str,
        group: dist.ProcessGroup,
        outputs: Sequence[torch.Tensor],
        source: torch.Tensor,
        op: Any = None,
        splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
        is_coalesced: bool = False,
    ) -> Begun | None:
        """Note a collective that is about to begin.

        Args:
            kind: "all_reduce", "reduce_scatter", "all_gather" or "all_to_all".
            group: its process group.
            outputs: the tensors that receive the result.
            source: the tensor that this rank puts in.
            op: the operation of a reduction.
            splits: of an all-to-all: the sizes of the pieces of the output and of ``source``.
            is_coalesced: whether it begins later, together with others; ``completed`` reports their end.

        Returns:
            what ``communicated`` is called with when the collective is complete.
        """
        if not self.is_active or source.device.type != self.findings.device.type or dist.get_rank(group) < 0:
            return None
        with self.unwatched():
            at = self.cursor.at(kind, self.cursor.unit.index)
            details = {"op": op, "splits": splits, "is_coalesced": is_coalesced}
            return self._collectives.begin(kind, group, outputs, source, at, **details)

    def communicated(self, begun: Begun | None) -> None:
        """Read the result of a collective that is complete."""
        if begun is not None and self.is_active:
            with self.unwatched():
                self._collectives.end(begun)

    def completed(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read the results of the complete collectives that write into the memory of ``tensors``."""
        if self.is_active:
            with self.unwatched():
                self._collectives.end_in(tensors)

    def compiled(self, graph: Any, run: Callable[[list], Any], inputs: list) -> Any:
        """Execute a compiled graph (``torch._inductor.output_code.CompiledFxGraph``), and verify what it computes.

        Args:
            run: executes the graph on a list of inputs, and empties the list.
        """
        if self._opaque is None:
            return run(inputs)
        given = list(inputs)
        inputs.clear()  # as without DMR
        executed = self._opaque.call(name_of(graph), lambda: Executed(run(list(given))), lambda: {"inputs": given})
        return executed.value

    def dynamic_window(self, is_over: Callable[[], bool]) -> None:
        """Execute deferred verifications until ``is_over`` returns True. Called while communication is in flight whose
        duration differs in every iteration (a dynamic window)."""
        if self.is_active:
            with self.unwatched():
                self.queue.window(self.mode.position)
                self.queue.dynamic_window(is_over)

    def _received(self, kind: int, chunk: int, microbatch: int, payload: Any) -> None:
        tensors = tensors_in(payload)
        if self._falsifier is not None and tensors:
            with self.unwatched():
                self._falsifier.falsify(None, "p2p", self.cursor, tensors)
        self._exchanged(kind, chunk, microbatch, tensors)

    def _exchanged(self, kind: int, chunk: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        if self._messages is not None:
            with self.unwatched():
                self._messages.record(kind, chunk, microbatch, tensors)

    def _falsify_reduced(self, tensor: torch.Tensor) -> None:
        self._falsifier.falsify(None, "all-reduce", self.cursor, [tensor])

    def _primary(self, segment: Segment, function: Callable, args: Sequence[Any]) -> Any:
        self.mode.segment, self.mode.again = segment, False
        try:
            return function(*args)
        finally:
            self.mode.segment = None

    def _again(self, segment: Segment | None, function: Callable, args: Sequence[Any]) -> Any:
        unit = self.cursor.recompute()
        layer = self.cursor.layer
        if segment is not None:
            segment.begin_again()
        self.mode.segment, self.mode.again = segment, True
        try:
            return function(*args)
        finally:  # torch's own checkpointing stops the recomputation early by raising an exception
            self.mode.segment, self.mode.again = None, False
            self.cursor.back(unit)
            self.cursor.layer = layer
            if segment is not None:
                with self.unwatched():
                    segment.end_again()

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Return a context in which operators are not verified, for DMR's own computations."""
        with torch._C._DisableTorchDispatch():
            yield
