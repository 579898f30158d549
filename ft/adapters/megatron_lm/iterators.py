"""Data iterators of a checkout: its datasets are built once, and its iterators are moved to another sample in place."""

import contextlib
import io
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch

from ft.adapters.megatron_lm import tree
from megatron.patches.replace import replace


class Iterators:
    """The training, validation and test iterators of one rank.

    Args:
        build: the checkout's ``build_train_valid_test_data_iterators``.
        build_loaders: the checkout's ``build_train_valid_test_data_loaders``.
        build_datasets: the checkout's ``build_train_valid_test_datasets``.
    """

    def __init__(self, build: Callable[..., tuple], build_loaders: Callable[..., tuple], build_datasets: Callable):
        self._build, self._build_loaders, self._build_datasets = build, build_loaders, build_datasets
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
        """Move all iterators to the sample numbers in the arguments of the checkout. All ranks have to call it.

        The iterators remain the same objects, to which the checkout holds references.
        """
        for provider, made in self._made:
            train, valid, test = self._build_loaders(provider)
            for iterator, loader in zip(made, (train, valid[0] if valid else None, test), strict=True):
                if iterator is not None:
                    iterator.load_state_dict({"saved_microbatches": [], "replaying": False, "replay_pos": 0})
                    iterator.iterable = _Later(loader)


class _Later:
    """An iterator over a data loader that starts the loader's processes with its first batch.

    The state of the random generators is preserved, although a new iterator of torch draws a number from torch's
    generator.
    """

    def __init__(self, loader: Iterable):
        self._loader, self._iterator = loader, None

    def __next__(self) -> Any:
        if self._iterator is None:
            with _preserved_generators():
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
def _preserved_generators() -> Iterator[None]:
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
