"""Flags of logging: which values a run prints, and which files it writes."""

from dataclasses import dataclass

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

    tensorboard_dir: str | None = None
    """Folder for TensorBoard's event files."""

    tensorboard_log_interval: int = 1
    """Steps between TensorBoard points."""

    logging_level: int | None = flag(None, on="--logging-level")
    """Level of Python's logging for megatron-core (10 debug ... 40 error). Default: errors only."""

    wandb_project: str | None = None
    """Project of Weights & Biases that gets the run's figures."""

    wandb_exp_name: str | None = None
    """The run's name there."""

    def __post_init__(self):
        for name in ("log_interval", "tensorboard_log_interval"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}", "give at least 1")
        if self.wandb_project and not self.wandb_exp_name:
            raise UserError("--wandb-project needs a name of the run", "add --wandb-exp-name NAME")
