"""Views of a dataset for runs in which each replica of the model reads only its part of the samples.

A stream (``ft.protection.contract.Stream``) maps the positions 0, 1, 2, ... of one replica to indices in the dataset.
"""

import torch

from ft.protection.contract import Stream
from megatron.training.data.order import CyclicOrder

_ENDLESS = 1 << 62


class StreamView(torch.utils.data.Dataset):
    """The samples of ``base`` that belong to ``stream``, in the order of the stream."""

    def __init__(self, base, stream: Stream):
        self.base, self.stream = base, stream

    def follow(self, stream: Stream) -> None:
        """Switch to another stream.

        Call ``seek`` on the data loaders afterwards, because they have prefetched samples of the old stream.
        """
        self.stream = stream

    def __len__(self) -> int:
        return self.stream.within(len(self.base))

    def __getitem__(self, position: int):
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of the {len(self)} of {self.stream}")
        return self.base[self.stream.index(position)]


class Cyclic(torch.utils.data.Dataset):
    """An endless sequence of passes over ``one_pass``, each in its own random order (--dataloader-type cyclic).

    The sequence is the same in all replicas. A ``StreamView`` of it selects the samples of one replica.

    Args:
        one_pass: the dataset.
        seed: seed of the random orders.
    """

    def __init__(self, one_pass, seed: int):
        self.one_pass = one_pass
        self._order = CyclicOrder(seed, len(one_pass))

    def __len__(self) -> int:
        return _ENDLESS if len(self.one_pass) else 0

    def __getitem__(self, position: int):
        [index] = self._order([position])
        return self.one_pass[index]
