"""Bit flips and hostile content in checkpoints that pass verification: the checksums match."""

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron.ft_trainer.checkpointing import inventory


def places(checkpoint: Path) -> dict:
    """Return where each shard is stored: (key, offsets) -> (file, start, length)."""
    found = FileSystemReader(checkpoint).read_metadata().storage_data
    return {(i.fqn, tuple(i.offset or ())): (s.relative_path, s.offset, s.length) for i, s in found.items()}


def tensor(checkpoint: Path, name: str, offsets: tuple) -> torch.Tensor:
    """Load one shard."""
    file, start, length = places(checkpoint)[name, offsets]
    return torch.load(io.BytesIO((checkpoint / file).read_bytes()[start : start + length]))


def put(checkpoint: Path, name: str, offsets: tuple, value) -> int:
    """Replace a shard by ``value`` of the same stored length; return the rank that would have written it."""
    file, start, length = places(checkpoint)[name, offsets]
    made = io.BytesIO()
    torch.save(value, made)
    if made.tell() != length:
        raise ValueError(f"{made.tell()} bytes for {length}")
    data = bytearray((checkpoint / file).read_bytes())
    data[start : start + length] = made.getvalue()
    (checkpoint / file).write_bytes(data)
    if (checkpoint / inventory.MANIFEST).exists():
        resign(checkpoint)
    return int(file.split("_")[2])


def flip(checkpoint: Path, name: str, offsets: tuple, element: int, bit: int) -> int:
    """Flip one bit of one element of a shard; return the rank that would have written it."""
    shard = tensor(checkpoint, name, offsets)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[shard.itemsize]
    bits = shard.view(-1).view(integers)
    one = 1 << bit
    bits[element] ^= one - (1 << 8 * shard.itemsize) if bit == 8 * shard.itemsize - 1 else one
    return put(checkpoint, name, offsets, shard)


def resign(checkpoint: Path, **changes) -> None:
    """Update the checksums in the manifest. ``changes``: new values of its fields."""
    manifest = inventory.read_manifest(checkpoint)
    manifest.files = {name: inventory.checksum(checkpoint / name) for name in manifest.files}
    for name, value in changes.items():
        setattr(manifest, name, value)
    (checkpoint / inventory.MANIFEST).write_text(manifest.to_json())


class Hostile:
    """Is pickled as a call that makes the folder ``marker``."""

    def __init__(self, marker: Path):
        self._marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self._marker,)


def poison(checkpoint: Path, where: str, marker: Path) -> None:
    """Replace a file of a checkpoint by one that makes the folder ``marker`` when it is unpickled without restriction.

    Args:
        checkpoint: folder of the checkpoint.
        where: name of the file; "object": an object that is stored beside the tensors.
        marker: the folder.
    """
    if where == ".metadata":
        (checkpoint / where).write_bytes(pickle.dumps(Hostile(marker)))
    elif where == "object":
        metadata = FileSystemReader(checkpoint).read_metadata()
        (first, *_) = (key for key in metadata.storage_data if "rng_state" in key.fqn)
        file = checkpoint / metadata.storage_data[first].relative_path
        start = file.stat().st_size
        with file.open("ab") as stream:
            torch.save(Hostile(marker), stream)
        place = replace(metadata.storage_data[first], offset=start, length=file.stat().st_size - start)
        metadata.storage_data.update(dict.fromkeys((k for k in metadata.storage_data if "rng_state" in k.fqn), place))
        (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    else:
        torch.save(Hostile(marker), checkpoint / where)
    if (checkpoint / inventory.MANIFEST).exists():
        resign(checkpoint)
