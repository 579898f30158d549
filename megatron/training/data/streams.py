"""A replica's share of the training data under the loaders (FT-HSDP; see ``ft.systems.hsdp.samples``).

A replica reads its own stream: to its loaders position p is the p-th sample of that stream, and its data-parallel ranks
divide each microbatch among them as ever. With blocks of micro batch x data-parallel size, replica r's rank d gets in
each microbatch what data-parallel rank r * size + d of one world of all replicas would get, as long as no replica has
been away.

Validation and test data are not divided: every replica reads the same samples of them, so that none waits for another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ft.systems.hsdp.samples import Deal, Stream
from megatron.training.data.loader import MicrobatchLoader
from megatron.training.data.order import CyclicOrder

_ENDLESS = 1 << 62


class StreamView(torch.utils.data.Dataset):
    """The samples of ``base`` in the order of one replica's ``stream``, as many of them as ``base`` has."""

    def __init__(self, base, stream: Stream):
        self.base, self.stream = base, stream

    def follow(self, stream: Stream) -> None:
        """Goes over to another stream. Seek in the loaders afterwards: what they have read ahead is the old one's."""
        self.stream = stream

    def __len__(self) -> int:
        return self.stream.within(len(self.base))

    def __getitem__(self, position: int):
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)} in the stream of replica {self.stream.replica}")
        return self.base[self.stream.index(position)]


class Cyclic(torch.utils.data.Dataset):
    """Endless passes through ``one_pass``, each in its own order: what --dataloader-type cyclic reads.

    The order is that of the whole run, so it lies below the streams: position p is the same sample for every replica.
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
        replica: which one. deal: who gets which samples. positions: how far each replica has come.
    """

    replica: int
    deal: Deal
    positions: Mapping[int, int]

    @property
    def position(self) -> int:
        return self.positions.get(self.replica, 0)

    def view(self, dataset, cyclic_seed: int | None = None) -> StreamView:
        """``dataset``, the run's, as this replica reads it; with a seed in endless passes."""
        base = dataset if cyclic_seed is None else Cyclic(dataset, cyclic_seed)
        return StreamView(base, self.deal.stream(self.replica))


class Follower:
    """Has the loaders of one rank read where its replica's samples are.

    Args:
        loaders: one for each model chunk, None for chunks that see no tokens; of :meth:`Share.view`.
    """

    def __init__(self, loaders: Sequence[MicrobatchLoader | None], replica: int):
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


def follower(loaders: Sequence[MicrobatchLoader | None], replica: int) -> Follower:
    """What has ``loaders`` follow ``replica``'s stream."""
    return Follower(loaders, replica)
