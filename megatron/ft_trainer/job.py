"""The objects that a run consists of on one rank."""

from dataclasses import dataclass, field

from ft.protection.stack import Stack
from megatron.ft_trainer.arguments import Layout, Options
from megatron.ft_trainer.checkpointing import Checkpointer, TrainState
from megatron.ft_trainer.exits import Exits
from megatron.ft_trainer.loaders import Loaders
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
    padded_vocab_size: int
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
