"""The objects that a run consists of on one rank; saving them, and loading the checkpoint from which it resumes."""

from dataclasses import dataclass, field

import torch.distributed as dist

from ft.protection.stack import Stack
from megatron.ft_trainer import model
from megatron.ft_trainer.arguments import Layout, Options
from megatron.ft_trainer.checkpointing.checkpointer import Checkpointer
from megatron.ft_trainer.checkpointing.content import TrainState
from megatron.ft_trainer.data.loader import Loaders
from megatron.ft_trainer.exits import Exits
from megatron.ft_trainer.initialize import seed_everything
from megatron.ft_trainer.logging.runlog import RunLog
from megatron.ft_trainer.model import Trainee


@dataclass
class Job:
    """Everything the training loop works with. Loaders are None where there is no data to train, validate or test on.

    Attributes:
        ending: reason why the run ends after the current step; None while it continues.
        protection: the layers of the protections that the run requests.
        verified: whether a layer verifies operators; non-finite losses and gradients are then checked after this layer.
    """

    options: Options
    layout: Layout
    trainee: Trainee
    state: TrainState
    train_loaders: Loaders | None
    valid_loaders: Loaders | None
    test_loaders: Loaders | None
    checkpointer: Checkpointer
    log: RunLog
    exits: Exits
    ending: str | None = None
    protection: Stack = field(default_factory=Stack)
    verified: bool = False

    def microbatches(self, samples: int) -> int:
        """Return the number of forward passes on each data-parallel rank for ``samples`` samples."""
        return samples // (self.options.training.micro_batch_size * self.layout.dp)


def save(job: Job) -> None:
    """Save a checkpoint."""
    parts = job.trainee.chunks, job.trainee.optimizer, job.trainee.scheduler
    is_last = job.ending is not None or job.state.step >= job.options.training.train_iters
    with job.trainee.whole_params():
        job.checkpointer.save(job.state, *parts, is_last=is_last)


def load(
    checkpointer: Checkpointer, options: Options, trainee: model.Trainee, state: TrainState, *, is_restart: bool
) -> bool:
    """Load the checkpoint to resume from into ``trainee`` and ``state``; return whether there is one.

    All ranks have to call this. ``is_restart``: this run began earlier; its own newest checkpoint, if it has one, goes
    before that of its first start, from now on.
    """
    asked = options.checkpoint
    if is_restart and checkpointer.has_own():
        asked.load, asked.ckpt_step, asked.finetune = asked.save, None, False
    if state.step > 0 and asked.finetune:
        return False  # it would keep a part of the present state: only a new process begins from such a checkpoint
    parts = trainee.chunks, trainee.optimizer, trainee.scheduler
    loaded = checkpointer.load(state, *parts, lambda step: seed_everything(options, step))
    if loaded is not None:
        say(f"loaded {loaded.path} in {loaded.seconds:.1f} s; going on after step {state.step}")
    return loaded is not None


def say(text: str) -> None:
    """Print ``text`` on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)
