"""Loads the microbatches of one data-parallel rank in order, from any position.

A run has, for each part of the data, one loader for each model chunk that reads tokens.
"""

import torch
import torch.distributed as dist

from ft.base.errors import UserError
from ft.protection.contract import DataShare, StreamView
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from megatron.ft_trainer.agreement import alone
from megatron.ft_trainer.arguments import Layout, Options
from megatron.ft_trainer.checkpointing.content import TrainState
from megatron.ft_trainer.data.datasets import build_datasets
from megatron.ft_trainer.data.tokenizer import Tokenizer

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


Loaders = list[MicrobatchLoader | None]
"""One loader for each model chunk of this rank; an entry is None if the chunk reads no tokens."""


def make_loaders(
    options: Options,
    layout: Layout,
    tokenizer: Tokenizer,
    chunks: list[torch.nn.Module],
    state: TrainState,
    share: DataShare | None = None,
) -> tuple[Loaders | None, Loaders | None, Loaders | None]:
    """Return the loaders of the training, validation and test data; None for a part that does not exist.

    All ranks have to call it.

    Args:
        chunks: the model chunks of this rank.
        state: has the position at which each loader begins.
        share: the part of the training data that is read, from its position on; None: all of it.

    Raises:
        UserError: the data cannot be read, or does not fit the options.
    """
    readers = [reads_tokens(chunk) for chunk in chunks]
    parts = build_datasets(
        options.data,
        tokenizer,
        options.training.seed,
        samples=wanted_samples(options, share),
        # a rank that joins alone has no other rank to learn from which parts exist
        is_built_on_rank=lambda: any(readers) or alone(),
    )
    exist = torch.tensor([part is not None for part in parts], dtype=torch.int32, device=torch.cuda.current_device())
    dist.all_reduce(exist, op=dist.ReduceOp.MAX)
    trained = state.consumed_train_samples
    if share is not None:
        train, *others = parts
        parts, trained = (None if train is None else StreamView(train, share.stream), *others), share.position
    consumed = (trained, state.consumed_valid_samples, 0)
    return tuple(
        [_loader(options, layout, part, position) if reads else None for reads in readers] if exists else None
        for part, exists, position in zip(parts, exist.tolist(), consumed, strict=True)
    )


def reads_tokens(chunk: torch.nn.Module) -> bool:
    """Return whether the chunk embeds tokens, or computes the loss from them."""
    return get_attr_wrapped_model(chunk, "pre_process") or get_attr_wrapped_model(chunk, "post_process")


def wanted_samples(options: Options, share: DataShare | None = None) -> tuple[int, int, int]:
    """Return how many samples the run reads of the train, validation and test parts."""
    t, e = options.training, options.evaluation
    steps = t.train_iters
    evaluations = 0 if not e.eval_iters else 1 + (steps // e.eval_interval if e.eval_interval else 0)
    one = e.eval_iters * t.global_batch_size
    trained = steps * t.global_batch_size if share is None else share.needed(steps, t.global_batch_size)
    return trained, evaluations * one, one


def _loader(options: Options, layout: Layout, dataset, consumed: int) -> MicrobatchLoader:
    return MicrobatchLoader(
        dataset,
        micro_batch_size=options.training.micro_batch_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=layout.dp,
        consumed_samples=consumed,
        pin_memory=True,
    )
