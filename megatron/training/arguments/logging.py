"""Flags: what a run writes and shows."""

from dataclasses import dataclass
from typing import Literal

from ft.base.errors import UserError
from megatron.training.arguments.schema import flag


@dataclass
class LoggingOptions:
    """logging"""

    log_interval: int = 100
    """Steps between lines on the terminal."""

    progress_bar: bool = False
    """Show a progress bar with loss and tokens/s instead of a line every --log-interval steps."""

    metrics_file: str | None = None
    """Append one JSON object per step: step, loss, grad_norm, lr, consumed_samples, step_time_s, tokens_per_s, ..."""

    log_params_norm: bool = False
    """Log the norm of the parameters."""

    log_num_zeros_in_grad: bool = False
    """Log how many gradient entries are zero."""

    timing_log_level: int = 0
    """0: no timers; 1: phases of a step; 2: also what happens inside them."""

    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """Which ranks' timings are shown: the slowest, the fastest and the slowest, or all."""

    tensorboard_dir: str | None = None
    """Folder for TensorBoard's event files."""

    tensorboard_log_interval: int = 1
    """Steps between TensorBoard points."""

    tensorboard_queue_size: int = 1000
    """TensorBoard's event queue."""

    log_loss_scale_to_tensorboard: bool = True
    """Write the loss scale to TensorBoard."""

    log_validation_ppl_to_tensorboard: bool = False
    """Write validation perplexity to TensorBoard."""

    log_world_size_to_tensorboard: bool = False
    """Write the world size to TensorBoard."""

    log_memory_to_tensorboard: bool = False
    """Write memory use to TensorBoard."""

    logging_level: int | None = flag(None, on="--logging-level")
    """Level of Python's logging for megatron-core (10 debug ... 40 error). Default: errors only."""

    def __post_init__(self):
        for name in ("log_interval", "tensorboard_log_interval"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}", "give at least 1")
