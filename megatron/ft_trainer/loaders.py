"""Construction of a run's microbatch loaders: for each part of the data, one for each model chunk that reads tokens."""

import torch
import torch.distributed as dist

from ft.protection.contract import DataShare, StreamView
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from megatron.ft_trainer.agreement import alone
from megatron.ft_trainer.arguments import Layout, Options
from megatron.ft_trainer.checkpointing.content import TrainState
from megatron.ft_trainer.data.datasets import build_datasets
from megatron.ft_trainer.data.loader import MicrobatchLoader
from megatron.ft_trainer.data.tokenizer import Tokenizer

Loaders = list[MicrobatchLoader | None]
"""A loader for each model chunk of this rank; None for chunks that read no tokens."""


def make_loaders(
    options: Options,
    layout: Layout,
    tokenizer: Tokenizer,
    chunks: list[torch.nn.Module],
    state: TrainState,
    share: DataShare | None = None,
) -> tuple[Loaders | None, Loaders | None, Loaders | None]:
    """Return loaders of the train, validation and test parts, each at its position in ``state``, on all ranks.

    A part that does not exist is None. ``share``: the part of the training data to read, from its position on; None:
    all.
    """
    readers = [sees_tokens(chunk) for chunk in chunks]
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


def sees_tokens(chunk: torch.nn.Module) -> bool:
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
