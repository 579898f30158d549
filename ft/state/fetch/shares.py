"""Load balancing of a state fetch: distributes the bytes of a state over its sources, as pure functions.

A source is a rank of a healthy replica that sends the state. The functions return decisions with their reasons.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

Piece = range
"""Range of bytes of the state that is requested at once."""

_ALIGNMENT = 64
_PIECES_PER_SHARE = 8
_SMALLEST, _LARGEST = 4 << 20, 256 << 20
_SLOW = 2
"""A source is slow if another source has delivered more than this many times its bytes in the same time."""
_SETTLED_S = 0.25
"""Seconds after the start before which no source counts as slow: early differences come from threads and connecting."""


@dataclass(frozen=True)
class Take:
    """Decision: fetch ``piece``, which was assigned to the source ``owner``, from the idle source."""

    piece: Piece
    owner: str


@dataclass(frozen=True)
class WaitForPiece:
    """Decision: wait. No piece is free now, but if another source fails, its pieces are reassigned."""


@dataclass(frozen=True)
class End:
    """Decision: end. All pieces were delivered."""


def cut(nbytes: int, sources: Sequence[str]) -> dict[str, list[Piece]]:
    """Return source -> pieces of its share. Shares have equal length in bytes, regardless of tensor boundaries.

    Pieces limit the loss when a source fails: only the piece that it was delivering is fetched again.
    """
    bounds = [min(nbytes, _aligned(nbytes * i // len(sources))) for i in range(len(sources))] + [nbytes]
    shares = {}
    for source, start, stop in zip(sources, bounds[:-1], bounds[1:], strict=True):
        size = _aligned(min(_LARGEST, max(_SMALLEST, (stop - start) // _PIECES_PER_SHARE)))
        shares[source] = [range(begin, min(begin + size, stop)) for begin in range(start, stop, size)]
    return shares


def choose(
    source: str, age_s: float, pending: Mapping[str, Sequence[Piece]], at_work: Set[str], delivered: Mapping[str, int]
) -> tuple[Take | WaitForPiece | End, str]:
    """Decide what ``source``, which is idle, does next; return the decision and its reason.

    Args:
        source: the idle source.
        age_s: seconds since the fetch began.
        pending: source -> pieces assigned to it that were not begun.
        at_work: other sources that are delivering a piece.
        delivered: source -> bytes delivered so far.
    """
    if pending[source]:
        return Take(pending[source][0], source), "its own share"
    behind = [other for other in pending if pending[other] and delivered[other] * _SLOW < delivered[source]]
    if behind and age_s >= _SETTLED_S:
        owner = max(behind, key=lambda other: len(pending[other]))
        reason = f"{owner} has delivered {delivered[owner]} bytes while {source} delivered {delivered[source]}"
        return Take(pending[owner][-1], owner), reason
    if at_work or any(pending.values()):
        return WaitForPiece(), "others are at work on the rest"
    return End(), "everything is there"


def inherit(
    leaver: str, begun: Piece | None, pending: Mapping[str, Sequence[Piece]]
) -> tuple[dict[str, list[Piece]], str]:
    """Reassign the pieces of a source that has failed to the other sources.

    Args:
        leaver: the source that has failed.
        begun: the piece that this source had begun, if any; it is fetched again.
        pending: source -> pieces assigned to it that were not begun.

    Returns:
        (``pending`` of the other sources after the reassignment, the reason).
    """
    left = ([begun] if begun else []) + list(pending[leaver])
    after = {source: list(pieces) for source, pieces in pending.items() if source != leaver}
    for piece in left if after else []:
        heir = min(after, key=lambda source: sum(map(len, after[source])))
        after[heir].append(piece)
    return after, f"{len(left)} pieces of {leaver} go round {len(after)} others"


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
