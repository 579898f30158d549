"""Builds megatron-core's datasets for a run, such that every rank gets the same samples in the same order.

Within one pass through the data, the samples and their order are those of megatron-core's
``BlendedMegatronDatasetBuilder``; for further passes see ``order``. The builder itself is not used, because after an
error on rank 0 the other ranks wait in a barrier for ever, and because it trusts index files that a crash has left
incomplete. The data has three *parts*: train, validation and test.
"""

import dataclasses
import hashlib
import json
import math
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy
import torch
import torch.distributed as dist

import megatron.core
from ft.base import bounded_json, files
from ft.base.errors import FtError, UserError
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split, normalize
from megatron.ft_trainer.arguments.topics import DataOptions
from megatron.ft_trainer.data import index_cache
from megatron.ft_trainer.data.blend import PARTS, Blend, Recipe, parse_recipe
from megatron.ft_trainer.data.indexed import Index, id_range, read_index
from megatron.ft_trainer.data.order import Passes
from megatron.ft_trainer.data.sidecar import Sidecar, read_sidecar
from megatron.ft_trainer.data.temporary import temporary_name
from megatron.ft_trainer.data.tokenizer import Tokenizer, check_made_with

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


def check_tokens(index: Index, sidecar: Sidecar | None, tokenizer: Tokenizer, scan_cache: str) -> None:
    """Reject token ids outside the vocabulary, and a dataset made with another tokenizer.

    A dataset's sidecar (``P.meta.json``) contains its tokenizer and its largest token id. Without a sidecar all tokens
    are read once; the result is kept in ``scan_cache`` until the file changes.

    Args:
        index: index of the dataset.
        sidecar: the dataset's sidecar; None if it has none.
        tokenizer: tokenizer of the run.
        scan_cache: folder in which the smallest and largest token id are kept.
    """
    if sidecar:
        check_made_with(index.prefix, sidecar, tokenizer)
        low, high = 0, sidecar.max_id
    else:
        low, high = _scan(index, scan_cache)
    if low < 0 or high >= tokenizer.vocab_size:
        wrong = low if low < 0 else high
        raise UserError(
            f"{index.prefix}.bin holds token id {wrong}, {tokenizer.kind} has ids 0 to {tokenizer.vocab_size - 1}",
            "give the tokenizer (and --vocab-size) that the dataset was made with, or make the dataset again",
        )


def check_part(part: int, index: Index, bounds: Sequence[float], flag: str, seq_length: int) -> None:
    """Reject a dataset if its documents for one part (train, validation or test) are too short for one sample.

    megatron-core loops for ever on a part without tokens, and repeats a part with too few within one sample.

    Args:
        part: 0, 1 or 2 for train, valid and test.
        index: index of the dataset.
        bounds: the part of the documents as fractions (first, last), each in [0, 1].
        flag: the flag that specified the part, for example "--split 969,30,1".
        seq_length: number of tokens in a sample.
    """
    first, last = (round(share * float(len(index.lengths))) for share in bounds)
    tokens = int(index.lengths[first:last].sum(dtype="int64"))
    if tokens > seq_length:
        return
    raise UserError(
        f"the {PARTS[part]} part of {index.prefix} ({flag}) gets {last - first} of {len(index.lengths)} documents, "
        f"{tokens} tokens in all: fewer than one sample of {seq_length} + 1 tokens",
        "give it a larger share with --split, more data, or a shorter --seq-length"
        + ("" if part == 0 else ", or ask for no samples of it with --eval-iters 0"),
    )


def check_enough(part: int, flag: str, available: int, wanted: int) -> None:
    """Reject a blend without weights that is exhausted before the run ends.

    Args:
        part: 0, 1 or 2 for train, valid and test.
        flag: the flag that specified the blend.
        available: number of samples that the blend has in one pass.
        wanted: number of samples that the run takes from the blend.
    """
    if available < wanted:
        raise UserError(
            f"the {PARTS[part]} part of {flag} has {available} samples, the run takes {wanted}: "
            "prefixes without weights are read once",
            "give weights (weight prefix weight prefix ...), which repeat data, or fewer iterations",
        )


def _scan(index: Index, folder: str) -> tuple[int, int]:
    found = os.stat(f"{index.prefix}.bin")
    identity = [os.path.abspath(index.prefix), found.st_size, found.st_mtime_ns]
    name = hashlib.sha256(os.path.abspath(index.prefix).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    path = os.path.join(folder, f"ids-{name}.json")
    try:
        known = bounded_json.loads(files.read(path))
        if known["dataset"] == identity:
            return known["low"], known["high"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is no valid result of a scan: scan
    low, high = id_range(index)
    with suppress(OSError):  # the result only saves time in the next run
        os.makedirs(folder, exist_ok=True)
        with open(temporary_name(path), "w", encoding="utf-8") as file:
            json.dump({"dataset": identity, "low": low, "high": high}, file)
        os.replace(temporary_name(path), path)
    return low, high


def alone() -> bool:
    """Return whether this rank is joining a running job, whose other ranks cannot take part in its collectives."""
    return dist.is_initialized() and getattr(dist.group.WORLD, "is_alone", False)


def from_rank_0(compute: Callable[[], Any]) -> Any:
    """Return on every rank the result of ``compute`` on rank 0. All ranks of the default process group have to call it.

    A rank that joins a running job (see ``alone``) calls ``compute`` itself. The result is sent as JSON, so tuples
    arrive as lists.

    Raises:
        UserError: ``compute`` has raised a UserError; it is raised on every rank.
        FtError: ``compute`` has raised another exception; rank 0 raises that exception, the other ranks an FtError.
    """
    if not dist.is_initialized() or alone():
        return compute()
    if dist.get_rank() != 0:
        return _unpack(bounded_json.loads(_broadcast(b""), non_finite=True))
    try:
        answer = compute()
    except UserError as error:
        _broadcast(json.dumps({"user_error": [error.problem, error.fix]}).encode())
        raise
    except BaseException as error:
        _broadcast(json.dumps({"error": repr(error)}).encode())
        raise
    _broadcast(json.dumps({"answer": answer}).encode())
    return answer


def _unpack(message: dict[str, Any]) -> Any:
    if "user_error" in message:
        raise UserError(*message["user_error"])
    if "error" in message:
        raise FtError(f"rank 0 failed: {message['error']}")
    return message["answer"]


def _broadcast(content: bytes) -> bytes:
    """Broadcast ``content`` from rank 0, and return it on every rank."""
    from megatron.patches import platform

    device = platform().device
    size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    buffer = torch.frombuffer(bytearray(content or bytes(size.item())), dtype=torch.uint8).to(device)
    dist.broadcast(buffer, 0)
    return buffer.cpu().numpy().tobytes()
