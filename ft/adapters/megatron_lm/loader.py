"""Loads the training samples of one model chunk from any position of a stream, with a checkout's own data loader."""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch

from ft.base.errors import UserError
from ft.protection.streams import StreamView


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
