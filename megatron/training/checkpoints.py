"""Saves a job's checkpoints, and loads the checkpoint from which a job resumes."""

import sys
from pathlib import Path

import torch.distributed as dist

from megatron.training import model
from megatron.training.arguments import Options
from megatron.training.arguments.checkpoint import CheckpointOptions
from megatron.training.checkpointing import Checkpointer, TrainState, naming, verify
from megatron.training.job import Job


def save(job: Job, *, blocking: bool = False, persistent: bool = True) -> None:
    """Save a checkpoint.

    Args:
        job: the job.
        blocking: whether to wait until the checkpoint is complete, also with --async-save.
        persistent: False: the checkpoint replaces the last non-persistent one.
    """
    parts = job.trainee.chunks, job.trainee.optimizer, job.trainee.scheduler
    with job.trainee.whole_params():
        job.checkpointer.save(job.state, *parts, persistent=persistent)
    job.checkpointer.maybe_finalize(blocking=blocking)


def load(checkpointer: Checkpointer, options: Options, trainee: model.Trainee, state: TrainState) -> bool:
    """Load the checkpoint to resume from into ``trainee`` and ``state``; return whether there is one."""
    loaded = checkpointer.load(state, trainee.chunks, trainee.optimizer, trainee.scheduler, options.training.seed)
    if loaded is not None:
        say(f"loaded {loaded.path} in {loaded.seconds:.1f} s; going on after step {state.step}")
    return loaded is not None


def resume_own_checkpoints(options: CheckpointOptions) -> None:
    """Make the run load its own newest checkpoint from now on, if it has one, instead of that of its first start."""
    folder = Path(options.save) if options.save else None
    if folder is not None and folder.is_dir() and naming.newest_complete(verify.scan_all(options, folder)) is not None:
        options.load, options.ckpt_step = options.save, None
        options.finetune = options.no_load_optim = options.no_load_rng = False


def say(text: str, *, over_bar: bool = False) -> None:
    """Print ``text`` on rank 0. ``over_bar``: overwrite the line of the last rank's progress bar."""
    if dist.get_rank() == 0:
        clear = "\r\033[K" if over_bar and sys.stdout.isatty() else ""
        print(clear + text, flush=True)
