"""Reads the input of preprocessing (files, folders and JSON lines) as a deterministic sequence of documents."""

import fnmatch
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ft.base import bounded_json
from ft.base.errors import UserError

_PROBE = 8192


@dataclass(frozen=True)
class Source:
    """One input file.

    Attributes:
        path: path of the file.
        size: size of the file in bytes.
        mtime_ns: modification time of the file in nanoseconds.
        named: whether the user gave this file itself, rather than a folder that contains it.
        lines: whether each line is a document (JSON lines); otherwise the whole file is one document.
    """

    path: str
    size: int
    mtime_ns: int
    named: bool
    lines: bool


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of ``source``: a whole text file, or whole lines of a file of JSON lines."""

    source: Source
    start: int
    end: int


class BadLine(Exception):
    """Raised for a line that is not a document. ``line`` counts from 1 within the piece."""

    def __init__(self, line: int, problem: str):
        self.line, self.problem = line, problem
        super().__init__(line, problem)


def find_sources(inputs: Sequence[str], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Source]:
    """Return the input files, in the order of ``inputs``, and by path within a folder.

    Args:
        inputs: files and folders. Folders are searched recursively; hidden files and folders, ``__pycache__`` and
            everything that is not a regular file are left out.
        include: globs. From a folder, only files whose relative path or name matches one of them are taken.
        exclude: globs. From a folder, files are left out if their relative path or a component of it matches one of
            them.

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
                with open(item, "rb"):
                    pass
            except OSError as error:
                raise UserError(f"--input {item} can't be read: {error.strerror}", "check the path") from error
    if not sources:
        raise UserError(
            f"--input {' '.join(inputs)} holds no files" + (f" that match {' '.join(include)}" if include else ""),
            "check the folder, --include and --exclude",
        )
    return sources


def units(sources: Iterable[Source], target_bytes: int) -> Iterator[list[Piece]]:
    """Yield work units for parallel tokenisation: lists of pieces of about ``target_bytes`` in total, in order."""
    unit, size = [], 0
    for source in sources:
        for piece in _lines_pieces(source, target_bytes) if source.lines else [Piece(source, 0, source.size)]:
            unit.append(piece)
            size += piece.end - piece.start
            if size >= target_bytes:
                yield unit
                unit, size = [], 0
    if unit:
        yield unit


def documents(piece: Piece, json_key: str, skipped: Counter) -> Iterator[tuple[int, str]]:
    """Yield (line in the piece, text) of each document of a piece. Count inputs that are not text in ``skipped``.

    Raises:
        BadLine: a line is not a JSON object with a text under ``json_key``.
        OSError: a named file cannot be read; a file found in a folder is counted as unreadable instead.
    """
    try:
        with open(piece.source.path, "rb") as file:
            file.seek(piece.start)
            content = file.read(piece.end - piece.start)
    except OSError:
        if piece.source.named:
            raise
        skipped["unreadable"] += 1
        return
    if piece.source.lines:
        yield from _json_lines(content, json_key, skipped)
    elif b"\0" in content[:_PROBE]:
        skipped["binary"] += 1
    else:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            skipped["not UTF-8"] += 1
            return
        if text.strip():
            yield 1, text
        else:
            skipped["empty"] += 1


def _json_lines(content: bytes, json_key: str, skipped: Counter) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = bounded_json.loads(line)
        except ValueError as error:  # UnicodeDecodeError is one
            raise BadLine(number, f"not valid JSON ({error})") from error
        if not isinstance(record, dict):
            raise BadLine(number, f"a {type(record).__name__}, not a JSON object: each line has to be one document")
        if json_key not in record:
            raise BadLine(number, f"no key {json_key!r}; it has {', '.join(map(repr, list(record)[:8])) or 'none'}")
        text = record[json_key]
        if not isinstance(text, str):
            raise BadLine(number, f"{json_key!r} is a {type(text).__name__}, not a text")
        if text.strip():
            yield number, text
        else:
            skipped["empty"] += 1


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
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "not a regular file", path)
    # A .json file in a folder is more often one document than a file of JSON lines.
    lines = path.endswith(".jsonl") or (named and path.endswith(".json"))
    return Source(path, found.st_size, found.st_mtime_ns, named, lines)


def _lines_pieces(source: Source, target_bytes: int) -> Iterator[Piece]:
    start = 0
    with open(source.path, "rb") as file:
        while start < source.size:
            file.seek(min(start + target_bytes, source.size) - 1)
            file.readline()
            end = file.tell()
            yield Piece(source, start, end)
            start = end
