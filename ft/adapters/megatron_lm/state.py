"""The state of the adapter in one process that runs a checkout: the objects of the trainer, the current step, its log.

Each step is logged as one line of ``metrics.jsonl`` in the folder of the run. The losses that the trainer sums up for
its next log line are part of the position that a recovery restores, so that the log line after a recovery has the
numbers of a run without a fault. They are encoded as JSON values without a loss of precision."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ft.adapters.megatron_lm.iterators import Iterators
from ft.base.errors import FtError
from ft.protection.stack import Protections, Stack
from ft.record.metrics import MetricsFile
from ft.worker.session import Session

if TYPE_CHECKING:
    from ft.adapters.megatron_lm.step import Received


class StepLog:
    """Collects the values of a step, and writes them when the step is committed.

    Args:
        path: the metrics file; None on ranks that do not write it.
        first_step: number of steps that are done already; lines of later steps in an existing file are removed.
    """

    def __init__(self, path: Path | None, first_step: int):
        self._file = None if path is None else MetricsFile(path, first_step)
        self._figures: dict[str, Any] = {}
        self._since = time.perf_counter()

    @property
    def writes(self) -> bool:
        """Return whether this rank writes the metrics file."""
        return self._file is not None

    def add(self, **figures: Any) -> None:
        """Add values of the current step. Values that are None are left out."""
        self._figures |= {name: value for name, value in figures.items() if value is not None}

    def commit(self, step: int, tokens: int) -> None:
        """Write the line of ``step``, which has used ``tokens`` tokens."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        figures, self._figures = self._figures, {}
        if self._file is not None:
            speed = {"step_time_s": seconds, "tokens_per_s": tokens / seconds}
            self._file.write({"step": step, **figures, **speed, "wall": round(time.time(), 3)})

    def rewind(self, step: int) -> None:
        """Go back to ``step``, from which training is repeated."""
        self._figures, self._since = {}, time.perf_counter()
        if self._file is not None:
            self._file.rewind(step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def encode(sums: dict[str, Any]) -> dict[str, Any]:
    """Return the sums (``total_loss_dict``) as JSON values: numbers as they are, tensors as [dtype, shape, values]."""
    return {name: _encode(value) for name, value in sums.items()}


def decode(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Decode the result of :func:`encode`; return the sums with their tensors on ``device``."""
    return {name: _decode(value, device) for name, value in values.items()}


def _encode(value: Any) -> Any:
    if not torch.is_tensor(value):
        return value
    kept = value.detach().to("cpu", torch.float64)  # exact for the types that losses have
    return [str(value.dtype).removeprefix("torch."), list(value.shape), kept.reshape(-1).tolist()]


def _decode(value: Any, device: torch.device) -> Any:
    if not isinstance(value, list):
        return value
    kind, shape, numbers = value
    return torch.tensor(numbers, dtype=torch.float64).to(getattr(torch, kind)).reshape(shape).to(device)


class LayerExit(FtError):
    """A layer ends this process. The trainer's own SystemExit means that the run ends after a committed step."""

    def __init__(self, code: Any):
        super().__init__(f"this process ends: {code}")
        self.code = code


class EnterLoopAgain(FtError):
    """The position was set while the trainer's loop runs, so the loop has to be entered again, at this position."""


@dataclass
class CheckoutRun:
    """The state of one process that runs a checkout.

    Attributes:
        protections: the systems that protect the run.
        arguments: the checkout's command line, the same on all workers.
        provider: the script's function that builds the data sets.
        forward_step: the script's function that runs the forward pass of a microbatch.
        loss_name: name of the loss that the script reports.
        stack: the layers of the protections; None before model and data are built.
        log: writer of the values that are logged for each step.
        args: the checkout's own arguments, which also hold its counters.
        chunks: wrapped model chunks.
        checkpointing_context: data that the checkout carries over from one save to the next.
        step: number of committed steps.
        first_step: number of steps done before this job started.
        flops: floating-point operations of the committed steps, as the checkout counts them.
        samples: samples consumed by the committed steps.
        earlier_samples: samples consumed before the last committed step; they determine the batch size of that step
            during a ramp-up.
        reports_memory: whether the checkout's log still reports memory.
        sums: sums since the last log line, as :func:`ft.adapters.megatron_lm.state.encode` returns them.
        counts: the trainer's counts after the committed steps that go on from one step to the next, encoded likewise.
        live_sums: the dict in which the checkout keeps these sums.
        is_entered: whether the trainer's loop has logged a step since the loop was last entered.
        running_timers: inside a step, (time of the start, seconds before it) of each timer that was running at the
            beginning of the step; None outside.
        is_moved: whether the position was set, outside of a step, since the trainer's loop was last entered.
        computes: in a step, whether this world computes it, and does not take its result from others; None between
            steps.
        received: in a step that this world does not compute, what it has received from others.
        checks_loss: whether each step's loss is checked after the layers, and not by the trainer.
        is_ended: whether a layer ends the run after the current step.
        exit_code: exit code with which the run ends after the committed step; None while the run continues.
        extra: JSON values of the layers, which are stored with the position.
    """

    protections: Protections
    arguments: str = ""
    session: Session | None = None
    provider: Any = None
    forward_step: Any = None
    loss_name: str = "lm loss"
    iterators: Iterators | None = None
    stack: Stack | None = None
    log: StepLog | None = None
    args: Any = None
    chunks: list = field(default_factory=list)
    optimizer: Any = None
    scheduler: Any = None
    checkpointing_context: dict = field(default_factory=dict)
    step: int = 0
    first_step: int = 0
    flops: float = 0.0
    samples: int = 0
    earlier_samples: int = 0
    reports_memory: bool = True
    sums: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    live_sums: dict[str, Any] | None = None
    is_entered: bool = False
    running_timers: dict[str, tuple[float, float]] | None = None
    is_moved: bool = False
    computes: bool | None = None
    received: "Received | None" = None
    checks_loss: bool = False
    is_ended: bool = False
    exit_code: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """Return the model's configuration."""
        from megatron.core.utils import get_model_config

        return get_model_config(self.chunks[0])

    @property
    def device(self) -> torch.device:
        """Return the device of this rank's tensors."""
        return next(self.chunks[0].parameters()).device
