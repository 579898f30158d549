"""A replica's share of the training data, below the loaders (FT-HSDP; see ``ft.systems.hsdp.samples``).

A replica reads its own stream: for its loaders, position p is the p-th sample of that stream, and its data-parallel
ranks divide each microbatch as usual. With blocks of micro batch x data-parallel size, rank d of replica r gets in each
microbatch the samples of data-parallel rank r * size + d in one world of all replicas, as long as no replica has been
away.

Validation and test data are not divided: every replica reads the same samples of them, so that no replica waits for
another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ft.systems.hsdp.samples import Deal, Stream
from megatron.training.data.loader import MicrobatchLoader
from megatron.training.data.order import CyclicOrder

_ENDLESS = 1 << 62


class StreamView(torch.utils.data.Dataset):
    """The samples of ``base`` in the order of one replica's ``stream``, as many as ``base`` has."""

    def __init__(self, base, stream: Stream):
        self.base, self.stream = base, stream

    def follow(self, stream: Stream) -> None:
        """Switch to another stream.

        Call ``seek`` on the loaders afterwards, because their read-ahead is from the old stream.
        """
        self.stream = stream

    def __len__(self) -> int:
        return self.stream.within(len(self.base))

    def __getitem__(self, position: int):
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)} in the stream of replica {self.stream.replica}")
        return self.base[self.stream.index(position)]


class Cyclic(torch.utils.data.Dataset):
    """Endless passes through ``one_pass``, each in its own order, as --dataloader-type cyclic reads them.

    The order is that of the whole run, below the streams: a position is the same sample for every replica.
    """

    def __init__(self, one_pass, seed: int):
        self.one_pass = one_pass
        self._order = CyclicOrder(seed, len(one_pass))

    def __len__(self) -> int:
        return _ENDLESS if len(self.one_pass) else 0

    def __getitem__(self, position: int):
        [index] = self._order([position])
        return self.one_pass[index]


@dataclass(frozen=True)
class Share:
    """One replica's part of the training data.

    Attributes:
        replica: number of the replica.
        deal: assignment of samples to replicas.
        positions: position that each replica has reached in its stream.
    """

    replica: int
    deal: Deal
    positions: Mapping[int, int]

    @property
    def position(self) -> int:
        return self.positions.get(self.replica, 0)

    def view(self, dataset, cyclic_seed: int | None = None) -> StreamView:
        """Return the run's ``dataset`` as this replica reads it; with a seed, in endless passes."""
        base = dataset if cyclic_seed is None else Cyclic(dataset, cyclic_seed)
        return StreamView(base, self.deal.stream(self.replica))


class Follower:
    """Switches the loaders of one rank to its replica's stream when samples are reassigned.

    Args:
        loaders: one for each model chunk, None for chunks that see no tokens; their datasets are from
            :meth:`Share.view`.
        replica: number of the replica.
    """

    def __init__(self, loaders: Sequence[MicrobatchLoader | None], replica: int):
        self._loaders, self._replica = [loader for loader in loaders if loader is not None], replica

    def __call__(self, deal: Deal, position: int) -> None:
        """Read the replica's stream of ``deal`` from ``position`` on."""
        stream = deal.stream(self._replica)
        for loader in self._loaders:
            loader.dataset.follow(stream)
            loader.seek(position)

    @property
    def position(self) -> int | None:
        """Position of the next microbatch in the stream, None if this rank reads no data."""
        return self._loaders[0].consumed_samples if self._loaders else None


def follower(loaders: Sequence[MicrobatchLoader | None], replica: int) -> Follower:
    """Return a follower that makes ``loaders`` read ``replica``'s stream."""
    return Follower(loaders, replica)
