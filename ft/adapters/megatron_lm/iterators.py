"""Data iterators of a checkout: its datasets are built once, and its iterators are moved to another sample in place."""

import random
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy
import torch


class Iterators:
    """The training, validation and test iterators of one rank.

    Args:
        build: the checkout's ``build_train_valid_test_data_iterators``.
        build_datasets: the checkout's ``build_train_valid_test_datasets``.
    """

    def __init__(self, build: Callable[..., tuple], build_datasets: Callable[..., Any]):
        self._build, self._build_datasets = build, build_datasets
        self._datasets: dict[int | None, Any] = {}
        self._made: list[tuple[Any, tuple]] = []

    def datasets(self, provider, *args, **kwargs):
        """Return the datasets of ``provider``, which builds them at its first call."""
        stage = getattr(provider, "keywords", {}).get("vp_stage")
        if stage not in self._datasets:
            self._datasets[stage] = self._build_datasets(provider, *args, **kwargs)
        return self._datasets[stage]

    def make(self, provider) -> tuple:
        """Return new iterators, and remember them."""
        made = self._build(provider)
        self._made.append((provider, made))
        return made

    def move(self) -> None:
        """Move all iterators to the samples that the arguments of the checkout name, on all ranks. Collective.

        The random generators stay where they are, although a new iterator draws from torch's.
        """
        for provider, made in self._made:
            for old in _flat(made):
                old.iterable = None  # ends its worker processes before new ones start
            with _preserved_generators():
                new = self._build(provider)
                for old, other in zip(_flat(made), _flat(new), strict=True):
                    vars(old).update(vars(other))


def _flat(made: Any) -> list[Any]:
    """Return the iterators in a tuple or list of them, in order, without those that are None."""
    if isinstance(made, list | tuple):
        return [each for part in made for each in _flat(part)]
    return [] if made is None else [made]


@contextmanager
def _preserved_generators():
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
