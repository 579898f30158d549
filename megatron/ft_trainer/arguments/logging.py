"""Flags of logging: which values a run prints, and which files it writes."""

from dataclasses import dataclass
from typing import Literal

from ft.base.errors import UserError
from megatron.ft_trainer.arguments.schema import flag


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

    wandb_project: str | None = None
    """Project of Weights & Biases that gets the run's figures."""

    wandb_exp_name: str | None = None
    """The run's name there."""

    wandb_entity: str | None = None
    """The project's owner there."""

    wandb_save_dir: str | None = None
    """Folder for its local files. Default: wandb."""

    profile: bool = False
    """Profile some steps: with --use-pytorch-profiler a trace in --tensorboard-dir, else for Nsight Systems."""

    use_pytorch_profiler: bool = False
    """Profile with torch's profiler."""

    profile_step_start: int = 10
    """First step that is profiled."""

    profile_step_end: int = 12
    """First step that is no longer profiled."""

    profile_ranks: list[int] = flag([0], on="--profile-ranks")
    """Ranks that profile."""

    record_memory_history: bool = False
    """Record GPU memory, and write it to --memory-snapshot-path at every log line."""

    memory_snapshot_path: str = "snapshot.pickle"
    """File of --record-memory-history."""

    def __post_init__(self):
        for name in ("log_interval", "tensorboard_log_interval"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}", "give at least 1")
        if self.profile and not 0 < self.profile_step_start < self.profile_step_end:
            raise UserError(
                f"--profile-step-start {self.profile_step_start} --profile-step-end {self.profile_step_end}",
                "give an end behind the start",
            )
        if self.profile and self.use_pytorch_profiler and not self.tensorboard_dir:
            raise UserError("--use-pytorch-profiler needs a folder for its trace", "add --tensorboard-dir FOLDER")
        if self.wandb_project and not self.wandb_exp_name:
            raise UserError("--wandb-project needs a name of the run", "add --wandb-exp-name NAME")
