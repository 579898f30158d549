"""Saves a job's checkpoints, and loads the checkpoint from which a job resumes."""

import sys

import torch.distributed as dist

from megatron.ft_trainer import model
from megatron.ft_trainer.arguments import Options
from megatron.ft_trainer.arguments.batch import train_steps
from megatron.ft_trainer.checkpointing import Checkpointer, TrainState
from megatron.ft_trainer.job import Job


def save(job: Job, *, blocking: bool = False) -> None:
    """Save a checkpoint.

    Args:
        job: the job.
        blocking: whether to wait until the checkpoint is complete, also with --async-save.
    """
    parts = job.trainee.chunks, job.trainee.optimizer, job.trainee.scheduler
    is_last = job.ending is not None or job.state.step >= train_steps(job.options.training)
    with job.trainee.whole_params():
        job.checkpointer.save(job.state, *parts, is_last=is_last)
    job.checkpointer.maybe_finalize(blocking=blocking)


def load(
    checkpointer: Checkpointer, options: Options, trainee: model.Trainee, state: TrainState, *, is_restart: bool
) -> bool:
    """Load the checkpoint to resume from into ``trainee`` and ``state``; return whether there is one.

    All ranks have to call this.

    Args:
        checkpointer: reads the checkpoint.
        options: flags of the run.
        trainee: receives the model's, the optimizer's and the schedule's state.
        state: receives the position of the run.
        is_restart: whether this run began earlier: its own newest checkpoint, if it has one, goes before that of its
            first start, from now on.
    """
    asked = options.checkpoint
    if is_restart and checkpointer.has_own():
        asked.load, asked.ckpt_step, asked.finetune = asked.save, None, False
    if state.step > 0 and asked.finetune:
        return False  # it would keep a part of the present state: only a new process begins from such a checkpoint
    loaded = checkpointer.load(state, trainee.chunks, trainee.optimizer, trainee.scheduler, options.training.seed)
    if loaded is not None:
        say(f"loaded {loaded.path} in {loaded.seconds:.1f} s; going on after step {state.step}")
    return loaded is not None


def say(text: str, *, over_bar: bool = False) -> None:
    """Print ``text`` on rank 0. ``over_bar``: overwrite the line of the last rank's progress bar."""
    if dist.get_rank() == 0:
        clear = "\r\033[K" if over_bar and sys.stdout.isatty() else ""
        print(clear + text, flush=True)
