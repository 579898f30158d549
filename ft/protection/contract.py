"""The interface between a trainer and the systems that protect its run against faults.

Before a trainer creates any process group, it creates a :class:`Protection` for each system that the run asks for
(:mod:`ft.protection.table`). It asks these objects what they need while it builds the model and the data. When both
exist, it passes itself to each protection as a :class:`Trainer` and gets a :class:`Layer` back: an object whose methods
are called at fixed points of a training step. :class:`ft.protection.stack.Stack` composes the layers, so that the
trainer calls a single object, whatever systems protect the run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ft.base.errors import RecoverableError
from ft.protection.position import Position
from ft.worker.session import Session

if TYPE_CHECKING:
    from ft.protection.undo import SharedCopy


class StepUndone(RecoverableError):
    """A layer has restored the state from before the step, and other worlds have this world's gradients already.

    This world must not run the step again by itself; a layer that divides steps among worlds decides what follows.
    """


class Update(Protocol):
    """The outcome of a training step.

    Attributes:
        loss: mean loss over the tokens of the step; NaN on all pipeline stages but the last.
        grad_norm: 2-norm of all gradients before clipping, the same on every rank; None where it is not computed.
        applied: whether the optimizer has changed the parameters. A layer may set it to False: then the step counts and
            its samples are used up, but the parameters are those from before the step.
    """

    loss: float
    grad_norm: float | None
    applied: bool


class SampleOrder(Protocol):
    """The order in which all samples of a dataset, or a part of them, are read."""

    def index(self, position: int) -> int:
        """Return the dataset index of sample number ``position`` of the stream."""

    def within(self, length: int) -> int:
        """Return how many of the samples of a dataset of ``length`` samples are in the stream."""


class DataShare(Protocol):
    """The part of the training data that the ranks of this world read.

    Attributes:
        stream: the samples of the part, in order.
        position: number of the sample in the stream to start with.
    """

    stream: SampleOrder
    position: int

    def needed(self, steps: int, batch: int) -> int:
        """Return how many samples the dataset needs for ``steps`` steps of ``batch`` samples each."""


class Trainer(Protocol):
    """What a trainer offers to layers: the state to protect, and operations on the run.

    Attributes:
        chunks: ``DistributedDataParallel`` model chunks of this rank.
        position: all other state that changes from step to step.
        loaders: training data loaders, one for each model chunk; None for chunks that read no tokens.
        extra: JSON values that are stored with the position and in checkpoints; layers add keys of their own.
        step: number of committed steps.
        samples: number of training samples that the committed steps have used, over all data-parallel ranks.
        steps: number of committed steps at which the run ends.
        batch: global batch size in samples, at the end of a batch-size ramp.
        batch_now: global batch size of the next step, in samples.
        draws_apart: whether data-parallel ranks draw different random numbers (``--data-parallel-random-init``).
        clip_grad: upper bound of the gradient norm; 0: no clipping.
        save_interval: steps between two checkpoints; None: at most the last step's checkpoint is written.
        saves: whether the run writes checkpoints at all.
    """

    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any
    position: Position
    loaders: Sequence[Any]
    extra: dict[str, Any]
    step: int
    samples: int
    steps: int
    batch: int
    batch_now: int
    seed: int
    draws_apart: bool
    clip_grad: float
    save_interval: int | None
    saves: bool

    def microbatches(self, samples: int) -> int:
        """Return how many forward passes (microbatches) this rank runs for ``samples`` samples."""

    def fingerprint(self) -> dict[str, str | int]:
        """Return the settings that decide which operators the run executes, by name; equal for equal runs."""

    def reseed(self, step: int) -> None:
        """Seed this rank's random number generators for its position in the parallel grid and for ``step``."""

    def rehearse(self, samples: int) -> None:
        """Run forward and backward on ``samples`` samples and discard the results."""

    def skip(self, samples: int) -> None:
        """Skip the next ``samples`` training samples, counted over all data-parallel ranks."""

    def newest_checkpoint(self) -> Path | None:
        """Return the folder of the newest complete checkpoint of the run; None if there is none."""

    def is_saved(self, step: int) -> bool:
        """Return whether this rank can see a complete checkpoint of ``step``."""

    def load(self) -> bool:
        """Load the newest checkpoint, if there is one; return whether one was loaded. All ranks have to call it.

        A checkpoint that gives only a part of the state (finetuning) is not loaded after the first step.
        """

    def save(self) -> None:
        """Save a checkpoint and return when it is complete. All ranks have to call it."""

    def rewind(self) -> None:
        """Drop what was logged for steps after the committed step."""

    def end(self, reason: str) -> None:
        """End the run after the current step. Called on all ranks."""


class Layer:
    """One protection around a training loop. The trainer calls each method at a fixed point; the defaults do nothing.

    The order of the calls: ``run_with_recovery`` once; inside it for each step ``begins``, ``compute`` (around forward,
    backward and update: ``share``, ``reduce``, ``update``), if due ``at("evaluate")``, ``saves`` and ``at("save")``,
    and finally ``committed``.

    Attributes:
        verifies: the layer verifies what this world computes, so no gradient may leave this world before ``verify``.
    """

    verifies = False

    def gets_copy(self, copy: "SharedCopy") -> None:
        """Take note of a copy of the training state that an outer layer makes of every committed step."""

    def run_with_recovery(self, work: Callable[[], Any]) -> Any:
        """Run the training loop and return its result.

        ``work`` continues from the current position, so a layer that has restored a state calls ``work`` again.
        """
        return work()

    def begins(self) -> bool:
        """Start a step. Return False if this rank takes the result of the step from other ranks.

        In that case the trainer calls ``catching_up``, exchanges zero gradients, calls ``caught_up`` and runs the
        optimizer update.
        """
        return True

    def catching_up(self) -> None:
        """Start to fetch the training state from other replicas, while zero gradients are exchanged."""

    def caught_up(self) -> None:
        """Install the fetched state, after the exchange of zero gradients and before the update."""

    def compute(self, work: Callable[[], Update]) -> Update:
        """Run ``work``, one whole step including its update, and return its outcome.

        A layer may restore the state from before the step and run ``work`` again.
        """
        return work()

    def metrics(self) -> dict[str, float]:
        """Return figures of the last step for the metrics file, by name, the same on every rank."""
        return {}

    def share(self, samples: int) -> int:
        """Return how many of the step's ``samples`` the ranks of this world compute."""
        return samples

    def reduce(self, reported: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the step's [loss sum, number of tokens] tensors, summed over all that have computed a part of it."""
        return reported

    def verify(self) -> None:
        """Verify what this world has computed in the step so far. Called before its gradients go to other worlds.

        All ranks of the world have to call it.

        Raises:
            FtError: something was computed wrongly. ``compute`` of the same layer handles the error: it restores the
                state from before the step and runs the step again.
        """

    def digest(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a digest of ``tensors`` as int64 [2], equal in all worlds whose tensors are equal bit for bit.

        Called only if the layer ``verifies``.
        """
        raise NotImplementedError

    def update(self, step: Callable[[], Any]) -> Any:
        """Run the optimizer's ``step`` when all gradients are ready, and return its result.

        No state has changed before this call. The layers are called from the innermost outwards: the outermost layer
        wraps the optimizer.
        """
        return step()

    def saves(self, step: int, *, is_due: bool, ends: bool) -> bool:
        """Return whether this rank takes part in the checkpoint of ``step``. ``ends``: it is the run's last step."""
        return is_due

    def at(self, phase: str) -> None:
        """Handle work of the trainer outside of steps. ``phase``: "evaluate" or "save"."""

    def committed(self) -> None:
        """Handle the end of a step, when the position counts it and all work that belongs to it is done."""


@dataclass(frozen=True)
class Asked:
    """The options that a run was started with.

    Attributes:
        flags: an object with an attribute for each flag, such as ``ft_hot_swap`` for ``--ft-hot-swap``.
        environment: the environment variables of the process, as ``ft run`` has set them.
    """

    flags: Any
    environment: Mapping[str, str]


class Protection:
    """What one system does for a run, from its start to the first step. Created before any process group exists.

    Attributes:
        features: patches of megatron-core that the system needs (``megatron.patches.manifest``).
        joins_run: the process is a worker of ``ft run``, which assigns its logical rank.
        intercepts_operators: the system intercepts every operator through torch's dispatcher, and itself handles NaN
            and other wrong values.
        is_given_state: this rank receives its state from others and loads nothing. Set once a session exists.
        draws_weights: the model's weights are initialized randomly although the state is given.
        divides_steps: other worlds compute parts of every step, so this world must not repeat a part by itself.
    """

    features: frozenset[str] = frozenset()
    joins_run = False
    intercepts_operators = False
    is_given_state = False
    draws_weights = False
    divides_steps = False

    def __init__(self, asked: Asked):
        self.asked = asked

    def connected(self, session: Session | None) -> None:
        """Handle the creation of the process groups. ``session``: this worker's place in ``ft run``, None outside."""

    def share(self, extra: dict[str, Any], step: int, samples: int, block: int) -> DataShare | None:
        """Return the part of the training data that the ranks of this world read; None: all of it.

        Args:
            extra: as in :class:`Trainer`, after a checkpoint was loaded, if there is one.
            step: as in :class:`Trainer`.
            samples: as in :class:`Trainer`.
            block: samples that all data-parallel ranks together take in one microbatch.
        """
        return None

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        """Return the system's layer, once model and data exist. ``inner``: the layers inside it, outermost first."""
        raise NotImplementedError


class StreamView(torch.utils.data.Dataset[Any]):
    """The samples of ``base`` that belong to ``stream``, in the order of the stream."""

    def __init__(self, base: Any, stream: SampleOrder):
        self.base, self.stream = base, stream

    def follow(self, stream: SampleOrder) -> None:
        """Switch to another stream.

        Call ``seek`` on the data loaders afterwards, because they have prefetched samples of the old stream.
        """
        self.stream = stream

    def __len__(self) -> int:
        return self.stream.within(len(self.base))

    def __getitem__(self, position: int) -> Any:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of the {len(self)} of {self.stream}")
        return self.base[self.stream.index(position)]
