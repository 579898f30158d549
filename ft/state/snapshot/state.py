"""The content of a snapshot of a rank's training state, and the encoding of the small part that is not tensors."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ft.base import bounded_json
from ft.base.errors import FallbackError

OWNED, REPLICATED = "owned", "replicated"
"""Names of the two sections of a snapshot's tensors. Only the section ``OWNED`` is sent to peers."""

Sections = Mapping[str, Mapping[str, torch.Tensor]]
"""Name of a section -> name -> live tensor."""

_LENGTH = struct.Struct("<I")


@dataclass
class RankState:
    """One rank's state at a committed step (DEADPOOL, section V-B).

    The tensors are not copies but the live ones. A step is committed when all ranks have finished its optimizer update.

    Attributes:
        owned: tensors that no other rank has, by name.
        replicated: tensors that every data-parallel peer has bit for bit, by name.
        envelope: JSON values that belong to the state.
        blobs: byte strings that belong to the state, such as the states of random number generators.
    """

    owned: Mapping[str, torch.Tensor] = field(default_factory=dict)
    replicated: Mapping[str, torch.Tensor] = field(default_factory=dict)
    envelope: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def sections(self) -> dict[str, Mapping[str, torch.Tensor]]:
        return {OWNED: self.owned, REPLICATED: self.replicated}


def pack_meta(envelope: dict[str, Any], blobs: dict[str, bytes]) -> bytes:
    """Encode envelope and blobs as bytes: length of the header, header (JSON), blobs one after another."""
    head = json.dumps(
        {"envelope": envelope, "blobs": {name: len(blob) for name, blob in blobs.items()}}, separators=(",", ":")
    ).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *blobs.values()))


def unpack_meta(data: bytes) -> RankState:
    """Decode the result of :func:`pack_meta`, and return it as a state without tensors.

    Raises:
        FallbackError: the bytes are malformed.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        at = _LENGTH.size + length
        head = bounded_json.loads(data[_LENGTH.size : at], non_finite=True)
        blobs = {}
        for name, size in head["blobs"].items():
            blobs[name] = bytes(data[at : at + size])
            at += size
        if at != len(data):
            raise ValueError(f"{len(data)} bytes, {at} announced")
        return RankState(envelope=head["envelope"], blobs=blobs)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise FallbackError(f"not the envelope of a snapshot ({type(error).__name__}: {error})") from error
