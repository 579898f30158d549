"""Flags of saving checkpoints and resuming from them."""

from dataclasses import dataclass
from typing import Literal

from ft.base.errors import UserError
from megatron.ft_trainer.arguments.schema import flag

AUTO: Literal["auto"] = "auto"
"""Value of ``save_interval`` until the plan of the run is known."""


def _steps_or_auto(word: str) -> int | Literal["auto"]:
    return AUTO if word == AUTO else int(word)


@dataclass
class CheckpointOptions:
    """checkpointing"""

    save: str | None = None
    """Folder in which checkpoints are written."""

    save_interval: int | Literal["auto"] | None = flag(
        None, on=["--save-interval", "--persistent-save-interval"], parse=_steps_or_auto
    )
    """Steps between checkpoints; auto: as the plan of a SPARe run says (ft run --ft-spare-plan)."""

    keep_last: int | None = None
    """Complete checkpoints to keep; older ones are removed after a newer one is complete. Default: keep all."""

    load: str | None = None
    """Folder to resume from: the newest complete checkpoint that verifies, or --ckpt-step."""

    ckpt_step: int | None = None
    """Load the checkpoint of this step and no other."""

    exit_on_missing_checkpoint: bool = False
    """Stop if --load holds no checkpoint, rather than starting from random weights."""

    finetune: bool = False
    """Load the weights only and start at step 0."""

    async_save: bool = False
    """Write checkpoints from a forked process while training goes on."""

    dist_ckpt_optim_fully_reshardable: bool = flag(
        True, on="--dist-ckpt-optim-fully-reshardable", off="--no-dist-ckpt-optim-fully-reshardable"
    )
    """Store the distributed optimizer so that it loads into any TP x PP x DP (off: only DP may change, but saving is
    faster)."""

    def __post_init__(self):
        if self.save_interval not in (None, AUTO) and self.save_interval < 1:
            raise UserError(f"--save-interval is {self.save_interval}", "give at least 1")
        if self.keep_last is not None and self.keep_last < 1:
            raise UserError(f"--keep-last is {self.keep_last}", "keep at least 1 checkpoint")
        if self.ckpt_step is not None and self.load is None:
            raise UserError("--ckpt-step was given without --load", "add --load FOLDER")
