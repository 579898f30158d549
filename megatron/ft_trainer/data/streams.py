"""Endless passes over a dataset, of which each replica of the model can read its part of the samples."""

import torch

from megatron.ft_trainer.data.order import CyclicOrder

_ENDLESS = 1 << 62


class Cyclic(torch.utils.data.Dataset):
    """An endless sequence of passes over ``one_pass``, each in its own random order (--dataloader-type cyclic).

    The sequence is the same in all replicas. A ``StreamView`` (:mod:`ft.protection.streams`) of it selects the samples
    of one replica.

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
