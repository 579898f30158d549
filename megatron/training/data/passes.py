"""A dataset that is read as often as a run needs, in an order that does not depend on the length of the run.

megatron-core shuffles as many passes together as a run takes, so a run resumed with another --train-iters would
continue with other samples. Here pass 0 is megatron-core's own single pass, and pass n has its samples in the n-th
permutation of the seed: the sample at a position is a function of the seed and the number of samples consumed.
"""

from collections import OrderedDict

import torch

from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.training.data.order import CyclicOrder


class Passes(torch.utils.data.Dataset):
    """``size`` samples of ``one_pass``, over as many passes as necessary.

    It has the attributes that megatron-core's ``BlendedDataset`` reads from its parts.
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
