"""The order of samples, as functions of the seed, the number of consumed samples and the rank.

megatron-core shuffles all passes of a run together, so a run that is resumed with another --train-iters would continue
with other samples. Here pass 0 is megatron-core's own single pass, and pass n > 0 has the same samples in a permutation
that depends on the seed and n only. So the sample at a position depends only on the seed and the position.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy
import torch

from megatron.core.datasets.megatron_dataset import MegatronDataset


def sample_indices(
    consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> range:
    """Return the positions, in the run's sequence of samples, of one rank's next microbatch.

    All data-parallel ranks together take the positions [consumed_samples, consumed_samples + micro_batch_size *
    data_parallel_size), as with Megatron-LM's sequential sampler. So the sequence of samples in which a run trains does
    not depend on the number of data-parallel ranks.

    Args:
        consumed_samples: number of samples taken before, over all data-parallel ranks.
        micro_batch_size: number of samples in a microbatch of one rank.
        data_parallel_rank: the rank.
        data_parallel_size: number of data-parallel ranks.
    """
    start = consumed_samples + data_parallel_rank * micro_batch_size
    return range(start, start + micro_batch_size)


def epoch_permutation(seed: int, epoch: int, size: int) -> numpy.ndarray:
    """Return the permutation of range(size), shape (size,), for one pass through the data.

    Args:
        seed: seed of the run.
        epoch: number of the pass, from 0.
        size: number of samples.
    """
    # RandomState's stream is the same in all versions of numpy, so that a run resumes after an upgrade.
    state = numpy.random.RandomState([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch])
    order = numpy.arange(size, dtype=numpy.uint32 if size < 2**32 else numpy.int64)
    state.shuffle(order)
    return order


class CyclicOrder:
    """Maps positions to sample indices for endless passes through ``size`` samples, each pass in an order of its own.

    Position p belongs to pass p // size. No sample is dropped at the end of a pass: a microbatch may consist of the end
    of one pass and the start of the next. Thread-safe.
    """

    def __init__(self, seed: int, size: int):
        self.seed, self.size = seed, size
        self._passes: dict[int, numpy.ndarray] = {}
        self._lock = threading.Lock()

    def __call__(self, positions: Sequence[int]) -> list[int]:
        """Return the indices of the samples at these positions."""
        return [int(self._order(p // self.size)[p % self.size]) for p in positions]

    def _order(self, epoch: int) -> numpy.ndarray:
        with self._lock:
            if epoch not in self._passes:
                for old in sorted(self._passes)[:-1]:  # two passes are enough for read-ahead across their boundary
                    del self._passes[old]
                self._passes[epoch] = epoch_permutation(self.seed, epoch, self.size)
            return self._passes[epoch]


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


_ENDLESS = 1 << 62


class Cyclic(torch.utils.data.Dataset):
    """An endless sequence of passes over ``one_pass``, each in its own random order (--dataloader-type cyclic).

    The sequence is the same in all replicas. A ``StreamView`` (:mod:`ft.protection.contract`) of it selects the samples
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
