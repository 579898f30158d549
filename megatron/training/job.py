"""What a run consists of on one rank."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft.protection.unprotected import Unprotected
from megatron.core.timers import Timers
from megatron.training.arguments import Layout, Options
from megatron.training.checkpointing import Checkpointer, TrainState
from megatron.training.exits import Exits
from megatron.training.loaders import Loaders
from megatron.training.logging.runlog import RunLog
from megatron.training.model import Trainee

if TYPE_CHECKING:
    from ft.systems.dmr.profile.session import Profiling
    from ft.systems.dmr.runtime.protection import Protection


@dataclass
class Job:
    """Everything the loop works with. Loaders are None where there is nothing to train, validate or test on.

    Attributes:
        ending: why the run ends after the step it stands at, None while it goes on.
        guard: what carries the run through faults (``ft.systems.hot_swap.recovery_manager.RecoveryManager``).
        dmr: what has every operator executed twice, or profiled; None where nobody asked for it.
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
    guard: Unprotected = field(default_factory=Unprotected)
    dmr: "Protection | Profiling | None" = None

    def microbatches(self, samples: int) -> int:
        """Forwards per data-parallel rank that ``samples`` samples take."""
        return samples // (self.options.training.micro_batch_size * self.layout.dp)
