"""Flags of batch sizes, the length of the run, the conditions that end it, and evaluation."""

import itertools
import signal
from dataclasses import dataclass
from typing import Literal

from ft.base.errors import UserError
from megatron.ft_trainer.arguments.schema import flag

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def read_schedule(text: str, seq_length: int) -> list[tuple[int, int]]:
    """Return (number of samples from which the entry is valid, global batch size) of each --step-batch-size-schedule
    entry.

    Args:
        text: THRESHOLD:SIZE entries, separated by blanks or commas; a threshold counts tokens or, with the suffix s,
            samples.
        seq_length: tokens in a sample.

    Raises:
        UserError: the schedule cannot be parsed, or its thresholds do not increase from 0.
    """
    found = []
    for entry in text.replace(",", " ").split():
        threshold, _, size = entry.partition(":")
        try:
            if threshold.endswith("s"):
                at = int(threshold[:-1])
            else:
                unit = _UNITS.get(threshold[-1:].upper(), 1)
                at = int(float(threshold.rstrip("KMBTkmbt")) * unit) // seq_length
            found.append((at, int(size)))
        except ValueError as error:
            problem = f"--step-batch-size-schedule {text!r}: {entry!r} is no THRESHOLD:SIZE"
            raise UserError(problem, "write 0:384 200B:768") from error
    increases = all(one[0] < other[0] for one, other in itertools.pairwise(found))
    if not found or found[0][0] != 0 or not increases or min(size for _, size in found) < 1:
        raise UserError(f"--step-batch-size-schedule {text!r} does not increase from 0", "write 0:384 200B:768")
    return found


@dataclass
class TrainingOptions:
    """training"""

    micro_batch_size: int | None = None
    """Samples in one forward on one data-parallel rank."""

    global_batch_size: int | None = None
    """Samples in a step over all data-parallel ranks. Default: micro batch x DP."""

    rampup_batch_size: list[int] | None = flag(None, on="--rampup-batch-size")
    """START INCREMENT SAMPLES: grow the global batch from START in steps of INCREMENT over SAMPLES samples."""

    step_batch_size_schedule: str | None = None
    """THRESHOLD:SIZE ...: the global batch from each threshold on, in tokens (K, M, B, T: thousands to trillions)."""

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

    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Steps between comparisons of the weights of all data-parallel ranks; a difference ends the run."""

    empty_unused_memory_level: Literal[0, 1, 2] = 0
    """Return unused GPU memory to the driver: 1: before the optimizer step, 2: and after it."""

    enable_experimental: bool = False
    """Allow what megatron-core calls experimental."""

    manual_gc: bool = False
    """Collect Python garbage at fixed steps on all ranks together, instead of whenever each likes."""

    manual_gc_interval: int = 0
    """Steps between those collections; 0: only around evaluation."""

    manual_gc_eval: bool = True
    """Collect before and after evaluation."""

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
        if self.step_batch_size_schedule is not None:
            read_schedule(self.step_batch_size_schedule, 1)
            if self.rampup_batch_size is not None:
                problem = "--step-batch-size-schedule and --rampup-batch-size both change the batch"
                raise UserError(problem, "give one of them")
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
