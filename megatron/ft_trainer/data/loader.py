"""Loads the microbatches of one data-parallel rank in order, from any position, with read-ahead threads."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ft.base.errors import UserError

KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
_READ_AHEAD = 2


def sample_indices(
    consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> range:
    """Return the positions, in the run's sequence of samples, of one rank's next microbatch.

    All data-parallel ranks together take the positions [consumed_samples, consumed_samples + micro_batch_size *
    data_parallel_size), as with Megatron-LM's sequential sampler. So the sequence of samples in which a run trains does
    not depend on the number of data-parallel ranks.
    """
    start = consumed_samples + data_parallel_rank * micro_batch_size
    return range(start, start + micro_batch_size)


class MicrobatchLoader:
    """An iterator over one data-parallel rank's microbatches.

    A microbatch is a dict of CPU tensors: ``tokens``, ``labels``, ``position_ids`` (micro_batch_size, seq_length)
    int64, ``loss_mask`` (micro_batch_size, seq_length) float32. ``attention_mask`` (micro_batch_size, 1, seq_length,
    seq_length) bool exists only if the dataset makes one (--reset-attention-mask); without it attention is causal.

    Every microbatch advances ``consumed_samples`` by micro_batch_size * data_parallel_size. Its samples depend on
    (seed, consumed_samples) and the rank only, never on what was drawn before.

    Args:
        dataset: an object with a length and samples by index. Code that changes its samples has to call ``seek``.
        consumed_samples: number of samples that the run has taken so far, on all data-parallel ranks together.
        num_workers: number of threads that read ahead; 0 reads in the caller's thread.
        pin_memory: whether to put microbatches into page-locked memory, from which copies to a GPU are asynchronous.
    """

    def __init__(
        self,
        dataset,
        *,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        consumed_samples: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ):
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(f"data-parallel rank {data_parallel_rank} of {data_parallel_size}")
        self.dataset = dataset
        self._rows = micro_batch_size
        self._rank, self._ranks = data_parallel_rank, data_parallel_size
        self._workers, self._pin_memory = num_workers, pin_memory
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[Future] = deque()
        self._closed = False
        self.seek(consumed_samples)

    @property
    def consumed_samples(self) -> int:
        """Return the number of samples that all data-parallel ranks together have taken before the next microbatch."""
        return self._consumed

    def seek(self, consumed_samples: int) -> None:
        """Continue after ``consumed_samples`` samples (resume, rollback). Drop microbatches that were read ahead."""
        if consumed_samples < 0:
            raise ValueError(f"consumed samples is {consumed_samples}")
        self._drop()
        self._consumed = consumed_samples

    def close(self) -> None:
        """End the threads. Afterwards the loader yields no microbatches. May be called again."""
        self._closed = True
        self._drop()
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def __iter__(self):
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Return the next microbatch.

        After an error the position is unchanged, so that the same microbatch can be requested again.

        Raises:
            UserError: the data ends before this microbatch.
        """
        if self._closed:
            raise ValueError("the loader is closed")
        if not self._workers:
            batch = self._read(self._consumed)
        else:
            self._read_ahead()
            future = self._ahead.popleft()
            try:
                batch = future.result()
            except BaseException:
                self._drop()
                raise
        self._consumed += self._step
        if self._workers:
            self._read_ahead()
        return batch

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    @property
    def _size(self) -> int:
        return len(self.dataset)

    @property
    def _step(self) -> int:
        return self._rows * self._ranks

    def _read_ahead(self) -> None:
        """Keep a limited number of microbatches in progress, in order."""
        if self._pool is None:
            # Made when first needed, because a process that forks workers must not have threads yet.
            self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="microbatch")
        while len(self._ahead) < self._workers * _READ_AHEAD:
            position = self._consumed + len(self._ahead) * self._step
            if self._ahead and not self._available(position):
                return
            self._ahead.append(self._pool.submit(self._read, position))

    def _read(self, consumed: int) -> dict[str, torch.Tensor]:
        if not self._available(consumed):
            raise UserError(
                f"the dataset has {self._size} samples; after {consumed} samples a microbatch needs {self._step} more",
                "give more data or fewer iterations",
            )
        indices = sample_indices(consumed, self._rows, self._rank, self._ranks)
        samples = [self.dataset[i] for i in indices]
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in KEYS if key in samples[0]}
        return {key: tensor.pin_memory() for key, tensor in batch.items()} if self._pin_memory else batch

    def _available(self, consumed: int) -> bool:
        return consumed + self._step <= self._size

    def _drop(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
