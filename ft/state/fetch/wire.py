"""Wire protocol by which a rank of a returning replica fetches its state from the same rank of a healthy replica.

The protocol is HTTP/1.1, with one connection for a whole fetch. The healthy rank is the *source*. A state is identified
by its step and its lineage, the number of the quorum in which that step was committed. The envelope is everything but
the tensors (counters, scheduler, RNG states), as JSON.

    GET /state?step=&lineage=                        JSON: replica and rank of the state, table of tensors, envelope
    GET /bytes?step=&lineage=&digest=&start=&stop=   a stream of the bytes [start, stop) of all tensors, laid out one
                                                     after the other as in the table; digest: that of the table
    GET /envelope?step=&lineage=                     JSON: the envelope alone

    stream:  block | block | ... | end
    block:   "FTSB" | checksum u32 | up to 1 MiB        (ft.state.snapshot.layout.checksum of the bytes in the block)
    end:     "FTSE" | 0 u32 | proof, 32 bytes           all blocks were sent while the state was unchanged
             "FTSG" | 0 u32 | proof, 32 bytes           the state was withdrawn: the whole stream is invalid

Every request is authenticated as in :mod:`ft.net.handshake`. The source answers the first request of a connection with
status 401 and its challenge. Every later request carries the client's challenge, a sequence number, and a proof (HMAC
keyed with the run's token) over the sequence number and the request target. An answer carries a proof over the same
values, its status and its content (of a stream: the checksums of its blocks). Thus each end knows that the other one
belongs to the run, and no request or answer can be replayed.

Other answers: 400 (no such request), 401 (no valid proof), 404, 409 (JSON with "reason": that state is not held here).
"""

import json
import struct
from typing import Any
from urllib.parse import urlencode

from ft.net.handshake import PROOF_BYTES
from ft.state.snapshot.layout import CHUNK, FORMAT

BLOCK = CHUNK
HEAD = struct.Struct("<4sI")
BLOCK_TAG, END_TAG, GONE_TAG = b"FTSB", b"FTSE", b"FTSG"
PURPOSE = SCHEME = "ft-fetch-2"
"""Name of this protocol in the handshake (``PURPOSE``) and of the HTTP authorization scheme (``SCHEME``)."""
PROOF_HEADER = "FT-Proof"
MAX_JSON = 64 << 20
NOT_HELD = 409


def state_target(step: int, lineage: int) -> str:
    """Return the target of the request for the description of a state."""
    return "/state?" + urlencode({"step": step, "lineage": lineage})


def envelope_target(step: int, lineage: int) -> str:
    """Return the target of the request for the envelope of a state."""
    return "/envelope?" + urlencode({"step": step, "lineage": lineage})


def bytes_target(step: int, lineage: int, digest: str, start: int, stop: int) -> str:
    """Return the target of the request for the bytes [start, stop) of a state."""
    return "/bytes?" + urlencode({"step": step, "lineage": lineage, "digest": digest, "start": start, "stop": stop})


def stream_length(start: int, stop: int) -> int:
    """Return the length in bytes of the stream for [start, stop), including the headers of blocks and the end."""
    blocks = -(-(stop - start) // BLOCK)
    return stop - start + (blocks + 1) * HEAD.size + PROOF_BYTES


def encode(content: dict[str, Any]) -> bytes:
    """Encode a JSON object as bytes."""
    return json.dumps(content, separators=(",", ":")).encode()


def decode(data: bytes) -> dict[str, Any]:
    """Decode the JSON object in ``data``.

    Raises:
        ValueError: ``data`` is not a JSON object, or it has another format version.
    """
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("JSON that is no object")
    if content.get("format") != FORMAT:
        raise ValueError(f"format {content.get('format')!r}; this version speaks format {FORMAT}")
    return content
