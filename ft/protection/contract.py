"""The contract between a trainer and the systems that protect a run.

A trainer builds a :class:`Protection` for each system that was asked for (:mod:`ft.protection.table`), before it makes
any process group. It asks them what they need while it builds model and data. When both exist, it gives itself to them
as a :class:`Trainer` and gets a :class:`Layer` from each: an object that is called at the moments of a training step.
:class:`ft.protection.stack.Stack` composes layers, so that a trainer talks to one object, whatever protects the run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ft.base.errors import Problem
from ft.protection.position import Position
from ft.worker.session import Session


class Update(Protocol):
    """What a training step has come to.

    Attributes:
        loss: the mean over the tokens of the step; NaN on all pipeline stages but the last.
        grad_norm: the 2-norm of all gradients before clipping, the same on every rank; None where it is not computed.
        applied: whether the optimizer has changed the parameters. A layer may set it to False: the step counts, its
            samples are used up, and the parameters are those before it.
    """

    loss: float
    grad_norm: float | None
    applied: bool


class Stream(Protocol):
    """The order in which samples of a dataset are read, in part or whole."""

    def index(self, position: int) -> int:
        """Return the index in the dataset of the stream's sample number ``position``."""

    def within(self, length: int) -> int:
        """Return how many samples of a dataset of ``length`` samples the stream has."""


class DataShare(Protocol):
    """The part of the training data that is read here.

    Attributes:
        stream: its samples, in order. position: number of the sample to begin with.
    """

    stream: Stream
    position: int

    def needed(self, steps: int, batch: int) -> int:
        """Return how many samples the dataset needs for ``steps`` steps of ``batch`` samples each."""


class ModelEnds(Protocol):
    """Which pipeline stages have the embedding and the output layer, where that is not the first and the last alone.

    Attributes:
        embeds, heads: this stage has the embedding, the output layer. is_double: its copy is not the only one.
    """

    embeds: bool
    heads: bool
    is_double: bool

    def built(self, chunk: torch.nn.Module) -> None:
        """Called when this rank's model chunk is built, before it is wrapped for data parallelism. Collective."""

    def connected(self, chunk: torch.nn.Module) -> None:
        """Called when the wrapped chunk has the callbacks of megatron-core's schedules."""


class Trainer(Protocol):
    """What a trainer offers to layers: the state that is protected, and what it can do for them.

    Attributes:
        chunks: ``DistributedDataParallel`` model chunks of this rank. optimizer: megatron-core's.
        scheduler: of the learning rate. position: everything else that changes from step to step.
        loaders: of the training data, one for each model chunk, None for chunks that see no tokens.
        extra: JSON values that are kept with the position and in checkpoints; layers write their own keys into it.
        step: committed steps. samples: training samples that these have taken, of all data-parallel ranks.
        steps: committed steps at the end of the run. batch: samples of a step, at the end of a batch-size ramp.
        batch_now: samples of the next step. seed: of the run. clip_grad: bound of the gradient norm, 0: none.
        save_interval: steps between two checkpoints; None: only the last step's is written, or none.
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
    clip_grad: float
    save_interval: int | None
    saves: bool

    def microbatches(self, samples: int) -> int:
        """Return the number of forward passes on this rank that ``samples`` samples take."""

    def fingerprint(self) -> dict[str, str | int]:
        """Return what decides which operators the run executes, by name; equal for equal runs."""

    def reseed(self, step: int) -> None:
        """Seed the generators of this rank for its place in the grid at ``step``."""

    def rehearse(self, samples: int) -> None:
        """Compute forward and backward of ``samples`` samples; nothing comes of them."""

    def skip(self, samples: int) -> None:
        """Read on after the next ``samples`` training samples, counted over all data-parallel ranks."""

    def newest_checkpoint(self) -> Path | None:
        """Return the folder of the newest complete checkpoint of the run; None where there is none."""

    def is_saved(self, step: int) -> bool:
        """Return whether there is a complete checkpoint of ``step``, as far as can be seen."""

    def load(self) -> bool:
        """Load the newest checkpoint, if there is one; return whether there is. Collective."""

    def save(self) -> None:
        """Save a checkpoint; return when it is complete. Collective."""

    def rewind(self) -> None:
        """Forget what was logged of steps after the committed one."""

    def end(self, reason: str) -> None:
        """End the run after the step under way; called on all ranks alike."""


class Layer:
    """One protection around a training loop. Each method is a moment; those that are not overridden do nothing.

    The order of the moments: ``run_with_recovery`` once; in it for each step ``begins``, ``compute`` (around forward,
    backward and update: ``share``, ``reduce``, ``update``), perhaps ``at("evaluate")``, ``saves`` and ``at("save")``,
    and ``committed``.
    """

    def run_with_recovery(self, work: Callable[[], Any]) -> Any:
        """Run the training loop and return its result. ``work`` goes on from where the position says, so a layer that
        has restored a state calls it again."""
        return work()

    def begins(self) -> bool:
        """A step begins. Return False where this rank takes the outcome over from others: then the trainer calls
        ``catching_up``, exchanges gradients that are zero, calls ``caught_up`` and makes the update."""
        return True

    def catching_up(self) -> None:
        """The state of others is to be fetched, while gradients that are zero are exchanged."""

    def caught_up(self) -> None:
        """The zeros are exchanged: put the fetched state in place, before the update."""

    def compute(self, work: Callable[[], Update]) -> Update:
        """Run ``work``, one whole step up to and including its update, and return what it has come to. A layer may
        run it again after it has restored the state before it."""
        return work()

    def share(self, samples: int) -> int:
        """Return how many of the step's ``samples`` are computed here."""
        return samples

    def reduce(self, reported: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the step's [loss sum, number of tokens] tensors over everybody that has computed a part of it."""
        return reported

    def update(self, step: Callable[[], Any]) -> Any:
        """All gradients are ready: run the optimizer's ``step`` and return its outcome. Before it nothing of the
        state has changed. Layers are entered from the innermost outwards."""
        return step()

    def saves(self, step: int, *, is_due: bool, ends: bool) -> bool:
        """Return whether this rank takes part in writing the checkpoint of ``step``. ``ends``: the run ends with it."""
        return is_due

    def at(self, phase: str) -> None:
        """The trainer does something beside steps: "evaluate" or "save"."""

    def committed(self) -> None:
        """The step that the position now counts is done, with all that belongs to it."""


@dataclass(frozen=True)
class Asked:
    """What a run was asked for.

    Attributes:
        flags: an object with an attribute for each flag: ``ft_hot_swap`` for ``--ft-hot-swap``.
        environment: of the process, as ``ft run`` has set it.
    """

    flags: Any
    environment: Mapping[str, str]


class Protection:
    """What one system does for a run, from its start to the first step. Made before there is any process group.

    Attributes:
        features: patches of megatron-core that the system needs (``megatron.patches.manifest``).
        joins_run: the process is a worker of ``ft run`` and takes its place from it.
        follows_operators: every operator has to be visible to torch's dispatcher; wrong numbers are its business.
        is_given_state: this rank is given its state by others: nothing is loaded. Known once a session exists.
        draws_weights: the model's weights are drawn although the state is given.
        replicates_ends: the first two stages have the embedding, the last two the output layer.
    """

    features: frozenset[str] = frozenset()
    joins_run = False
    follows_operators = False
    is_given_state = False
    draws_weights = False
    replicates_ends = False

    def __init__(self, asked: Asked):
        self.asked = asked

    @staticmethod
    def check(options: Any, grid: Any, replicas: int) -> Iterator[Problem]:
        """Yield (problem, fix) for flags of this system, and of others, that cannot work. Called in every run.

        Args:
            options: the trainer's. grid: sizes of the parallel groups. replicas: of the model (FT-HSDP), 0: none.
        """
        yield from ()

    def connected(self, session: Session | None) -> None:
        """The process groups exist. ``session``: this worker's place in a run of ``ft run``, None outside of one."""

    def ends(self) -> ModelEnds | None:
        """Return which stages have embedding and output layer; None: the first and the last. Collective."""
        return None

    def share(self, extra: dict[str, Any], step: int, samples: int, block: int) -> DataShare | None:
        """Return the part of the training data that is read here; None: all of it.

        Args:
            extra, step, samples: as of :class:`Trainer`, after a checkpoint was loaded, or not.
            block: samples that all ranks here take in one microbatch.
        """
        return None

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        """Return the system's layer, when model and data exist. ``inner``: the layers inside of it, outermost first."""
        raise NotImplementedError
