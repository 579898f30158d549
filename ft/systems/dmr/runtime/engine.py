"""DMR of one rank: follows megatron-core through an iteration, and has every operator of it verified."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ft.systems.dmr.runtime.cursor import NO_LAYER, ExecutionCursor
from ft.systems.dmr.runtime.findings import Findings, Mismatch
from ft.systems.dmr.runtime.messages import Messages
from ft.systems.dmr.runtime.mode import DoubleExecution
from ft.systems.dmr.runtime.operators import tensors_in
from ft.systems.dmr.runtime.queue import Queue
from ft.systems.dmr.runtime.reductions import Reductions
from ft.systems.dmr.runtime.segments import Scripts, Segment


class Engine:
    """What ``megatron.patches.double_execution`` tells, and who is told.

    Args:
        mode: the dispatcher's. wire: falsifies payloads, in experiments.

    Attributes:
        is_active: an iteration is being protected.
    """

    def __init__(
        self,
        course: ExecutionCursor,
        findings: Findings,
        queue: Queue,
        mode: DoubleExecution,
        messages: Messages,
        wire: Callable[[str, ExecutionCursor, Sequence[torch.Tensor]], None] | None = None,
    ):
        self.course, self.findings, self.queue, self.mode = course, findings, queue, mode
        self._messages, self._wire = messages, wire
        self._reductions = Reductions(findings, None if wire is None else self._falsify_reduced)
        self._scripts = Scripts()
        self.is_active = False

    @contextlib.contextmanager
    def iteration(self, microbatches: int) -> Iterator[None]:
        """Within, operators are executed twice."""
        self.course.restart()
        self.findings.restart()
        self.queue.restart()
        self._reductions.restart()
        self._messages.restart(microbatches)
        self.mode.restart()
        self.is_active = True
        try:
            with self.mode:
                yield
        finally:
            self.is_active = False

    def before_update(self) -> None:
        """The optimizer is about to change what waiting verifications read."""
        with self._unwatched():
            self.queue.drain()
            self._reductions.finish()
        self.course.update()

    def coverage(self) -> dict[str, int]:
        """Operators of the last iteration by how they were verified. Deferred ones: "in windows"; "early": before that,
        because their memory was about to be changed or is scarce; "late": no window was left. "unverified": compared
        with nothing. "not in the plan": of whatever set, where a plan is followed that does not fit."""
        queue = {"in windows": self.queue.in_windows, "early": self.queue.early, "late": self.queue.late}
        misfits = {"not in the plan": self.mode.misfits} if self.mode.misfits else {}
        return {**self.mode.counts, **queue, "unverified": self.findings.unverified, **misfits}

    def flag(self) -> torch.Tensor:
        """Collective: whether this rank has found anything, messages and all-reduces included: int32 [1]."""
        self.queue.drain()
        self._messages.compare()
        self._reductions.compare()
        return self.findings.flag()

    def settle(self) -> list[Mismatch]:
        """Collective, after a flag that is up on some rank: what this rank has found."""
        self._reductions.settle()
        return self.findings.settle()

    def watch_layers(self, chunks: Sequence[torch.nn.Module], layer_class: type) -> None:
        """Has operators of transformer layers told apart, in forward and backward."""
        for chunk in chunks:
            layers = [module for module in chunk.modules() if isinstance(module, layer_class)]
            for position, layer in enumerate(layers):
                layer.register_forward_pre_hook(self._layer_begins(layer.layer_number, is_first=not position))
                layer.register_forward_hook(self._layer_ends(layer.layer_number))

    def _layer_begins(self, number: int, *, is_first: bool) -> Callable:
        def begins(_module, inputs):
            self.course.layer = number
            if is_first and inputs and self.is_active:
                self._mark(inputs[0], NO_LAYER)

        return begins

    def _layer_ends(self, number: int) -> Callable:
        def ends(_module, _inputs, outputs):
            self.course.layer = NO_LAYER
            if self.is_active:
                for tensor in tensors_in(outputs)[:1]:
                    self._mark(tensor, number)

        return ends

    def _mark(self, tensor: Any, number: int) -> None:
        """When the backward comes by this tensor it enters that layer."""
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():

            def enter(_gradient: torch.Tensor) -> None:
                self.course.layer = number

            tensor.register_hook(enter)

    def forward_step(self, step: Callable[[], Any], chunk: int, inputs: Any, outputs_of: Callable[[Any], Any]) -> Any:
        """Runs the forward of a chunk's next microbatch."""
        microbatch = self.course.forward(chunk)
        with self._unwatched():
            self._falsify_received(tensors_in(inputs))
            self._messages.forward_begins(chunk, microbatch, tensors_in(inputs))
        result = step()
        made = outputs_of(result)
        with self._unwatched():
            self._messages.forward_ends(chunk, microbatch, tensors_in(made))
        for tensor in tensors_in(made):
            self.course.made(tensor, chunk, microbatch)
        self.course.outside()
        return result

    def backward_step(self, step: Callable[[], Any], output: Any, gradients: Any) -> Any:
        """Runs the backward from ``output``."""
        first = next(iter(tensors_in(output)), output)
        chunk, microbatch = self.course.backward(first)
        with self._unwatched():
            self._falsify_received(tensors_in(gradients))
            self._messages.backward_begins(chunk, microbatch, tensors_in(gradients))
        result = step()
        with self._unwatched():
            self._messages.backward_ends(chunk, microbatch, tensors_in(result))
        self.course.outside()
        return result

    def recomputed(self, function: Callable) -> Callable:
        """A function that is called now, and once more when its results are recomputed."""
        calls = 0
        segment: Segment | None = None

        def watched(*args):
            nonlocal calls, segment
            calls += 1
            if not self.is_active:
                return function(*args)
            if calls == 1:
                if self.mode.segment is not None:  # inside another one, whose recomputation covers it
                    return function(*args)
                segment = Segment(self.findings, self._scripts)
                return self._primary(segment, function, args)
            # A second recomputation, of a graph that was kept, is compared with nothing: all of it is verified at once.
            return self._again(segment if calls == 2 else None, function, args)

        return watched

    def window(self, kind: str) -> None:
        """Something is on its way, and this rank is about to wait for it."""
        if self.is_active and self.queue:
            with self._unwatched():
                self.queue.window(self.mode.position)

    def waited(self) -> None:
        """The last window is over."""

    def reduced(self, group: dist.ProcessGroup, tensor: torch.Tensor, *, is_over: bool) -> None:
        """``tensor`` is what an all-reduce writes to. ``is_over``: it has written."""
        if not self.is_active or tensor.device.type != self.findings.device.type:
            return
        with self._unwatched():
            at = self.course.at("all_reduce", self.course.unit.index)
            (self._reductions.done if is_over else self._reductions.begun)(group, tensor, at)

    def dynamic_window(self, is_over: Callable[[], bool]) -> None:
        """Something is on its way, and takes another time in every iteration."""
        if self.is_active:
            with self._unwatched():
                self.queue.window(self.mode.position)
                self.queue.dynamic_window(is_over)

    def _falsify_received(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._wire is not None and tensors:
            self._wire("p2p", self.course, tensors)

    def _falsify_reduced(self, tensor: torch.Tensor) -> None:
        self._wire("all-reduce", self.course, [tensor])

    def _primary(self, segment: Segment, function: Callable, args: Sequence[Any]) -> Any:
        self.mode.segment, self.mode.again = segment, False
        try:
            return function(*args)
        finally:
            self.mode.segment = None

    def _again(self, segment: Segment | None, function: Callable, args: Sequence[Any]) -> Any:
        unit = self.course.recompute()
        layer = self.course.layer
        if segment is not None:
            segment.begin_again()
        self.mode.segment, self.mode.again = segment, True
        try:
            return function(*args)
        finally:  # torch's own checkpointing stops early by an exception
            self.mode.segment, self.mode.again = None, False
            self.course.back(unit)
            self.course.layer = layer
            if segment is not None:
                with self._unwatched():
                    segment.end_again()

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        """DMR's own operators are not verified."""
        with torch._C._DisableTorchDispatch():
            yield
