"""Data iterators of a checkout: its datasets are built once, and its iterators are moved to another sample in place."""

import contextlib
import io
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ft.adapters.megatron_lm import tree
from megatron.patches.replace import replace


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


def prepare(provider: Callable[[Any], Any]) -> None:
    """Build the data sets of ``provider`` on a standby, before it has a rank. When it has one, the checkout's builder
    returns them, if its rank reads data."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder as Builder

    with contextlib.redirect_stdout(io.StringIO()):
        made = list(provider(tree.module("training").get_train_valid_test_num_samples()))
    build = Builder.build

    def built(self: Any) -> Any:
        return made if self.is_built_on_rank() else build(self)

    replace(Builder.__module__, "BlendedMegatronDatasetBuilder.build", built)


def _flat(made: Any) -> list[Any]:
    """Return the iterators in a tuple or list of them, in order, without those that are None."""
    if isinstance(made, list | tuple):
        return [each for part in made for each in _flat(part)]
    return [] if made is None else [made]


@contextlib.contextmanager
def _preserved_generators():
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
