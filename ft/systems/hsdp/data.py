"""A replica's share of the training data under the trainer's loaders (see :mod:`ft.systems.hsdp.samples`).

A replica reads its own stream: to its loaders position p is the p-th sample of that stream, and its data-parallel ranks
divide each microbatch among them as ever. With blocks of micro batch x data-parallel size, replica r's rank d gets in
each microbatch what data-parallel rank r * size + d of one world of all replicas would get, as long as no replica has
been away.

Validation and test data are not divided: every replica reads the same samples of them, so that none waits for another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft.systems.hsdp.samples import Deal, Stream


@dataclass(frozen=True)
class Share:
    """One replica's part of the training data (``ft.protection.contract.DataShare``).

    Attributes:
        replica: its number.
        deal: which replica gets which samples.
        positions: replica -> samples that it has taken from its stream.
    """

    replica: int
    deal: Deal
    positions: Mapping[int, int]

    @property
    def position(self) -> int:
        """Samples that this replica has taken."""
        return self.positions.get(self.replica, 0)

    @property
    def stream(self) -> Stream:
        """The samples of this replica."""
        return self.deal.stream(self.replica)

    def needed(self, steps: int, batch: int) -> int:
        """Return how many samples the dataset needs for ``steps`` steps of ``batch`` samples of all replicas."""
        return self.deal.needed(steps, batch // self.deal.replicas)


class Follower:
    """Has the loaders of one rank read where its replica's samples are.

    Args:
        loaders: one for each model chunk, None for chunks that see no tokens; of datasets that can ``follow`` a stream.
        replica: whose stream they read.
    """

    def __init__(self, loaders: Sequence[Any], replica: int):
        self._loaders, self._replica = [loader for loader in loaders if loader is not None], replica

    def __call__(self, deal: Deal, position: int) -> None:
        """From here on: the replica's stream of ``deal``, from ``position``."""
        stream = deal.stream(self._replica)
        for loader in self._loaders:
            loader.dataset.follow(stream)
            loader.seek(position)

    @property
    def position(self) -> int | None:
        """Where the next microbatch begins in the stream, as a loader knows it; None where this rank reads none."""
        return self._loaders[0].consumed_samples if self._loaders else None
