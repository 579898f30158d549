#!/usr/bin/env python3
"""Tokenises text into Megatron's indexed format, in one process and in memory, with megatron-core's writer.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus
    python tools/preprocess_data.py --input ~/src --include '*.py' --exclude test --output-prefix data/src

Then train with --data-path data/corpus. Corpora that are too large for this are tokenised with the tool of Megatron-LM,
whose datasets have the same format.
"""

import argparse
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import msgspec
import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout that is not installed

from ft.base.errors import UserError
from ft.base.options import add_flags, build
from megatron.ft_trainer.arguments.topics import TokenizerOptions
from megatron.ft_trainer.logging.quiet import quieten

FILES = (".bin", ".idx", ".meta.json")
_PROBE = 8192
"""A file with a zero byte among so many first ones is no text."""


def main(argv: list[str]) -> int:
    """Tokenize the input; return the exit code: 0, or 2 for invalid input."""
    quieten()
    started = time.monotonic()
    try:
        facts, skipped = preprocess(argv)
    except UserError as error:
        print(f"preprocess_data.py: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("preprocess_data.py: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"{facts} ({time.monotonic() - started:.1f} s)")
    if skipped:
        print("skipped: " + ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items())))
    return 0


def read_flags(argv: list[str]) -> argparse.Namespace:
    """Return the values of the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("input and output").add_argument
    add("--input", nargs="+", required=True, help="files and folders; each line of a .jsonl file (and of a .json file "
        "that is named itself) is a JSON object with a document, any other file is one document")  # fmt: skip
    add("--output-prefix", required=True, help="the dataset becomes PREFIX.bin and PREFIX.idx, with PREFIX.meta.json "
        "beside them saying how it was made; --data-path takes the same prefix")  # fmt: skip
    add("--json-key", "--json-keys", default="text", help="key of the text in JSON lines")
    add("--include", nargs="+", default=[], help="globs: of a folder, take only files whose path or name matches one")
    add("--exclude", nargs="+", default=[], help="globs: of a folder, leave out what a part of the path matches")
    add("--append-eod", action="store_true", default=True, help="end every document with a token (default)")
    add("--no-append-eod", dest="append_eod", action="store_false")
    add("--shuffle-seed", type=int, help="put the documents into a random order, so that --split takes random ones")
    add("--max-mb", type=float, default=math.inf, help="stop after this many megabytes of text")
    add_flags(parser, TokenizerOptions)
    given = parser.parse_args(argv)
    if given.output_prefix.endswith(("/", *FILES)):
        raise UserError(f"--output-prefix is {given.output_prefix!r}", "give a path without suffix: data/corpus")
    return given


def preprocess(argv: list[str]) -> tuple[str, Counter]:
    """Make the dataset that the flags ask for.

    Returns:
        (a sentence about the dataset, number of skipped inputs by reason).

    Raises:
        UserError: an input is missing or malformed, there are no documents, or the output cannot be written.
    """
    from megatron import patches

    patches.apply()
    from megatron.ft_trainer.data.tokenizer import DatasetMeta, build_tokenizer

    given = read_flags(argv)
    tokenizer = build_tokenizer(build(TokenizerOptions, vars(given)))
    from megatron.core.datasets.indexed_dataset import DType

    dtype, skipped = DType.optimal_dtype(tokenizer.vocab_size), Counter()
    documents, sizes, total = [], [], 0
    for place, text in texts(given, skipped):
        try:
            ids = numpy.array(tokenizer.tokenize(text), dtype)
            sizes.append(len(text.encode("utf-8", "surrogatepass")))
        except (UserError, UnicodeEncodeError) as error:
            raise UserError(f"{place}: {getattr(error, 'problem', error)}", "repair or exclude the file") from error
        documents.append(numpy.append(ids, dtype(tokenizer.eod)) if given.append_eod else ids)
        total += sizes[-1]
        if given.shuffle_seed is None and total >= given.max_mb * 1e6:  # what follows would be dropped
            break
    order = numpy.arange(len(documents))
    if given.shuffle_seed is not None:  # RandomState's stream is the same in all versions of numpy
        order = numpy.random.RandomState(given.shuffle_seed).permutation(len(documents))
    order = order[: numpy.searchsorted(numpy.cumsum(numpy.array(sizes)[order]), given.max_mb * 1e6) + 1]
    if not len(order):
        why = ", ".join(f"{n} {reason}" for reason, n in skipped.items()) or "no text"
        raise UserError(f"the input holds no documents ({why})", "check --input, --include and --json-key")
    counts = sum(numpy.bincount(documents[i], minlength=tokenizer.vocab_size) for i in order)
    entropy = math.fsum(-p * numpy.log(p) for p in counts[counts > 0] / counts.sum())
    sidecar = DatasetMeta(tokenizer.kind, tokenizer.model, tokenizer.fingerprint, tokenizer.vocab_size, entropy)
    try:
        write(given.output_prefix, [documents[i] for i in order], sidecar)
    except OSError as error:
        raise UserError(f"can't write {given.output_prefix}: {error}", "free space, or write elsewhere") from error
    size, tokens = sum(sizes[i] for i in order) / 1e6, int(counts.sum())
    facts = f"{len(order)} documents, {tokens} tokens, {size:.1f} MB of text, unigram entropy {entropy:.4f} nats/token"
    return f"{given.output_prefix}: {facts}", skipped


def write(prefix: str, documents: list[numpy.ndarray], sidecar: "msgspec.Struct") -> None:
    """Write a dataset under temporary names, and rename it.

    The old index is removed first and the new sidecar renamed last, so that files of two datasets are never taken for
    one, even if the process is killed.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    partial = f"{prefix}.partial"
    Path(prefix).absolute().parent.mkdir(parents=True, exist_ok=True)
    try:
        builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=documents[0].dtype.type)
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(f"{partial}.idx")
        Path(f"{partial}.meta.json").write_bytes(msgspec.json.format(msgspec.json.encode(sidecar)))
        for suffix in FILES[:0:-1]:
            Path(prefix + suffix).unlink(missing_ok=True)
        for suffix in FILES:
            os.replace(partial + suffix, prefix + suffix)
    finally:
        for suffix in FILES:
            Path(partial + suffix).unlink(missing_ok=True)


def texts(given: argparse.Namespace, skipped: Counter) -> Iterator[tuple[str, str]]:
    """Yield (where it is, text) of each document, and count what is skipped, by reason."""
    outputs = {os.path.realpath(given.output_prefix + suffix) for suffix in FILES}
    found = [source for item in given.input for source in sources(item, given)]
    if not found:
        raise UserError("--input holds no files that match", "check the folder, --include and --exclude")
    for path, is_named in found:
        if is_named and os.path.realpath(path) in outputs:
            raise UserError(f"{path} is both input and output", "give another --output-prefix")
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"--input {path} can't be read: {error.strerror}", "check or exclude the file") from error
        if path.endswith(".jsonl") or (is_named and path.endswith(".json")):
            lines = [(f"{path}:{n}", line) for n, line in enumerate(content.splitlines(), 1) if line.strip()]
            read = ((place, text_of_line(place, line, given.json_key)) for place, line in lines)
        else:
            try:
                read = [(path, content.decode("utf-8"))]
            except UnicodeDecodeError:
                read = []
            if b"\0" in content[:_PROBE] or not read:
                skipped["binary" if b"\0" in content[:_PROBE] else "not UTF-8"] += 1
                continue
        for place, text in read:
            if text.strip():
                yield place, text
            else:
                skipped["empty"] += 1


def sources(item: str, given: argparse.Namespace) -> list[tuple[str, bool]]:
    """Return (path, whether it was named itself) of each file that an --input means, of a folder by path.

    Hidden files and folders, ``__pycache__`` and what is no regular file are left out of a folder.
    """
    if not os.path.isdir(item):
        return [(item, True)]
    found = []
    for path in Path(item).rglob("*"):
        inside = path.relative_to(item)
        parts = [str(inside), *inside.parts]
        if not path.is_file() or any(part.startswith(".") or part == "__pycache__" for part in inside.parts):
            continue
        names = (str(inside), path.name)
        is_included = not given.include or any(fnmatch(name, glob) for glob in given.include for name in names)
        if is_included and not any(fnmatch(part, glob) for glob in given.exclude for part in parts):
            found.append(inside)
    return [(str(Path(item) / inside), False) for inside in sorted(found, key=lambda each: each.parts)]


def text_of_line(place: str, line: bytes, key: str) -> str:
    """Return the text under ``key`` of a line that is a JSON object."""
    try:
        record = msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{place}: not valid JSON with an object a line ({error})", "repair the line") from error
    if not isinstance(text := record.get(key), str):
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise UserError(f"{place}: no text under {key!r}; it has {keys}", "repair the line or give --json-key")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
