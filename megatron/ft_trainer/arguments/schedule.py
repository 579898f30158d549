"""Flags of the schedules of learning rate and weight decay."""

from dataclasses import dataclass
from typing import Literal

from ft.base.errors import UserError
from megatron.ft_trainer.arguments.schema import flag


@dataclass
class ScheduleOptions:
    """learning rate and weight decay"""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay."""

    lr_decay_iters: int | None = None
    """Steps of decay. Default: --train-iters."""

    lr_decay_samples: int | None = None
    """Samples of decay, with --train-samples."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the annealing of WSD."""

    lr_wsd_decay_iters: int | None = None
    """Steps of that annealing."""

    lr_wsd_decay_samples: int | None = None
    """Samples of that annealing."""

    lr_warmup_fraction: float | None = None
    """Share of the decay length spent warming up."""

    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""

    lr_warmup_samples: int = 0
    """Samples of linear warm-up, with --train-samples."""

    lr_warmup_init: float = 0.0
    """Learning rate the warm-up starts from."""

    start_weight_decay: float | None = None
    """Weight decay at the start. Default: --weight-decay."""

    end_weight_decay: float | None = None
    """Weight decay at the end. Default: --weight-decay."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the way between them."""

    override_opt_param_scheduler: bool = flag(
        False, on=["--override-opt-param-scheduler", "--override-opt_param-scheduler"]
    )
    """On resuming take the schedule from the flags, not from the checkpoint."""

    use_checkpoint_opt_param_scheduler: bool = flag(
        False, on=["--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"]
    )
    """On resuming take the schedule from the checkpoint, whatever the flags say."""

    def __post_init__(self):
        if self.lr_warmup_fraction is not None:
            if self.lr_warmup_iters or self.lr_warmup_samples:
                raise UserError("the warm-up was given twice, as fraction and as length", "give one of them")
            if not 0 <= self.lr_warmup_fraction < 1:
                raise UserError(f"--lr-warmup-fraction is {self.lr_warmup_fraction}", "give a share in [0, 1)")
        if self.weight_decay_incr_style == "constant" and (
            self.start_weight_decay is not None or self.end_weight_decay is not None
        ):
            raise UserError(
                "--start-weight-decay / --end-weight-decay have no meaning with a constant weight decay",
                "add --weight-decay-incr-style linear or cosine",
            )
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise UserError(
                "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other",
                "give one of them",
            )
        if self.lr_decay_style == "WSD" and not (self.lr_wsd_decay_iters or self.lr_wsd_decay_samples):
            raise UserError("--lr-decay-style WSD needs the length of its annealing", "add --lr-wsd-decay-iters N")
