"""The cache of megatron-core's sample indices: folders that are either complete and verified, or do not exist.

megatron-core writes its index files one after the other under their final names, and later trusts any that exist: a
crash in between leaves truncated files, and a dataset remade under the same prefix is read with old indices. Here every
set of inputs (dataset, split, seed, ...) has its own folder, which gets its final name when all its files are written.
Until then it has a temporary name, as has a dataset that is being written (:mod:`megatron.ft_trainer.data.indexed`).
"""

import hashlib
import json
import logging
import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ft.base import bounded_json
from ft.base.errors import UserError

logger = logging.getLogger(__name__)

_MANIFEST = "complete.json"
# Seconds after its last change before a file is removed. Process ids are ambiguous across containers that share a host
# name, so a recently changed file may belong to a running process in another container.
_LEFT_ALONE_S = 600
_CHECKED_BYTES = 16 << 20
_FIX = "give --data-cache-path a writable folder with free space"


def dataset_identity(prefix: str) -> list:
    """Return the name, sizes and times of a dataset's two files. They change when the dataset is remade."""
    stats = [os.stat(prefix + suffix) for suffix in (".idx", ".bin")]
    return [prefix, *((s.st_size, s.st_mtime_ns) for s in stats)]


def cache_key(inputs: Sequence[Any]) -> str:
    """Return the name of the cache folder for these inputs (JSON values): a digest of them."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:24]


def prepare(root: str, key: str, build: Callable[[str], None]) -> str:
    """Return the folder ``root/key``. If it is missing, ``build(folder)`` creates its files. Call on one rank only.

    A folder that does not match its manifest is rebuilt, with a warning.

    Raises:
        UserError: the folder cannot be written.
    """
    final = Path(root) / key
    problem = _problem(final)
    if problem is None:
        return str(final)
    staged = Path(temporary_name(str(final)))
    try:
        if final.exists():
            logger.warning("index cache %s is damaged (%s): building it again", final, problem)
            shutil.rmtree(final)
        staged.mkdir(parents=True, exist_ok=True)
        remove_leftovers(str(final))
        build(str(staged))
        _seal(staged)
        _publish(staged, final)
    except OSError as error:
        raise UserError(f"can't write the index cache {final}: {error}", _FIX) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return str(final)


def _problem(folder: Path) -> str | None:
    """Return why a folder cannot be used, or None."""
    try:
        files = bounded_json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        for name, facts in files.items():
            if _facts(folder / name) != facts:
                return f"{name} is not as it was written"
    except (OSError, ValueError, AttributeError) as error:
        return f"no usable manifest: {error}"
    return None


def _seal(folder: Path) -> None:
    """Flush all files to the disk, and then write the manifest with their sizes and checksums."""
    facts = {}
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        facts[path.name] = _facts(path)
    with open(folder / _MANIFEST, "w", encoding="utf-8") as file:
        json.dump(facts, file)
        file.flush()
        os.fsync(file.fileno())


def _publish(staged: Path, final: Path) -> None:
    try:
        staged.rename(final)
    except OSError:
        # Another run has built the same folder meanwhile; both are equal, so use its folder.
        if _problem(final) is not None:
            raise


def _facts(path: Path) -> list[int]:
    # The checksum covers only the beginning, so that starting a run does not read terabytes. Truncated files differ in
    # size.
    with open(path, "rb") as file:
        return [path.stat().st_size, zlib.crc32(file.read(_CHECKED_BYTES))]


def temporary_name(final: str) -> str:
    """Return a name beside ``final`` that no other writer uses."""
    return f"{final}{_mark()}{os.getpid()}"


def remove_leftovers(final: str) -> None:
    """Remove files and folders with temporary names of ``final`` whose writers on this machine have ended."""
    path = Path(final).absolute()
    start = path.name + _mark()
    for item in path.parent.glob(f"{_escaped(start)}*"):
        pid = item.name.removeprefix(start).split(".")[0]
        with suppress(OSError):
            if pid.isdigit() and not _alive(int(pid)) and time.time() - item.stat().st_mtime > _LEFT_ALONE_S:
                shutil.rmtree(item) if item.is_dir() else item.unlink()


def _mark() -> str:
    return f".tmp-{socket.gethostname()}-"


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
