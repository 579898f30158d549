"""Profiles some steps of a run, and records its use of GPU memory."""

import contextlib
from typing import Any

import torch

from megatron.ft_trainer.arguments.logging import LoggingOptions


class Profiler:
    """Profiles the steps from --profile-step-start to --profile-step-end, on the ranks in --profile-ranks.

    With --use-pytorch-profiler it writes a trace for TensorBoard; otherwise it marks the steps for Nsight Systems
    (``nsys profile --capture-range=cudaProfilerApi``).

    Args:
        options: logging flags.
        rank: this process's rank.
    """

    def __init__(self, options: LoggingOptions, rank: int):
        self._options = options
        self._is_on = options.profile and rank in options.profile_ranks
        self._running = contextlib.ExitStack()
        self._records = options.record_memory_history and rank in options.profile_ranks
        if self._records:
            torch.cuda.memory._record_memory_history()

    def before(self, step: int) -> None:
        """Begin to profile if ``step``, which is about to begin, is the first step that is to be profiled."""
        if self._is_on and step == self._options.profile_step_start:
            self._running.enter_context(self._started())

    def after(self, step: int) -> None:
        """End the profile if ``step``, which has ended, is the last step that is to be profiled."""
        if self._is_on and step == self._options.profile_step_end - 1:
            self._running.close()
        if self._records and step % self._options.log_interval == 0:
            torch.cuda.memory._dump_snapshot(self._options.memory_snapshot_path)

    def _started(self) -> Any:
        if not self._options.use_pytorch_profiler:
            return torch.cuda.profiler.profile()
        write = torch.profiler.tensorboard_trace_handler(str(self._options.tensorboard_dir))
        return torch.profiler.profile(on_trace_ready=write, record_shapes=True)
