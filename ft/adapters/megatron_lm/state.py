"""The state of the adapter in one process that runs a checkout: the trainer's objects, and the current step."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ft.adapters.megatron_lm.iterators import Iterators
from ft.adapters.megatron_lm.log import Log
from ft.base.errors import FtError
from ft.protection.stack import Protections, Stack
from ft.worker.session import Session

if TYPE_CHECKING:
    from ft.adapters.megatron_lm.passes import Received


class LayerExit(FtError):
    """A layer ends this process. The trainer's own SystemExit means that the run ends after a committed step."""

    def __init__(self, code: Any):
        super().__init__(f"this process ends: {code}")
        self.code = code


class EnterLoopAgain(FtError):
    """The position was set while the trainer's loop runs, so the loop has to be entered again, at this position."""


@dataclass
class Run:
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
        sums: sums since the last log line, as :func:`ft.adapters.megatron_lm.sums.encode` returns them.
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
    log: Log | None = None
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
