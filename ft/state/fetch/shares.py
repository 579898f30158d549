"""Distribution of the bytes of a state over its sources, as pure functions that return decisions with their reasons."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

Piece = range
"""Range of bytes of the layout that is requested at once."""

_ALIGNMENT = 64
_PIECES_PER_SHARE = 8
_SMALLEST, _LARGEST = 4 << 20, 256 << 20
_SLOW = 2
"""A source is slow if another one has delivered this many times its bytes in the same time."""
_SETTLED_S = 0.25
"""Seconds before which such differences say more about threads and connections than about sources."""


@dataclass(frozen=True)
class Take:
    """Fetch ``piece``, which was assigned to ``owner``, from the source that asks."""

    piece: Piece
    owner: str


@dataclass(frozen=True)
class Wait:
    """Nothing to do now, but another source may still leave a piece."""


@dataclass(frozen=True)
class End:
    """Nothing is left to do for any source."""


def cut(nbytes: int, sources: Sequence[str]) -> dict[str, list[Piece]]:
    """Cut the state into shares of equal length, by bytes and not by tensors, and each share into pieces in order.

    When a source is lost, only the piece that it was delivering is fetched again.
    """
    bounds = [min(nbytes, _aligned(nbytes * i // len(sources))) for i in range(len(sources))] + [nbytes]
    shares = {}
    for source, start, stop in zip(sources, bounds[:-1], bounds[1:], strict=True):
        size = _aligned(min(_LARGEST, max(_SMALLEST, (stop - start) // _PIECES_PER_SHARE)))
        shares[source] = [range(begin, min(begin + size, stop)) for begin in range(start, stop, size)]
    return shares


def choose(
    source: str, age_s: float, pending: Mapping[str, Sequence[Piece]], at_work: Set[str], delivered: Mapping[str, int]
) -> tuple[Take | Wait | End, str]:
    """Decide what ``source``, which is idle, does next; return the decision and its reason.

    Args:
        source: the idle source.
        age_s: seconds since the fetch began.
        pending: pieces that were not begun, by the source that they are assigned to.
        at_work: other sources that are delivering a piece.
        delivered: bytes delivered so far, by source.
    """
    if pending[source]:
        return Take(pending[source][0], source), "its own share"
    behind = [other for other in pending if pending[other] and delivered[other] * _SLOW < delivered[source]]
    if behind and age_s >= _SETTLED_S:
        owner = max(behind, key=lambda other: len(pending[other]))
        reason = f"{owner} has delivered {delivered[owner]} bytes while {source} delivered {delivered[source]}"
        return Take(pending[owner][-1], owner), reason
    if at_work or any(pending.values()):
        return Wait(), "others are at work on the rest"
    return End(), "everything is there"


def inherit(
    leaver: str, begun: Piece | None, pending: Mapping[str, Sequence[Piece]]
) -> tuple[dict[str, list[Piece]], str]:
    """Reassign the pieces of ``leaver``, including the one it had begun, to the other sources; return them and the
    reason.
    """
    left = ([begun] if begun else []) + list(pending[leaver])
    after = {source: list(pieces) for source, pieces in pending.items() if source != leaver}
    for piece in left if after else []:
        heir = min(after, key=lambda source: sum(map(len, after[source])))
        after[heir].append(piece)
    return after, f"{len(left)} pieces of {leaver} go round {len(after)} others"


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
