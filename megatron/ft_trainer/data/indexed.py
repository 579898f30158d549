"""Reads and writes Megatron's indexed dataset format: atomic writes, and validation before a run uses a dataset.

``P.bin`` holds the tokens of all sequences one after the other, ``P.idx`` what ``encode_index`` writes. Beside them,
the sidecar ``P.meta.json`` records how the dataset was made. (It is not called ``P.json``,
because the text file itself often has that name.)
"""

import json
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy

from ft.base import bounded_json, files
from ft.base.errors import UserError

FORMAT_VERSION = 1
SUFFIX = ".meta.json"
FILES = (".bin", ".idx", SUFFIX)

_DTYPES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
_REMAKE = "make the dataset again with tools/preprocess_data.py, or copy it again if the copy was interrupted"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Sidecar:
    """Facts about one indexed dataset.

    Attributes:
        tokenizer_type: value of --tokenizer-type.
        tokenizer_model: absolute path of the tokenizer's file, or None.
        fingerprint: fingerprint of the tokenizer.
        vocab_size: number of token ids.
        documents: number of documents.
        tokens: number of tokens, end-of-document tokens included.
        max_id: the largest token id in the dataset.
        unigram_entropy: entropy of the token frequencies in nats per token: the loss of a model that predicts from
            these frequencies alone.
        sources: number of input files.
        text_bytes: size of the tokenised text in bytes.
        bin_bytes: size of ``P.bin`` in bytes; a file of another size does not belong to this sidecar.
        idx_bytes: size of ``P.idx`` in bytes, for the same check.
        format_version: version of this file's format.
    """

    tokenizer_type: str
    tokenizer_model: str | None
    fingerprint: str
    vocab_size: int
    documents: int
    tokens: int
    max_id: int
    unigram_entropy: float
    sources: int
    text_bytes: int
    bin_bytes: int
    idx_bytes: int
    format_version: int = FORMAT_VERSION

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def read_sidecar(prefix: str) -> Sidecar | None:
    """Return the sidecar of a dataset; None if it has none (because Megatron-LM's own tool made it).

    Raises:
        UserError: the sidecar is unreadable, has another version, or does not fit the sizes of the dataset's files.
    """
    path = prefix + SUFFIX
    if not os.path.exists(path):
        return None
    fix = "make the dataset again with tools/preprocess_data.py, or remove the file if the dataset is sound without it"
    try:
        content = bounded_json.loads(files.read(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}", fix) from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format version {version}, this code reads {FORMAT_VERSION}", fix)
    if missing := {f.name for f in fields(Sidecar)} - set(content):
        raise UserError(f"{path} lacks {', '.join(sorted(missing))}", fix)
    sidecar = Sidecar(**{f.name: content[f.name] for f in fields(Sidecar)})
    for suffix, expected in ((".bin", sidecar.bin_bytes), (".idx", sidecar.idx_bytes)):
        if os.path.exists(prefix + suffix) and (found := os.path.getsize(prefix + suffix)) != expected:
            raise UserError(f"{path} says {prefix}{suffix} has {expected} bytes, it has {found}", fix)
    return sidecar


@dataclass(frozen=True)
class Index:
    """The validated index file of a dataset.

    Attributes:
        prefix: path of the dataset without suffix.
        dtype: dtype of the tokens.
        lengths: number of tokens of each sequence, (sequences,) int32, mapped from the file.
        documents: number of documents.
        tokens: number of tokens.
    """

    prefix: str
    dtype: numpy.dtype
    lengths: numpy.ndarray
    documents: int
    tokens: int


def token_dtype(vocab_size: int) -> numpy.dtype:
    """Return the dtype in which megatron-core stores token ids of a vocabulary of this size."""
    return numpy.dtype(numpy.uint16 if vocab_size < 65500 else numpy.int32)


def read_index(prefix: str) -> Index:
    """Read ``prefix.idx`` with megatron-core, and check it and the size of ``prefix.bin`` against each other.

    Raises:
        UserError: a file is missing, unreadable or truncated, or the two files do not fit each other.
    """
    from megatron.core.datasets.indexed_dataset import _IndexReader

    for suffix in (".idx", ".bin"):
        _check_file(prefix, suffix)
    path = f"{prefix}.idx"
    try:
        index = _IndexReader(path, multimodal=False)
    except Exception as error:  # core asserts, and its parts raise what they like
        raise UserError(f"{path} is not a Megatron index, or was cut short ({error!r})", _REMAKE) from error
    lengths, dtype, bounds = index.sequence_lengths, numpy.dtype(index.dtype), index.document_indices
    ends = numpy.cumsum(lengths, dtype=numpy.int64)
    if (lengths < 0).any() or ((ends - lengths) * dtype.itemsize != index.sequence_pointers).any():
        raise UserError(f"{path} is inconsistent: its sequences do not follow each other", _REMAKE)
    tokens = int(ends[-1]) if len(ends) else 0
    if tokens == 0:
        raise UserError(f"{path} holds no documents with tokens", "make the dataset again from input that has text")
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(lengths) or (bounds[1:] < bounds[:-1]).any():
        raise UserError(f"{path} has document boundaries that do not cover its sequences in order", _REMAKE)
    if (found := os.path.getsize(f"{prefix}.bin")) < tokens * dtype.itemsize:
        raise UserError(
            f"{prefix}.bin has {found} bytes, {path} says {tokens} tokens of {dtype.itemsize} bytes "
            f"({tokens * dtype.itemsize})",
            _REMAKE,
        )
    return Index(prefix, dtype, numpy.array(lengths), len(bounds) - 1, tokens)


def id_range(index: Index) -> tuple[int, int]:
    """Return the smallest and the largest token id. Reads all of ``prefix.bin``."""
    tokens = numpy.memmap(f"{index.prefix}.bin", index.dtype, "r", shape=(index.tokens,))
    low, high = numpy.iinfo(index.dtype).max, numpy.iinfo(index.dtype).min
    for start in range(0, index.tokens, _CHUNK):
        part = tokens[start : start + _CHUNK]
        low, high = min(low, int(part.min())), max(high, int(part.max()))
    return low, high


def write(prefix: str, dtype, documents: Sequence[numpy.ndarray], sidecar: Sidecar) -> Sidecar:
    """Write a dataset under temporary names beside the final ones, and rename it.

    The old index is removed first and the new sidecar renamed last. So even if the process is killed, files of two
    datasets are never taken for one dataset. The next call overwrites the temporary files of one that was killed.

    Args:
        prefix: final path without suffix, in an existing folder.
        dtype: dtype of the tokens.
        documents: token ids of each document, (tokens,) of ``dtype``.
        sidecar: facts about the dataset, except the sizes of its files.

    Returns:
        ``sidecar`` with these sizes.

    Raises:
        OSError: a file cannot be written; an old dataset is as it was, unless renaming has begun.
    """
    temporary, index = f"{prefix}.partial", encode_index(numpy.dtype(dtype), [len(each) for each in documents])
    sidecar = replace(sidecar, bin_bytes=sum(each.nbytes for each in documents), idx_bytes=len(index))
    try:
        for suffix, parts in zip(FILES, (documents, [index], [sidecar.as_json().encode()]), strict=True):
            with open(temporary + suffix, "wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
        for suffix in (SUFFIX, ".idx"):
            with suppress(FileNotFoundError):
                os.unlink(prefix + suffix)
        for suffix in FILES:
            os.replace(temporary + suffix, prefix + suffix)
        _sync_folder(Path(prefix).absolute().parent)
    finally:
        for suffix in FILES:
            with suppress(FileNotFoundError):
                os.unlink(temporary + suffix)
    return sidecar


def encode_index(dtype: numpy.dtype, lengths: Sequence[int]) -> bytes:
    """Return the content of an index whose documents are one sequence each.

    It holds, little endian: 9 bytes of magic, version (u64), dtype code (u8), sequence count S (u64), document boundary
    count D + 1 (u64), then S lengths in tokens (i32), S offsets in bytes (i64) and D + 1 document boundaries in
    sequences (i64).
    """
    sizes = numpy.array(lengths, dtype=numpy.int32)
    pointers = numpy.zeros(len(sizes), dtype=numpy.int64)
    numpy.cumsum(sizes[:-1], dtype=numpy.int64, out=pointers[1:])
    pointers *= dtype.itemsize
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, _DTYPES[dtype.name], len(sizes), len(sizes) + 1)
    bounds = numpy.arange(len(sizes) + 1, dtype=numpy.int64)
    return header + sizes.tobytes() + pointers.tobytes() + bounds.tobytes()


def _check_file(prefix: str, suffix: str) -> None:
    path = prefix + suffix
    if os.path.isfile(path):
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} can't be read (permission denied)", f"chmod +r {path}")
        return
    stem, given = os.path.splitext(prefix)
    if given in (".idx", ".bin") and os.path.isfile(stem + suffix):
        raise UserError(f"{prefix} is a file of a dataset, not its prefix", f"give {stem}")
    if given in (".jsonl", ".json", ".txt") or os.path.isdir(prefix):
        raise UserError(
            f"{prefix} is not an indexed dataset",
            f"tokenise it first: python tools/preprocess_data.py --input {prefix} --output-prefix PREFIX",
        )
    raise UserError(
        f"{path} does not exist",
        "check the prefix (a path without .bin or .idx), or make the dataset with tools/preprocess_data.py",
    )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
