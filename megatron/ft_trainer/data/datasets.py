"""Builds megatron-core's datasets for a run, such that every rank gets the same samples in the same order.

Within one pass through the data, the samples and their order are those of megatron-core's
``BlendedMegatronDatasetBuilder``; for further passes see ``passes``. The builder itself is not used, because after an
error on rank 0 the other ranks wait in a barrier for ever, and because it trusts index files that a crash has left
incomplete. The data has three *parts*: train, validation and test.
"""

import dataclasses
import math
import os
import socket
from collections.abc import Callable, Sequence

import numpy
import torch.distributed as dist

import megatron.core
from ft.base.errors import UserError
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split, normalize
from megatron.ft_trainer.arguments.data import DataOptions
from megatron.ft_trainer.data import index_cache
from megatron.ft_trainer.data.blend import Blend, Recipe, parse_recipe
from megatron.ft_trainer.data.checks import check_enough, check_part, check_tokens
from megatron.ft_trainer.data.indexed import read_index
from megatron.ft_trainer.data.passes import Passes
from megatron.ft_trainer.data.share import from_rank_0
from megatron.ft_trainer.data.sidecar import read_sidecar
from megatron.ft_trainer.data.tokenizer import Tokenizer

_WHOLE = (0.0, 1.0)
_CACHE_NAME = "index-cache"


def build_datasets(
    data: DataOptions,
    tokenizer: Tokenizer,
    seed: int,
    samples: Sequence[int],
    is_built_on_rank: Callable[[], bool] = lambda: True,
) -> tuple:
    """Return the (train, valid, test) datasets. All ranks of the default process group, if there is one, have to call
    it.

    Rank 0 checks the data and builds the sample indices; its errors are raised on every rank.

    Args:
        data: the data flags; ``seq_length`` has to be set.
        tokenizer: tokenizer of the data.
        seed: determines the order of documents and samples.
        samples: number of samples that the run takes from the train, validation and test part. A part of which the run
            takes 0 samples is not built.
        is_built_on_rank: returns whether this rank reads samples; other ranks get None for every part.

    Returns:
        Three megatron-core datasets. Each sample is a dict of CPU tensors: tokens, labels, position_ids (seq_length,)
            int64, loss_mask (seq_length,) float32, and with --reset-attention-mask attention_mask (1, seq, seq) bool,
            True where attention is not allowed. An entry is None if the run takes no samples from the part, if the part
            has no data (its share in --split is 0, or it has no path; Megatron-LM skips its evaluation), or if this
            rank reads no samples.

    Raises:
        UserError: the data cannot be used; nothing has been built then.
    """
    if data.mock_data:
        if not is_built_on_rank():
            return None, None, None
        return _mock_datasets(_config(data, tokenizer, seed), samples)
    recipe = parse_recipe(data)
    bounds = _bounds(data, recipe, tokenizer, seed)
    wanted = [n if share else 0 for n, share in zip(samples, bounds, strict=True)]
    if samples[0] and not wanted[0]:
        given = f"--split {recipe.split}" if recipe.split else "no --train-data-path"
        raise UserError(f"{given} leaves no data for training", "give train a share, or --train-data-path")
    root = data.data_cache_path or os.path.join(os.path.dirname(recipe.prefixes[0]) or ".", _CACHE_NAME)

    def check_and_index() -> str:
        _check(data, recipe, bounds, wanted, tokenizer, root)
        identity = [megatron.core.__version__, data.seq_length, seed, recipe.split, wanted, tokenizer.fingerprint]
        identity += [[dataclasses.astuple(b) for b in recipe.blends if b]]
        identity += [[index_cache.dataset_identity(prefix) for prefix in recipe.prefixes]]
        return index_cache.prepare(root, index_cache.cache_key(identity), build)

    def build(folder: str) -> None:
        _assemble(data, recipe, bounds, wanted, _config(data, tokenizer, seed, recipe, folder))

    folder = from_rank_0(check_and_index)
    if not is_built_on_rank():
        return None, None, None
    if not os.path.isdir(folder):
        raise UserError(
            f"the index cache {folder}, built by rank 0, is not visible on {socket.gethostname()}",
            "give --data-cache-path a folder on a file system that all nodes share",
        )
    return _assemble(data, recipe, bounds, wanted, _config(data, tokenizer, seed, recipe, folder))


def _config(
    data: DataOptions, tokenizer: Tokenizer, seed: int, recipe: Recipe | None = None, folder: str | None = None
) -> GPTDatasetConfig:
    """Return megatron-core's dataset configuration; without a recipe, for mock data."""
    source = {}
    if recipe and recipe.split:
        source = {"blend": _as_core(recipe.blends[0]), "split": recipe.split}
    elif recipe:
        source = {"blend_per_split": [_as_core(blend) for blend in recipe.blends]}
    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=data.seq_length,
        path_to_cache=folder,
        tokenizer=tokenizer,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        # Attention applies a causal mask anyway; an explicit one would cost seq_length**2 bytes of memory traffic per
        # sample.
        create_attention_mask=data.reset_attention_mask,
        **source,
    )


def _as_core(blend: Blend | None):
    return blend and (list(blend.prefixes), list(blend.weights) if blend.weights else None)


def _bounds(data: DataOptions, recipe: Recipe, tokenizer: Tokenizer, seed: int) -> list:
    """Return for each part the fractions (first, last) of the documents that it spans; None for a part without data."""
    if recipe.split:
        return _config(data, tokenizer, seed, recipe).split_matrix
    return [_WHOLE if blend else None for blend in recipe.blends]


def _check(data: DataOptions, recipe: Recipe, bounds, wanted, tokenizer: Tokenizer, root: str) -> None:
    indices = {prefix: read_index(prefix) for prefix in recipe.prefixes}
    for part, blend in enumerate(recipe.blends):
        for prefix in blend.prefixes if wanted[part] else ():
            flag = f"--split {recipe.split}" if recipe.split else blend.flag
            check_part(part, indices[prefix], bounds[part], flag, data.seq_length)
    for prefix, index in indices.items():
        check_tokens(index, read_sidecar(prefix), tokenizer, root)


def _assemble(data: DataOptions, recipe: Recipe, bounds, wanted, config: GPTDatasetConfig) -> tuple:
    """Return the datasets of the parts that the run takes samples from. Read or write index files in the cache."""
    opened = {}

    def low_level(prefix: str) -> IndexedDataset:
        if prefix not in opened:
            opened[prefix] = GPTDataset.build_low_level_dataset(prefix, config)
        return opened[prefix]

    def one(prefix: str, part: int, size: int | None) -> GPTDataset | Passes:
        one_pass = _documents(GPTDataset, low_level(prefix), prefix, bounds[part], None, Split(part), config)
        cyclic = part == Split.train.value and data.dataloader_type == "cyclic"
        return one_pass if size is None or cyclic else Passes(one_pass, size, config.random_seed)

    datasets = []
    for part, (blend, size) in enumerate(zip(recipe.blends, wanted, strict=True)):
        if not size:
            datasets.append(None)
        elif len(blend.prefixes) == 1 and (blend.weights is None or recipe.split is None):
            datasets.append(one(blend.prefixes[0], part, size))
        else:
            datasets.append(_blended(blend, part, size, one, config))
            if data.dataloader_type != "cyclic":
                check_enough(part, blend.flag, len(datasets[-1]), size)
    return tuple(datasets)


def _blended(blend: Blend, part: int, size: int, one: Callable, config: GPTDatasetConfig) -> BlendedDataset:
    """Return ``size`` samples of a blend; without weights at most one pass through it."""
    sizes = [None] * len(blend.prefixes)
    if blend.weights:
        weights = normalize(blend.weights)
        targets = [math.ceil(size * weight) for weight in weights]
        # As in megatron-core, with a surplus: a blend may take slightly more samples from a dataset than its share.
        sizes = [math.ceil(target * (1 + config.mid_level_dataset_surplus)) for target in targets]
    parts = [one(prefix, part, own) for prefix, own in zip(blend.prefixes, sizes, strict=True)]
    if blend.weights:
        size = sum(targets)
    else:
        weights = [len(dataset) for dataset in parts]
        size = min(size, sum(weights))
    if not dist.is_initialized():
        # megatron-core 0.16 asks torch.distributed for its rank before it writes this index; without a process group,
        # keep the index in memory.
        config = dataclasses.replace(config, path_to_cache=None)
    return BlendedDataset(parts, weights, size, config)


def _documents(cls, low_level, prefix: str | None, bounds, size: int | None, split: Split, config) -> GPTDataset:
    """Return ``size`` samples (None: one pass) of the documents of ``low_level`` within ``bounds``."""
    count = cls.numel_low_level_dataset(low_level)
    first, last = (round(share * float(count)) for share in bounds)
    return cls(low_level, prefix, numpy.arange(first, last, dtype=numpy.int32), size, split, config)


def _mock_datasets(config: GPTDatasetConfig, samples: Sequence[int]) -> tuple:
    """Return megatron-core's synthetic samples: counting token ids in documents of random length; equal in all runs."""
    low_level = MockGPTLowLevelDataset(config.tokenizer)
    bounds = config.split_matrix
    return tuple(
        _documents(MockGPTDataset, low_level, None, bounds[part], size, Split(part), config) if size else None
        for part, size in enumerate(samples)
    )
