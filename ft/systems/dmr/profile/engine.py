"""The engine of the DMR profiler: follow a training iteration as the DMR engine does, but verify nothing.

DMR (dual modular redundancy, SpareTrain) executes operators a second time, if possible in *windows*, times in which the
rank waits for communication. The profiler records operators and windows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ft.systems.dmr.plan.trace import INTRA
from ft.systems.dmr.profile.recorder import Recorder
from ft.systems.dmr.runtime.cursor import ExecutionCursor
from ft.systems.dmr.runtime.engine import Engine
from ft.systems.dmr.runtime.findings import Findings
from ft.systems.dmr.runtime.queue import Queue

EP = INTRA[1]


class ProfilingEngine(Engine):
    """An ``Engine`` that records operators and waits, and compares nothing.

    Args:
        course: the position of this rank in the iteration.
        recorder: the torch dispatch mode that records operators and waits.
        device: the device of the run.
    """

    def __init__(self, course: ExecutionCursor, recorder: Recorder, device: torch.device):
        findings = Findings(device, 0)
        super().__init__(course, findings, Queue(findings), recorder, _NoMessages())
        self._recorder = recorder

    def window(self, kind: str) -> None:
        """Begin to record a wait, see ``megatron.patches.double_execution.Listener``."""
        if self.is_active:
            self._recorder.waits(kind)

    def waited(self) -> None:
        """End the recording of a wait, see ``Listener``."""
        if self.is_active:
            self._recorder.waited()

    def dynamic_window(self, is_over: Callable[[], bool]) -> None:
        """Begin to record a wait whose duration differs in every iteration, see ``Listener``."""
        if self.is_active:
            self._recorder.waits(EP, dynamic=True)

    def communicates(self, *_: Any, **__: Any) -> None:
        """Do nothing: a profile does not need the results of collectives. See ``Listener``."""

    def completed(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing: a profile does not need the results of collectives. See ``Listener``."""


class _NoMessages:
    """Replacement of ``ft.systems.dmr.runtime.messages.Messages`` that computes no digests."""

    def restart(self, microbatches: int) -> None: ...

    def forward_begins(self, chunk: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None: ...

    def forward_ends(self, chunk: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None: ...

    def backward_begins(self, chunk: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None: ...

    def backward_ends(self, chunk: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None: ...
