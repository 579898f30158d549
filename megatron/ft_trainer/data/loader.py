"""Loads the microbatches of one data-parallel rank in order, from any position."""

import torch

from ft.base.errors import UserError

KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


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
        dataset: an object with a length and samples by index.
        consumed_samples: number of samples that the run has taken so far, on all data-parallel ranks together.
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
        pin_memory: bool = False,
    ):
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(f"data-parallel rank {data_parallel_rank} of {data_parallel_size}")
        self.dataset = dataset
        self._rows, self._rank, self._ranks = micro_batch_size, data_parallel_rank, data_parallel_size
        self._pin_memory = pin_memory
        self.seek(consumed_samples)

    def seek(self, consumed_samples: int) -> None:
        """Continue after ``consumed_samples`` samples (resume, rollback)."""
        if consumed_samples < 0:
            raise ValueError(f"consumed samples is {consumed_samples}")
        self.consumed_samples = consumed_samples

    def __iter__(self):
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Return the next microbatch.

        After an error the position is unchanged, so that the same microbatch can be requested again.

        Raises:
            UserError: the data ends before this microbatch.
        """
        consumed, step, size = self.consumed_samples, self._rows * self._ranks, len(self.dataset)
        if consumed + step > size:
            raise UserError(
                f"the dataset has {size} samples; after {consumed} samples a microbatch needs {step} more",
                "give more data or fewer iterations",
            )
        samples = [self.dataset[i] for i in sample_indices(consumed, self._rows, self._rank, self._ranks)]
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in KEYS if key in samples[0]}
        self.consumed_samples += step
        return {key: tensor.pin_memory() for key, tensor in batch.items()} if self._pin_memory else batch
