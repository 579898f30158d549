"""Tokenises text into an indexed dataset, in one process and in memory.

Corpora that are too large for that are tokenised with the tool of Megatron-LM, whose datasets have the same format.
"""

import fnmatch
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy

from ft.base import bounded_json
from ft.base.errors import Problem, UserError
from ft.base.options import Topic, flag
from megatron.ft_trainer.arguments.topics import TokenizerOptions
from megatron.ft_trainer.data.indexed import FILES, Sidecar, token_dtype, write
from megatron.ft_trainer.data.tokenizer import Tokenizer, build_tokenizer

_PROBE = 8192


@dataclass
class PreprocessOptions(Topic):
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

    def contradictions(self) -> Iterator[Problem]:
        if not self.input:
            yield "no --input", "give files or folders"
        if not self.output_prefix or self.output_prefix.endswith(("/", ".bin", ".idx")):
            yield f"--output-prefix is {self.output_prefix!r}", "give a path without suffix: data/corpus"
        if self.max_mb is not None and not self.max_mb > 0:
            yield f"--max-mb is {self.max_mb}", "give more than 0"
        if self.shuffle_seed is not None and not 0 <= self.shuffle_seed < 2**32:
            yield f"--shuffle-seed is {self.shuffle_seed}", "give a number in [0, 2**32)"


@dataclass(frozen=True)
class Source:
    """One input file. ``named``: whether the user gave this file itself, rather than a folder that contains it."""

    path: str
    named: bool

    @property
    def has_lines(self) -> bool:
        """Return whether each line is a document (JSON lines); otherwise the whole file is one.

        A .json file in a folder is more often one document than a file of JSON lines.
        """
        return self.path.endswith(".jsonl") or (self.named and self.path.endswith(".json"))


def preprocess(options: PreprocessOptions, tokenizer_options: TokenizerOptions) -> tuple[Sidecar, Counter]:
    """Make the dataset ``options.output_prefix``.

    Args:
        options: what to read and write.
        tokenizer_options: the tokenizer's flags.

    Returns:
        (the sidecar, number of skipped inputs by reason).

    Raises:
        UserError: an input is missing or malformed, there are no documents, or the output cannot be written.
    """
    tokenizer, prefix = build_tokenizer(tokenizer_options), options.output_prefix
    sources = find_sources(options.input, options.include or (), options.exclude or ())
    _refuse_own_output(sources, prefix)
    try:
        Path(prefix).absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "give an --output-prefix in a writable folder"
        raise UserError(f"can't write {prefix}.bin: {error}", fix) from error
    dtype = token_dtype(tokenizer.vocab_size)
    documents, text_bytes, skipped = _encode(options, tokenizer, sources, dtype)
    order = _chosen(text_bytes, options)
    if not len(order):
        why = ", ".join(f"{n} {reason}" for reason, n in skipped.items()) or "no text"
        raise UserError(f"the input holds no documents ({why})", "check --input, --include and --json-key")
    documents, text_bytes = [documents[i] for i in order], [text_bytes[i] for i in order]
    counts = sum(numpy.bincount(each, minlength=tokenizer.vocab_size) for each in documents)
    sidecar = Sidecar(
        tokenizer_type=tokenizer.kind,
        tokenizer_model=tokenizer.model,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        documents=len(documents),
        tokens=int(counts.sum()),
        max_id=int(counts.nonzero()[0][-1]),
        unigram_entropy=unigram_entropy(counts),
        sources=len(sources),
        text_bytes=sum(text_bytes),
        bin_bytes=0,
        idx_bytes=0,
    )
    try:
        return write(prefix, dtype, documents, sidecar), skipped
    except OSError as error:
        raise UserError(f"writing {prefix} failed: {error}", "free space, or write elsewhere") from error


def find_sources(inputs: Sequence[str], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Source]:
    """Return the input files, in the order of ``inputs``, and by path within a folder.

    Args:
        inputs: files and folders. Folders are searched recursively; hidden files and folders, ``__pycache__`` and
            everything that is not a regular file are left out.
        include: globs; of a folder, only files whose relative path or name matches one of them are taken.
        exclude: globs; of a folder, files whose relative path or a component of it matches one of them are left out.

    Raises:
        UserError: an input does not exist, or there is nothing to read.
    """
    sources = []
    for item in inputs:
        if os.path.isdir(item):
            sources += _in_folder(item, include, exclude)
        else:
            try:
                sources.append(_source(item, named=True))
            except OSError as error:
                raise UserError(f"--input {item} can't be read: {error.strerror}", "check the path") from error
    if not sources:
        raise UserError(
            f"--input {' '.join(inputs)} holds no files" + (f" that match {' '.join(include)}" if include else ""),
            "check the folder, --include and --exclude",
        )
    return sources


def unigram_entropy(counts: numpy.ndarray) -> float:
    """Return the entropy in nats of the distribution that ``counts`` (vocab,) estimates."""
    p = counts[counts > 0] / counts.sum()
    return math.fsum(-p * numpy.log(p))


class _NoText(Exception):
    """A file that is not text; its message is the reason under which it is counted."""


def _text_of_file(content: bytes) -> str:
    if b"\0" in content[:_PROBE]:
        raise _NoText("binary")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _NoText("not UTF-8") from error


def _text_of_line(line: bytes, json_key: str) -> str:
    fix = "repair the line or give --json-key"
    try:
        record = bounded_json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is one
        raise UserError(f"not valid JSON ({error})", fix) from error
    if not isinstance(record, dict):
        raise UserError(f"a {type(record).__name__}, not a JSON object: each line has to be one document", fix)
    if json_key not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise UserError(f"no key {json_key!r}; it has {keys}", fix)
    if not isinstance(record[json_key], str):
        raise UserError(f"{json_key!r} is a {type(record[json_key]).__name__}, not a text", fix)
    return record[json_key]


def _in_folder(folder: str, include: Sequence[str], exclude: Sequence[str]) -> list[Source]:
    found = []
    for path, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".") and f != "__pycache__"]
        for name in files:
            if name.startswith("."):
                continue
            relative = os.path.relpath(os.path.join(path, name), folder)
            if include and not any(fnmatch.fnmatch(relative, p) or fnmatch.fnmatch(name, p) for p in include):
                continue
            if any(fnmatch.fnmatch(part, p) for p in exclude for part in [relative, *relative.split(os.sep)]):
                continue
            found.append(relative)
    # Sort by path components, so that the order does not depend on how '/' sorts among the characters of names.
    found.sort(key=lambda relative: relative.split(os.sep))
    sources = []
    for relative in found:
        try:
            sources.append(_source(os.path.join(folder, relative), named=False))
        except OSError:  # a dangling link, a socket, or a file that was removed meanwhile
            continue
    return sources


def _source(path: str, named: bool) -> Source:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(0, "not a regular file", path)
    if named:
        open(path, "rb").close()
    return Source(path, named)


def _documents(sources: Iterable[Source], skipped: Counter, json_key: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield (place, function that returns the text) of all documents.

    Files of a folder that cannot be read are counted in ``skipped``.

    Raises:
        UserError: a file that the user named cannot be read.
    """
    for source in sources:
        try:
            with open(source.path, "rb") as file:
                if not source.has_lines:
                    yield source.path, partial(_text_of_file, file.read())
                    continue
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{source.path}:{number}", partial(_text_of_line, line, json_key)
        except OSError as error:
            if source.named:
                raise UserError(f"{source.path}: {error}", "repair or exclude the file") from error
            skipped["unreadable"] += 1


def _encode(
    options: PreprocessOptions, tokenizer: Tokenizer, sources: Iterable[Source], dtype: numpy.dtype
) -> tuple[list[numpy.ndarray], list[int], Counter]:
    """Return (token ids of all documents in input order, (tokens,) each; sizes of their texts in bytes; number of
    skipped inputs by reason).
    """
    documents, text_bytes, skipped, total = [], [], Counter(), 0
    end = numpy.array([tokenizer.eod] if options.append_eod else [], dtype)
    # If the order is the input's, documents beyond the limit need not be read.
    limit = options.max_mb * 1e6 if options.max_mb and options.shuffle_seed is None else math.inf
    for place, read in _documents(sources, skipped, options.json_key):
        try:
            text = read()
            if not text.strip():
                raise _NoText("empty")
            ids = tokenizer.tokenize_to_array(text, dtype)
        except _NoText as reason:
            skipped[str(reason)] += 1
            continue
        except (UserError, UnicodeEncodeError) as error:
            problem, fix = getattr(error, "problem", str(error)), getattr(error, "fix", None)
            raise UserError(f"{place}: {problem}", fix or "repair or exclude the file") from error
        documents.append(numpy.concatenate([ids, end]))
        text_bytes.append(len(text.encode("utf-8", "surrogatepass")))
        total += text_bytes[-1]
        if total >= limit:
            break
    return documents, text_bytes, skipped


def _chosen(text_bytes: list[int], options: PreprocessOptions) -> numpy.ndarray:
    """Return the numbers of the documents that --max-mb leaves, in the order of --shuffle-seed."""
    # RandomState's stream is the same in all versions of numpy; Generator's is not.
    order = numpy.arange(len(text_bytes))
    if options.shuffle_seed is not None:
        order = numpy.random.RandomState(options.shuffle_seed).permutation(len(text_bytes))
    if options.max_mb:
        order = order[: numpy.searchsorted(numpy.cumsum(numpy.array(text_bytes)[order]), options.max_mb * 1e6) + 1]
    return order


def _refuse_own_output(sources: list[Source], prefix: str) -> None:
    outputs = {os.path.realpath(prefix + suffix) for suffix in FILES}
    for source in sources:
        if os.path.realpath(source.path) in outputs and source.named:
            raise UserError(f"{source.path} is both input and output", "give another --output-prefix")
