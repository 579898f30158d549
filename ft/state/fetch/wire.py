"""Wire protocol between a fetching rank and a source: HTTP/1.1, with one connection for a whole fetch.

    GET /state?step=&lineage=                        JSON: whose state, its table of tensors, its envelope
    GET /bytes?step=&lineage=&digest=&start=&stop=   a stream of the bytes [start, stop) of the layout, see below
    GET /envelope?step=&lineage=                     JSON: the envelope alone

    stream:  block | block | ... | end
    block:   "FTSB" | checksum u32 | up to 1 MiB        (checksum: ft.state.snapshot.layout.checksum, of the bytes sent)
    end:     "FTSE" | 0 u32 | proof, 32 bytes           all blocks were sent while the state was unchanged
             "FTSG" | 0 u32 | proof, 32 bytes           the state was withdrawn: the whole stream is invalid

The handshake of :mod:`ft.net.handshake` is repeated with every request. The first request on a connection is answered
with 401 and the source's challenge. Every later request carries the client's challenge, a count, and a proof over the
count and the target. An answer carries a proof over the same, its status and its content (for a stream: over the
checksums of its blocks). So each end knows that the other belongs to the run, and nothing can be replayed.

Other answers: 400 (no such request), 401 (no proof), 404, 409 (JSON with "reason": that step is not held here).
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
"""Name of the protocol in the handshake, and of the authorization scheme in HTTP."""
PROOF_HEADER = "FT-Proof"
MAX_JSON = 64 << 20
NOT_HELD = 409


def state_target(step: int, lineage: int) -> str:
    return "/state?" + urlencode({"step": step, "lineage": lineage})


def envelope_target(step: int, lineage: int) -> str:
    return "/envelope?" + urlencode({"step": step, "lineage": lineage})


def bytes_target(step: int, lineage: int, digest: str, start: int, stop: int) -> str:
    return "/bytes?" + urlencode({"step": step, "lineage": lineage, "digest": digest, "start": start, "stop": stop})


def stream_length(start: int, stop: int) -> int:
    """Return the length of the stream of [start, stop) in bytes, including block headers and the end."""
    blocks = -(-(stop - start) // BLOCK)
    return stop - start + (blocks + 1) * HEAD.size + PROOF_BYTES


def encode(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def decode(data: bytes) -> dict[str, Any]:
    """Decode the JSON object in ``data``.

    Raises:
        ValueError: it is not a JSON object, or has another format version.
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
