"""Datasets that are read in the order of a stream (``ft.protection.contract.Stream``), or in endless passes."""

import torch

from ft.protection.contract import Stream
from megatron.training.data.order import CyclicOrder

_ENDLESS = 1 << 62


class StreamView(torch.utils.data.Dataset):
    """The samples of ``base`` in the order of ``stream``, up to the end of ``base``."""

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
            raise IndexError(f"sample {position} of the {len(self)} of {self.stream}")
        return self.base[self.stream.index(position)]


class Cyclic(torch.utils.data.Dataset):
    """Endless passes through ``one_pass``, each in its own order, for --dataloader-type cyclic.

    The order is that of the whole run, and streams select from it: a position is the same sample for every replica.
    """

    def __init__(self, one_pass, seed: int):
        self.one_pass = one_pass
        self._order = CyclicOrder(seed, len(one_pass))

    def __len__(self) -> int:
        return _ENDLESS if len(self.one_pass) else 0

    def __getitem__(self, position: int):
        [index] = self._order([position])
        return self.one_pass[index]
