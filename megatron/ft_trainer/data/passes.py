"""A dataset that repeats a megatron-core dataset for several passes, in an order independent of the run's length.

megatron-core shuffles all passes of a run together, so a run that is resumed with another --train-iters would continue
with other samples. Here pass 0 is megatron-core's own single pass, and pass n > 0 has the same samples in a permutation
that depends on the seed and n only. So the sample at a position depends only on the seed and the position.
"""

from collections import OrderedDict

import torch

from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.ft_trainer.data.order import CyclicOrder


class Passes(torch.utils.data.Dataset):
    """The samples of ``one_pass``, repeated for as many passes as ``size`` samples need.

    It has the attributes that megatron-core's ``BlendedDataset`` reads from the datasets of a blend.
    """

    def __init__(self, one_pass: MegatronDataset, size: int, seed: int):
        self.one_pass, self.size = one_pass, size
        self.index_split = one_pass.index_split
        self.unique_identifiers = OrderedDict(one_pass.unique_identifiers, passes="permuted", wanted=size)
        self._order = CyclicOrder(seed, len(one_pass))

    def __len__(self) -> int:
        return max(self.size, len(self.one_pass))

    def __getitem__(self, position: int) -> dict:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        if position >= len(self.one_pass):
            [position] = self._order([position])
        return self.one_pass[int(position)]
