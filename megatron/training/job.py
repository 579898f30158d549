"""What a run consists of on one rank."""

from dataclasses import dataclass, field

from ft.protection.stack import Stack
from megatron.core.timers import Timers
from megatron.training.arguments import Layout, Options
from megatron.training.checkpointing import Checkpointer, TrainState
from megatron.training.exits import Exits
from megatron.training.loaders import Loaders
from megatron.training.logging.runlog import RunLog
from megatron.training.model import Trainee


@dataclass
class Job:
    """Everything the loop works with. Loaders are None where there is nothing to train, validate or test on.

    Attributes:
        ending: why the run ends after the step it stands at, None while it goes on.
        protection: what the run was asked to be protected by, layer by layer.
        verified: a layer finds wrong numbers, so losses and gradients that are not finite are its business first.
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
    timers: Timers | None = None
    ending: str | None = None
    protection: Stack = field(default_factory=Stack)
    verified: bool = False

    def microbatches(self, samples: int) -> int:
        """Forwards per data-parallel rank that ``samples`` samples take."""
        return samples // (self.options.training.micro_batch_size * self.layout.dp)
