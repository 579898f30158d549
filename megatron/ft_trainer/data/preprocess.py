"""Tokenises text into an indexed dataset, in parallel processes. The result does not depend on their number."""

import ctypes
import hashlib
import json
import math
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import numpy

from ft.base.errors import UserError
from megatron.ft_trainer.arguments.data import TokenizerOptions
from megatron.ft_trainer.arguments.schema import flag
from megatron.ft_trainer.data.indexed import FILES, IndexedWriter, token_dtype
from megatron.ft_trainer.data.sidecar import FORMAT_VERSION, Sidecar, read_sidecar
from megatron.ft_trainer.data.sources import BadLine, Piece, Source, documents, find_sources, units
from megatron.ft_trainer.data.tokenizer import Tokenizer, build_tokenizer

UNIT_BYTES = 2 << 20


@dataclass
class PreprocessOptions:
    """input and output"""

    input: list[str] | None = None
    """Files and folders. A .jsonl file (and a .json file that is named itself) holds one JSON object per line, each a
    document; any other file is one document. Files that are binary or not UTF-8 are skipped and counted."""

    output_prefix: str | None = None
    """The dataset becomes PREFIX.bin and PREFIX.idx, with PREFIX.meta.json beside them saying how it was made. The
    prefix is used as it is (Megatron-LM's tool appends _text_document) and is what --data-path takes."""

    json_key: str = flag("text", on=["--json-key", "--json-keys"])
    """Key of the text in JSON lines."""

    include: list[str] | None = None
    """Globs: take only files of a folder whose path or name matches one, e.g. '*.py'. Default: all text files."""

    exclude: list[str] | None = None
    """Globs: leave out files of a folder where the path or any part of it matches one, e.g. test site-packages."""

    append_eod: bool = flag(True, on="--append-eod", off="--no-append-eod")
    """End every document with the end-of-document token (default), without which samples that span documents can't
    tell where one ends."""

    shuffle_seed: int | None = None
    """Put the documents into a seeded random order, so that --split takes random ones. Default: order of the input."""

    max_mb: float | None = None
    """Stop after this many megabytes of text."""

    workers: int = 1
    """Processes that tokenise; the result is the same for any number."""

    skip_existing: bool = False
    """Do nothing where the dataset exists and was made from the same input, tokenizer and options."""

    def __post_init__(self):
        if not self.input:
            raise UserError("no --input", "give files or folders")
        if not self.output_prefix or self.output_prefix.endswith(("/", ".bin", ".idx")):
            raise UserError(f"--output-prefix is {self.output_prefix!r}", "give a path without suffix: data/corpus")
        if self.workers < 1:
            raise UserError(f"--workers is {self.workers}", "give at least 1")
        if self.max_mb is not None and not self.max_mb > 0:
            raise UserError(f"--max-mb is {self.max_mb}", "give more than 0")
        if self.shuffle_seed is not None and not 0 <= self.shuffle_seed < 2**32:
            raise UserError(f"--shuffle-seed is {self.shuffle_seed}", "give a number in [0, 2**32)")


@dataclass
class Encoded:
    """The tokenised documents of one work unit (a list of pieces of input files).

    Attributes:
        tokens: the tokens of all documents, one document after the other.
        lengths: number of tokens of each document.
        text_bytes: size of the text of each document in bytes.
        skipped: number of skipped inputs by reason.
        error: the first malformed document, at which tokenising stopped, as (source, byte at which the piece starts,
            line in the piece, problem, fix); None if there is none.
    """

    tokens: numpy.ndarray
    lengths: list[int]
    text_bytes: list[int]
    skipped: Counter
    error: tuple[Source, int, int, str, str] | None = None


def preprocess(
    options: PreprocessOptions,
    tokenizer_options: TokenizerOptions,
    progress: Callable[[int], None] = lambda n: None,
) -> tuple[Sidecar, Counter, bool]:
    """Make the dataset ``options.output_prefix``.

    Args:
        options: what to read and write.
        tokenizer_options: the tokenizer's flags.
        progress: called with the number of input bytes that were processed since the last call; the first call passes
            minus the total number of bytes.

    Returns:
        (the sidecar, number of skipped inputs by reason, whether the dataset existed already).

    Raises:
        UserError: an input is missing or malformed, there are no documents, or the output cannot be written.
    """
    tokenizer = build_tokenizer(tokenizer_options)
    sources = find_sources(options.input, options.include or (), options.exclude or ())
    _refuse_own_output(sources, options.output_prefix)
    digest = inputs_digest(sources, options, tokenizer)
    if options.skip_existing and (existing := _existing(options.output_prefix, digest)):
        return existing, Counter(), True
    progress(-sum(s.size for s in sources))
    writer = IndexedWriter(options.output_prefix, token_dtype(tokenizer.vocab_size))
    try:
        text_bytes, skipped = _encode_all(options, tokenizer_options, tokenizer, sources, writer, progress)
        text_bytes = _select(writer, text_bytes, options)
        if not writer.lengths:
            why = ", ".join(f"{n} {reason}" for reason, n in skipped.items()) or "no text"
            raise UserError(f"the input holds no documents ({why})", "check --input, --include and --json-key")
        counts = _histogram(writer.written(), tokenizer.vocab_size)
        sidecar = Sidecar(
            tokenizer_type=tokenizer.kind,
            tokenizer_model=tokenizer.model,
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            documents=len(writer.lengths),
            tokens=int(counts.sum()),
            max_id=int(counts.nonzero()[0][-1]),
            unigram_entropy=unigram_entropy(counts),
            sources=len(sources),
            text_bytes=sum(text_bytes),
            bin_bytes=0,
            idx_bytes=0,
            inputs_digest=digest,
        )
        sidecar = writer.commit(sidecar)
    except OSError as error:
        raise UserError(f"writing {options.output_prefix} failed: {error}", "free space, or write elsewhere") from error
    finally:
        writer.abort()
    return sidecar, skipped, False


def inputs_digest(sources: list[Source], options: PreprocessOptions, tokenizer: Tokenizer) -> str:
    """Return a SHA-256 (hex) of everything that determines the dataset, with names, sizes and times of the inputs.

    The contents of the inputs are not read.

    Args:
        sources: the input files.
        options: options of the preprocessing.
        tokenizer: the tokenizer.
    """
    relevant = {k: v for k, v in asdict(options).items() if k in ("json_key", "append_eod", "shuffle_seed", "max_mb")}
    files = [[os.path.abspath(s.path), s.size, s.mtime_ns, s.lines] for s in sources]
    text = json.dumps([FORMAT_VERSION, tokenizer.fingerprint, relevant, files], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def unigram_entropy(counts: numpy.ndarray) -> float:
    """Return the entropy in nats of the distribution that ``counts`` (vocab,) estimates."""
    p = counts[counts > 0] / counts.sum()
    return math.fsum(-p * numpy.log(p))


def encode(unit: list[Piece], tokenizer: Tokenizer, json_key: str, append_eod: bool) -> Encoded:
    """Tokenise a work unit. Runs in the worker processes.

    Args:
        unit: the pieces of input files to tokenise.
        tokenizer: the tokenizer.
        json_key: key of the text in a JSON line.
        append_eod: whether to append an end-of-document token to each document.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    end = numpy.array([tokenizer.eod], dtype=dtype)
    parts, result = [], Encoded(numpy.empty(0, dtype), [], [], Counter())
    for piece in unit:
        line = 1
        try:
            for line, text in documents(piece, json_key, result.skipped):  # noqa: B007 - the handlers name it
                ids = tokenizer.tokenize_to_array(text, dtype)
                parts += [ids, end] if append_eod else [ids]
                result.lengths.append(len(ids) + append_eod)
                result.text_bytes.append(len(text.encode("utf-8", "surrogatepass")))
        except BadLine as error:
            result.error = (piece.source, piece.start, error.line, error.problem, "repair the line or give --json-key")
        except (OSError, UserError, UnicodeEncodeError) as error:
            problem, fix = getattr(error, "problem", str(error)), getattr(error, "fix", None)
            result.error = (piece.source, piece.start, line, problem, fix or "repair or exclude the file")
        if result.error:
            break
    if parts:
        result.tokens = numpy.concatenate(parts)
    return result


def _encode_all(options, tokenizer_options, tokenizer, sources, writer, progress) -> tuple[list[int], Counter]:
    """Append all documents in input order. Return (size of each document's text in bytes, skipped inputs by reason)."""
    text_bytes, skipped, total = [], Counter(), 0
    # If the order is the input's, documents beyond the limit need not be read.
    limit = options.max_mb * 1e6 if options.max_mb and options.shuffle_seed is None else math.inf
    with _mapper(options, tokenizer_options, tokenizer) as ordered_map:
        for unit, encoded in ordered_map(units(sources, UNIT_BYTES)):
            if encoded.error:
                raise _located(*encoded.error)
            writer.append(encoded.tokens, encoded.lengths)
            text_bytes += encoded.text_bytes
            skipped += encoded.skipped
            total += sum(encoded.text_bytes)
            progress(sum(piece.end - piece.start for piece in unit))
            if total >= limit:
                break
    return text_bytes, skipped


def _select(writer: IndexedWriter, text_bytes: list[int], options: PreprocessOptions) -> list[int]:
    """Shuffle and limit the written documents. Return the sizes in bytes of the remaining documents' texts."""
    count = len(text_bytes)
    # RandomState's stream is the same in all versions of numpy; Generator's is not.
    order = numpy.arange(count)
    if options.shuffle_seed is not None:
        order = numpy.random.RandomState(options.shuffle_seed).permutation(count)
    if options.max_mb:
        order = order[: numpy.searchsorted(numpy.cumsum(numpy.array(text_bytes)[order]), options.max_mb * 1e6) + 1]
    if numpy.array_equal(order, numpy.arange(count)):
        return text_bytes
    tokens, lengths = writer.written(), writer.lengths
    starts = numpy.concatenate([[0], numpy.cumsum(lengths)])
    writer.restart()
    for i in order:
        writer.append(tokens[starts[i] : starts[i + 1]], [lengths[i]])
    return [text_bytes[i] for i in order]


def _histogram(tokens: numpy.ndarray, vocab_size: int, chunk: int = 1 << 22) -> numpy.ndarray:
    counts = numpy.zeros(vocab_size, dtype=numpy.int64)
    for start in range(0, len(tokens), chunk):
        counts += numpy.bincount(tokens[start : start + chunk], minlength=vocab_size)
    return counts


def _refuse_own_output(sources: list[Source], prefix: str) -> None:
    outputs = {os.path.realpath(prefix + suffix) for suffix in FILES}
    for source in sources:
        if os.path.realpath(source.path) in outputs and source.named:
            raise UserError(f"{source.path} is both input and output", "give another --output-prefix")


def _existing(prefix: str, digest: str) -> Sidecar | None:
    if not all(os.path.exists(prefix + suffix) for suffix in (".bin", ".idx")):
        return None
    try:
        sidecar = read_sidecar(prefix)
    except UserError:  # an unreadable sidecar: make the dataset again
        return None
    return sidecar if sidecar and sidecar.inputs_digest == digest else None


def _located(source: Source, start: int, line: int, problem: str, fix: str) -> UserError:
    """Return the error of a piece that begins at byte ``start``, with the line number counted from the file's start."""
    if not source.lines:
        return UserError(f"{source.path}: {problem}", fix)
    with open(source.path, "rb") as file:
        before, left = 0, start
        while left:
            block = file.read(min(left, 1 << 20))
            before, left = before + block.count(b"\n"), left - len(block)
    return UserError(f"{source.path}:{before + line}: {problem}", fix)


@contextmanager
def _mapper(options: PreprocessOptions, tokenizer_options: TokenizerOptions, tokenizer: Tokenizer) -> Iterator:
    """Yield a function that maps work units to (unit, Encoded) in order, in this process or in worker processes."""
    if options.workers == 1:
        yield lambda all_units: ((u, encode(u, tokenizer, options.json_key, options.append_eod)) for u in all_units)
        return
    start = (tokenizer_options, os.getpid())
    with ProcessPoolExecutor(options.workers, initializer=_start_worker, initargs=start) as pool:
        try:
            yield partial(_map_in_workers, pool, options)
        except BrokenProcessPool as error:
            raise UserError("a worker was killed, most likely for lack of memory", "give fewer --workers") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _map_in_workers(pool: ProcessPoolExecutor, options, all_units: Iterable[list[Piece]]) -> Iterator:
    # Limited, so that results do not fill the memory when the workers are faster than the disk.
    window = deque()
    for unit in all_units:
        window.append((unit, pool.submit(_encode_in_worker, unit, options.json_key, options.append_eod)))
        if len(window) > 2 * options.workers:
            first, future = window.popleft()
            yield first, future.result()
    for unit, future in window:
        yield unit, future.result()


_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer_options: TokenizerOptions, parent: int) -> None:
    global _worker_tokenizer
    if sys.platform == "linux":
        # A worker must not outlive a killed parent: it would wait for work for ever.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = build_tokenizer(tokenizer_options)


def _encode_in_worker(unit: list[Piece], json_key: str, append_eod: bool) -> Encoded:
    return encode(unit, _worker_tokenizer, json_key, append_eod)
