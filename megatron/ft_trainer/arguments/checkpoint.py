"""Flags of saving checkpoints and resuming from them."""

from dataclasses import dataclass
from pathlib import Path
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

    save_retain_interval: int | None = None
    """Keep only the checkpoints of steps that this divides, and the newest one."""

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

    no_save_optim: bool = False
    """Leave the optimizer state out of checkpoints."""

    no_save_rng: bool = False
    """Leave the random number generator states out of checkpoints."""

    no_load_optim: bool = False
    """Do not load the optimizer state."""

    no_load_rng: bool = False
    """Do not load the random number generator states."""

    async_save: bool = False
    """Write checkpoints from a forked process while training goes on."""

    ckpt_format: Literal["torch_dist", "torch", "torch_dcp", "fsdp_dtensor"] = "torch_dist"
    """On-disk format: torch_dist loads into any TP x PP x DP; torch, with a file for each model-parallel rank, into the
    same TP x PP x EP. What is loaded may be in either. The other two are written as torch_dist."""

    non_persistent_ckpt_type: Literal["global", "local"] | None = None
    """Save checkpoints of which only the newest is kept, between those of --save-interval. Only global is supported:
    on a file system that all nodes share."""

    non_persistent_save_interval: int | None = None
    """Steps between non-persistent checkpoints."""

    non_persistent_global_ckpt_dir: str | None = None
    """Folder of the non-persistent checkpoint. Default: non_persistent in the folder of --save or --load."""

    use_checkpoint_args: bool = False
    """Take the shape of the model and the tokenizer from the checkpoint in --load."""

    use_mp_args_from_checkpoint_args: bool = False
    """With --use-checkpoint-args, take the sizes of TP, PP, virtual PP and EP from there, too."""

    ckpt_fully_parallel_save: bool = flag(True, on="--ckpt-fully-parallel-save", off="--no-ckpt-fully-parallel-save")
    """Spread the writing of replicated tensors over the data-parallel ranks."""

    ckpt_fully_parallel_load: bool = False
    """Spread the reading of replicated tensors over the data-parallel ranks, then exchange them."""

    ckpt_assume_constant_structure: bool = False
    """Reuse the save plan of the first checkpoint for the later ones."""

    dist_ckpt_strictness: Literal[
        "assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all", "ignore_all"
    ] = "assume_ok_unexpected"
    """What to do when the checkpoint's keys and the model's differ."""

    dist_ckpt_optim_fully_reshardable: bool = flag(
        True, on="--dist-ckpt-optim-fully-reshardable", off="--no-dist-ckpt-optim-fully-reshardable"
    )
    """Store the distributed optimizer so that it loads into any TP x PP x DP (off: only DP may change, but saving is
    faster)."""

    distrib_optim_fully_reshardable_mem_efficient: bool = False
    """Gather the optimizer state of a data-parallel group on its first rank only, which then writes it all."""

    def __post_init__(self):
        if self.save_interval not in (None, AUTO) and self.save_interval < 1:
            raise UserError(f"--save-interval is {self.save_interval}", "give at least 1")
        if self.keep_last is not None and self.keep_last < 1:
            raise UserError(f"--keep-last is {self.keep_last}", "keep at least 1 checkpoint")
        kept = self.save_retain_interval
        if kept is not None and kept < 1:
            raise UserError(f"--save-retain-interval is {kept}", "give at least 1")
        if kept is not None and self.keep_last is not None:
            raise UserError("--save-retain-interval and --keep-last exclude each other", "give one of them")
        if self.ckpt_step is not None and self.load is None:
            raise UserError("--ckpt-step was given without --load", "add --load FOLDER")
        self._check_non_persistent()

    @property
    def stored_format(self) -> str:
        """Return the format in which checkpoints are written."""
        return "torch" if self.ckpt_format == "torch" else "torch_dist"

    def non_persistent_folder(self, folder: str) -> Path | None:
        """Return the folder of the non-persistent checkpoint that belongs to the persistent ones in ``folder``.

        None: the run has none.
        """
        if self.non_persistent_ckpt_type is None:
            return None
        return Path(self.non_persistent_global_ckpt_dir or f"{folder}/non_persistent")

    def _check_non_persistent(self) -> None:
        kind, interval = self.non_persistent_ckpt_type, self.non_persistent_save_interval
        if kind == "local":
            raise UserError(
                "--non-persistent-ckpt-type local is not supported here",
                "give --ft-hot-swap, which keeps copies of the state in other nodes' memory, or the type global",
            )
        if interval is not None and interval < 1:
            raise UserError(f"--non-persistent-save-interval is {interval}", "give at least 1")
        if interval is not None and kind is None:
            raise UserError(
                "--non-persistent-save-interval without --non-persistent-ckpt-type",
                "add --non-persistent-ckpt-type global",
            )
        if kind is not None and self.ckpt_format == "torch":
            raise UserError("non-persistent checkpoints are in the format torch_dist", "drop --ckpt-format torch")
