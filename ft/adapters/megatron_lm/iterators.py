"""Data iterators of a checkout: its datasets are built once, and its iterators are moved to another sample in place."""

import contextlib
import fcntl
import io
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from ft.adapters.megatron_lm import tree
from ft.base.errors import UserError
from ft.base.step_clock import CLOCK, DATA
from ft.protection.contract import DataShare, StreamView
from megatron.patches import swapped_pipeline
from megatron.patches.replace import replace


class StreamLoader:
    """An iterator over the microbatches of this rank.

    Args:
        dataset: the samples of the stream, in order.
        position: position in the stream of the first sample to read.
        block: samples that all data-parallel ranks of this world together take in one microbatch.
        build: the checkout's ``build_pretraining_data_loader``.

    Attributes:
        dataset: the samples. Code that changes them has to call ``seek`` afterwards.
    """

    def __init__(self, dataset: StreamView, position: int, block: int, build: Callable[[Any, int], Iterable[Any]]):
        self.dataset, self._block, self._build = dataset, block, build
        self.seek(position)

    def seek(self, position: int) -> None:
        """Continue with the sample at ``position``. Microbatches that were read ahead are dropped."""
        self._begin, self._count = position, 0
        self._batches: Iterator[Any] | None = None

    @property
    def consumed_samples(self) -> int:
        """Return the position in the stream of the next microbatch, over all data-parallel ranks."""
        return self._begin + self._count * self._block

    def __iter__(self) -> "StreamLoader":
        """Start the loader's processes. The checkout calls it once, when it makes its iterators."""
        if self._batches is None and self._begin + self._block <= len(self.dataset):
            self._batches = iter(self._build(self.dataset, self._begin))
        return self

    def __next__(self) -> Any:
        """Return the next microbatch.

        Raises:
            UserError: the data end before this microbatch.
        """
        with preserved_generators() if self._batches is None else contextlib.nullcontext():
            iter(self)
        batch = next(self._batches or iter(()), None)
        if batch is None:
            problem = f"the training data have {len(self.dataset)} samples for this replica, and all of them are read"
            raise UserError(problem, "give more data, or fewer --train-iters")
        self._count += 1
        return batch


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Save the states of the random generators, and restore them at the end of the context."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


class Iterators:
    """The training, validation and test iterators of one rank.

    Attributes:
        loaders: loaders of the training data, one for each model chunk that reads it, if this world reads a part.
    """

    def __init__(self, training: Any):
        self._build = training.build_train_valid_test_data_iterators
        self._build_loaders = training.build_train_valid_test_data_loaders
        self._build_datasets = training.build_train_valid_test_datasets
        self._build_loader = training.build_pretraining_data_loader
        self._datasets: dict[int | None, Any] = {}
        self._made: list[tuple[Any, tuple]] = []
        self._share: DataShare | None = None
        self._block, self._lock = 1, Path()
        self.loaders: list[StreamLoader] = []

    def divide(self, share: DataShare, block: int, lock: Path) -> None:
        """Read only a part of the training data. Call it before the first iterators are made.

        Args:
            block: samples that all data-parallel ranks of this world together take in one microbatch.
            lock: file that keeps the worlds that share the training data from building its index at the same time.
        """
        self._share, self._block, self._lock = share, block, lock

    @property
    def is_divided(self) -> bool:
        """Return whether this world reads only a part of the training data."""
        return self._share is not None

    @property
    def training(self) -> list[Any]:
        """Return the iterators of the training data, one for each model chunk; None for chunks that read no tokens."""
        return [made[0] for _, made in self._made]

    def datasets(self, provider, *args, **kwargs):
        """Return the datasets of ``provider``, which builds them at its first call."""
        stage = getattr(provider, "keywords", {}).get("vp_stage")
        if stage not in self._datasets:
            is_whole = self._share is None
            with swapped_pipeline.reading():
                made = (
                    self._build_datasets(provider, *args, **kwargs) if is_whole else self._part(provider, self._share)
                )
            self._datasets[stage] = made
        return self._datasets[stage]

    def loader(self, dataset: Any, consumed: int) -> Any:
        """Return the data loader of a dataset.

        After a recovery this is None for a dataset of which all samples are consumed: the checkout refuses to make a
        loader that has no samples left.

        Args:
            consumed: samples to skip; ignored for a part of the training data, whose loader exists already.
        """
        mine = next((loader for loader in self.loaders if loader.dataset is dataset), None)
        if mine is None and self._made and dataset is not None and consumed >= len(dataset):
            return None
        return self._build_loader(dataset, consumed) if mine is None else mine

    def make(self, provider) -> tuple:
        """Return new iterators, and remember them."""
        made = self._build(provider)
        self._made.append((provider, made))
        if made[0] is not None:
            made[0].iterable = _TimedIterator(made[0].iterable)
        return made

    def move(self) -> None:
        """Move all iterators to the sample numbers in the arguments of the checkout. All ranks have to call it.

        The iterators remain the same objects, to which the checkout holds references. The loaders in ``loaders``, which
        read a part of the training data, are not moved: the protection that divides the data sets their positions.
        """
        for provider, made in self._made:
            train, valid, test = self._build_loaders(provider)
            for iterator, loader in zip(made, (train, valid[0] if valid else None, test), strict=True):
                if iterator is not None:
                    iterator.load_state_dict({"saved_microbatches": [], "replaying": False, "replay_pos": 0})
                    iterator.iterable = _LazyIterator(loader)
            if made[0] is not None:
                made[0].iterable = _TimedIterator(made[0].iterable)

    def _part(self, provider: Callable[..., Any], share: DataShare) -> tuple:
        """Build datasets of which this world reads a part of the training data."""
        own, training = tree.module("global_vars").get_args(), tree.module("training")
        _, *others = training.get_train_valid_test_num_samples()
        wanted = share.needed(own.train_iters, own.global_batch_size)
        with _alone(self._lock):
            train, *rest = self._build_datasets(provider, (wanted, *others))
        if train is not None:
            train = StreamView(train, share.stream)
            self.loaders.append(StreamLoader(train, share.position, self._block, self._build_loader))
        return train, *rest


class _TimedIterator:
    """An iterator over training data whose time counts as the loading of data (:mod:`ft.base.step_clock`)."""

    def __init__(self, iterator: Iterator):
        self._iterator = iterator

    def __iter__(self) -> "_TimedIterator":
        return self

    def __next__(self) -> Any:
        return CLOCK.during(DATA, next, self._iterator)


class _LazyIterator:
    """An iterator over a data loader that starts the loader's processes with its first batch.

    The state of the random generators is preserved, although a new iterator of torch draws a number from torch's
    generator.
    """

    def __init__(self, loader: Iterable):
        self._loader, self._iterator = loader, None

    def __next__(self) -> Any:
        if self._iterator is None:
            with preserved_generators():
                self._iterator = iter(self._loader)
        return next(self._iterator)


def prepare(provider: Callable[[Any], Any]) -> None:
    """Build the datasets of ``provider`` on a standby, before the standby has a rank.

    When the standby has a rank that reads data, the checkout's builder returns these datasets.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder as Builder

    with contextlib.redirect_stdout(io.StringIO()):
        made = list(provider(tree.module("training").get_train_valid_test_num_samples()))
    build = Builder.build

    def built(self: Any) -> Any:
        return made if self.is_built_on_rank() else build(self)

    replace(Builder.__module__, "BlendedMegatronDatasetBuilder.build", built)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Let the first ranks of the worlds that share ``lock`` enter one after the other.

    megatron-core's first rank writes the index files of a dataset, and the other ranks of its world wait for it.
    """
    if torch.distributed.get_rank():
        yield
        return
    with open(lock, "ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # released when the file is closed, or the process dies
        yield
