"""The order of samples, as pure functions of the seed, the number of consumed samples and the rank."""

import threading
from collections.abc import Sequence

import numpy


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
