"""Builds megatron-core's datasets for a run, such that every rank gets the same samples in the same order.

Within one pass through the data, the samples and their order are those of megatron-core's
``BlendedMegatronDatasetBuilder``. The builder itself is not used, because after an error on rank 0 the other ranks wait
in a barrier for ever, and because it trusts index files that a crash has left incomplete: here a folder of them gets
its name when all are on disk. The builder also shuffles all passes
of a run together, so a run that is resumed with another --train-iters would continue with other samples. Here pass 0 is
megatron-core's own single pass, and pass n > 0 has the same samples in a permutation that depends on the seed and n
only (:class:`Passes`). The data has three *parts*: train, validation and test.

A dataset is a pair of files in Megatron's indexed format: ``P.bin`` holds the tokens of all sequences one after the
other, ``P.idx`` their lengths and which of them make a document. Both are checked before a run uses them.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy
import torch

import megatron.core
from ft.base.errors import UserError
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.datasets.indexed_dataset import _IndexReader
from megatron.core.datasets.utils import Split
from megatron.ft_trainer.agreement import from_rank_0
from megatron.ft_trainer.arguments.topics import DataOptions
from megatron.ft_trainer.data.tokenizer import Tokenizer

PARTS = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"

_NUMBER = re.compile(r"\d+\.?\d*|\.\d+")
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
            has no data (its share in --split is 0; Megatron-LM skips its evaluation), or if this rank reads no samples.

    Raises:
        UserError: the data cannot be used; nothing has been built then.
    """
    if data.mock_data:
        if not is_built_on_rank():
            return None, None, None
        return _mock_datasets(_config(data, tokenizer, seed), samples)
    if (prefix := data.prefix) is None:
        raise UserError("no data to train on", "add --data-path PREFIX, or --mock-data for synthetic samples")
    split = parse_split(data.split or DEFAULT_SPLIT)
    bounds = _config(data, tokenizer, seed, prefix, split).split_matrix
    wanted = [n if share else 0 for n, share in zip(samples, bounds, strict=True)]
    if samples[0] and not wanted[0]:
        raise UserError(f"--split {split} leaves no data for training", "give train a share")
    root = data.data_cache_path or os.path.join(os.path.dirname(prefix) or ".", _CACHE_NAME)

    def check_and_index() -> str:
        lengths = read_lengths(prefix)
        for part in (part for part in range(len(PARTS)) if wanted[part]):
            check_part(part, prefix, lengths, bounds[part], split, data.seq_length)
        identity = [megatron.core.__version__, data.seq_length, seed, split, wanted, tokenizer.fingerprint]
        return index_folder(root, _digest([*identity, _identity(prefix)]), assemble)

    def assemble(folder: str) -> tuple:
        return _assemble(prefix, bounds, wanted, _config(data, tokenizer, seed, prefix, split, folder))

    folder = from_rank_0(check_and_index)
    if not is_built_on_rank():
        return None, None, None
    if not os.path.isdir(folder):
        raise UserError(
            f"the index cache {folder}, built by rank 0, is not visible on {socket.gethostname()}",
            "give --data-cache-path a folder on a file system that all nodes share",
        )
    return assemble(folder)


def parse_split(text: str) -> str:
    """Return --split in a form that megatron-core reads correctly (it silently drops signs and exponents).

    Raises:
        UserError: there are not one to three shares >= 0, or their sum is 0.
    """
    shares = [share.strip() for share in text.split(",")]
    if not 1 <= len(shares) <= 3 or not all(_NUMBER.fullmatch(share) for share in shares):
        raise UserError(f"--split is {text!r}", "give up to three shares, for train, valid and test: 969,30,1")
    if not sum(map(float, shares)):
        raise UserError(f"--split {text} gives no part any documents", "give train a share above 0")
    return ",".join(shares)


def _config(
    data: DataOptions,
    tokenizer: Tokenizer,
    seed: int,
    prefix: str | None = None,
    split: str | None = None,
    folder: str | None = None,
) -> GPTDatasetConfig:
    """Return megatron-core's dataset configuration; without a prefix, for mock data."""
    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=data.seq_length,
        blend=([prefix], None) if prefix else None,
        split=split,
        path_to_cache=folder,
        tokenizer=tokenizer,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        # Attention applies a causal mask anyway; an explicit one would cost seq_length**2 bytes of memory traffic per
        # sample.
        create_attention_mask=data.reset_attention_mask,
    )


def _assemble(prefix: str, bounds, wanted: Sequence[int], config: GPTDatasetConfig) -> tuple:
    """Return the datasets of the parts that the run takes samples from. Read or write index files in the cache."""
    low_level = GPTDataset.build_low_level_dataset(prefix, config)
    return tuple(
        Passes(prefix, _documents(GPTDataset, low_level, prefix, bounds[part], None, Split(part), config), size, config)
        if size
        else None
        for part, size in enumerate(wanted)
    )


class Passes(torch.utils.data.Dataset):
    """The samples of ``one_pass``, repeated for as many passes as ``size`` samples need.

    The sample at a position depends only on the seed and the position. A token id outside the vocabulary, of which
    megatron-core's embedding would silently make zeros with tensor parallelism, is a UserError.
    """

    def __init__(self, prefix: str, one_pass: GPTDataset, size: int, config: GPTDatasetConfig):
        self.one_pass, self.size, self._prefix, self._tokenizer = one_pass, size, prefix, config.tokenizer
        # two passes are enough for read-ahead across their boundary
        self._order = lru_cache(maxsize=2)(partial(epoch_permutation, config.random_seed, size=len(one_pass)))

    def __len__(self) -> int:
        return max(self.size, len(self.one_pass))

    def __getitem__(self, position: int) -> dict:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        epoch, place = divmod(int(position), len(self.one_pass))
        sample = self.one_pass[int(self._order(epoch)[place]) if epoch else place]
        low, high = (int(bound) for bound in torch.aminmax(torch.cat([sample["tokens"], sample["labels"][-1:]])))
        if low < 0 or high >= self._tokenizer.vocab_size:
            kind, size = self._tokenizer.kind, self._tokenizer.vocab_size
            raise UserError(
                f"{self._prefix}.bin holds token id {low if low < 0 else high}, {kind} has ids 0 to {size - 1}",
                "give the tokenizer (and --vocab-size) that the dataset was made with, or make the dataset again",
            )
        return sample


def epoch_permutation(seed: int, epoch: int, size: int) -> numpy.ndarray:
    """Return the permutation of range(size), shape (size,), for pass number ``epoch`` (from 0) through the data."""
    # RandomState's stream is the same in all versions of numpy, so that a run resumes after an upgrade.
    state = numpy.random.RandomState([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch])
    order = numpy.arange(size, dtype=numpy.uint32 if size < 2**32 else numpy.int64)
    state.shuffle(order)
    return order


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


def check_part(
    part: int, prefix: str, lengths: numpy.ndarray, bounds: Sequence[float], split: str, seq_length: int
) -> None:
    """Reject a dataset if its documents for one part (0, 1, 2: train, valid, test) are too short for one sample.

    megatron-core loops for ever on a part without tokens, and repeats a part with too few within one sample.

    Args:
        lengths: number of tokens of each sequence, (sequences,) int32.
        bounds: the part's documents as fractions (first, last), each in [0, 1].
    """
    first, last = (round(share * float(len(lengths))) for share in bounds)
    tokens = int(lengths[first:last].sum(dtype="int64"))
    if tokens > seq_length:
        return
    raise UserError(
        f"the {PARTS[part]} part of {prefix} (--split {split}) gets {last - first} of {len(lengths)} "
        f"documents, {tokens} tokens in all: fewer than one sample of {seq_length} + 1 tokens",
        "give it a larger share with --split, more data, or a shorter --seq-length"
        + ("" if part == 0 else ", or ask for no samples of it with --eval-iters 0"),
    )


_REMAKE = "make the dataset again with tools/preprocess_data.py, or copy it again if the copy was interrupted"


def read_lengths(prefix: str) -> numpy.ndarray:
    """Return the number of tokens of each sequence of a dataset, (sequences,) int32.

    Raises:
        UserError: a file is missing, unreadable or truncated, or the two files do not fit each other.
    """
    for suffix in (".idx", ".bin"):
        _check_file(prefix, suffix)
    path = f"{prefix}.idx"
    try:
        index = _IndexReader(path, multimodal=False)
    except Exception as error:  # core asserts, and its parts raise what they like
        raise UserError(f"{path} is not a Megatron index, or was cut short ({error!r})", _REMAKE) from error
    lengths, width, bounds = index.sequence_lengths, numpy.dtype(index.dtype).itemsize, index.document_indices
    ends = numpy.cumsum(lengths, dtype=numpy.int64)
    if (lengths < 0).any() or ((ends - lengths) * width != index.sequence_pointers).any():
        raise UserError(f"{path} is inconsistent: its sequences do not follow each other", _REMAKE)
    tokens = int(ends[-1]) if len(ends) else 0
    if tokens == 0:
        raise UserError(f"{path} holds no documents with tokens", "make the dataset again from input that has text")
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(lengths) or (bounds[1:] < bounds[:-1]).any():
        raise UserError(f"{path} has document boundaries that do not cover its sequences in order", _REMAKE)
    if (found := os.path.getsize(f"{prefix}.bin")) < tokens * width:
        says = f"{path} says {tokens} tokens of {width} bytes ({tokens * width})"
        raise UserError(f"{prefix}.bin has {found} bytes, {says}", _REMAKE)
    return numpy.array(lengths)


def _check_file(prefix: str, suffix: str) -> None:
    path, (stem, given) = prefix + suffix, os.path.splitext(prefix)
    if os.path.isfile(path):
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} can't be read (permission denied)", f"chmod +r {path}")
        return
    if given in (".idx", ".bin") and os.path.isfile(stem + suffix):
        raise UserError(f"{prefix} is a file of a dataset, not its prefix", f"give {stem}")
    if given in (".jsonl", ".json", ".txt") or os.path.isdir(prefix):
        tool = f"python tools/preprocess_data.py --input {prefix} --output-prefix PREFIX"
        raise UserError(f"{prefix} is not an indexed dataset", f"tokenise it first: {tool}")
    fix = "check the prefix (a path without .bin or .idx), or make the dataset with tools/preprocess_data.py"
    raise UserError(f"{path} does not exist", fix)


def _identity(prefix: str) -> list:
    """Return the name, sizes and times of a dataset's two files. They change when the dataset is remade."""
    stats = [os.stat(prefix + suffix) for suffix in (".idx", ".bin")]
    return [os.path.abspath(prefix), *((s.st_size, s.st_mtime_ns) for s in stats)]


def _digest(values: Sequence) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()[:24]


_STALE_S = 86400


def index_folder(root: str, name: str, build: Callable[[str], Any]) -> str:
    """Return the folder ``root/name``. If it is missing, ``build(folder)`` creates its files. Call on one rank only.

    Raises:
        UserError: the folder cannot be written.
    """
    final = Path(root, name)
    if final.is_dir():
        return str(final)
    partial = Path(f"{final}.{secrets.token_hex(4)}.partial")  # replicas and other runs may build the same one
    try:
        for old in Path(root).glob("*.partial"):
            if time.time() - old.stat().st_mtime > _STALE_S:  # of a run that was killed
                shutil.rmtree(old, ignore_errors=True)
        partial.mkdir(parents=True)
        build(str(partial))
        for path in partial.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        try:
            partial.rename(final)
        except OSError:
            if not final.is_dir():  # no other run has made it meanwhile
                raise
    except OSError as error:
        fix = "give --data-cache-path a writable folder with free space"
        raise UserError(f"can't write the index cache {final}: {error}", fix) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return str(final)
