"""Checks of the datasets of a run, made before megatron-core opens them. Each error names the problem and the fix."""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress

from ft.base import bounded_json, files
from ft.base.errors import UserError
from megatron.ft_trainer.data.blend import PARTS
from megatron.ft_trainer.data.indexed import Index, id_range
from megatron.ft_trainer.data.sidecar import Sidecar
from megatron.ft_trainer.data.temporary import temporary_name
from megatron.ft_trainer.data.tokenizer import Tokenizer, check_made_with


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
