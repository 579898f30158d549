"""Flags of batch sizes, the length of the run, the conditions that end it, and evaluation."""

import signal
from dataclasses import dataclass
from typing import Literal

from ft.base.errors import UserError
from megatron.ft_trainer.arguments.schema import flag


@dataclass
class TrainingOptions:
    """training"""

    micro_batch_size: int | None = None
    """Samples in one forward on one data-parallel rank."""

    global_batch_size: int | None = None
    """Samples in a step over all data-parallel ranks. Default: micro batch x DP."""

    rampup_batch_size: list[int] | None = flag(None, on="--rampup-batch-size")
    """START INCREMENT SAMPLES: grow the global batch from START in steps of INCREMENT over SAMPLES samples."""

    train_iters: int | None = None
    """Steps to train for."""

    train_samples: int | None = None
    """Samples to train for, instead of --train-iters."""

    exit_interval: int | None = None
    """Save and stop at the first step that this divides."""

    exit_duration_in_mins: float | None = None
    """Save and stop after this many minutes."""

    exit_signal_handler: bool = flag(True, on="--exit-signal-handler", off="--no-exit-signal-handler")
    """Let --exit-signal end the run at the end of a step, with a checkpoint."""

    exit_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    """The signal that does so; a second one ends the process at once."""

    seed: int = 1234
    """Seed of weights, data order and dropout."""

    data_parallel_random_init: bool = False
    """Draw different weights on every data-parallel rank (they are made equal by the first broadcast)."""

    check_for_nan_in_loss_and_grad: bool = True
    """Look for NaN and infinity in loss and gradients."""

    def __post_init__(self):
        for name in ("micro_batch_size", "global_batch_size", "train_iters", "train_samples", "exit_interval"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}", "give at least 1")
        if self.train_iters and self.train_samples:
            raise UserError("--train-iters and --train-samples were both given", "give one of them")
        if self.rampup_batch_size is not None and len(self.rampup_batch_size) != 3:
            raise UserError(
                f"--rampup-batch-size got {len(self.rampup_batch_size)} numbers", "give START INCREMENT SAMPLES"
            )
        if self.rampup_batch_size is not None and self.train_iters:
            raise UserError(
                "--rampup-batch-size counts in samples, --train-iters in steps", "use --train-samples instead"
            )

    @property
    def exit_signum(self) -> signal.Signals:
        return signal.Signals[self.exit_signal]


@dataclass
class EvaluationOptions:
    """validation"""

    eval_iters: int = 100
    """Batches in one evaluation; 0: none."""

    eval_interval: int | None = None
    """Steps between evaluations. Default: only at the end."""

    eval_global_batch_size: int | None = None
    """Samples in a batch of an evaluation. Default: --global-batch-size."""

    skip_train: bool = False
    """Evaluate the loaded model and stop."""

    def __post_init__(self):
        if self.eval_iters < 0:
            raise UserError(f"--eval-iters is {self.eval_iters}", "give 0 or more")
        if self.eval_interval is not None and self.eval_interval < 1:
            raise UserError(f"--eval-interval is {self.eval_interval}", "give at least 1")
