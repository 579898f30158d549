"""Who sends which elements to the right neighbour, in which order: the ring algorithm as arithmetic.

FT-HSDP, section 4.2: the tensor is cut into partitions of at most S x C x N bytes. Within one, 2N-2 steps: in the first
N-1 (reduce-scatter) each member sends a part that it has just added its own to, beginning with the part of its own
index; then (all-gather) the finished parts go round. A part is sent in C chunks, so that a chunk travels on while the
next one is received.
"""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Item:
    """One chunk that goes out and the chunk that comes in beside it, as ranges of elements of the tensor.

    Attributes:
        step: 0 to 2N-3, within the partition.
        send, receive: (first, behind the last) element.
        needs: index of the item that must have been received before this one is sent; -1: none.
    """

    step: int
    send: tuple[int, int]
    receive: tuple[int, int]
    needs: int


@lru_cache(maxsize=256)
def items(elements: int, members: int, me: int, chunk: int, chunks: int) -> tuple[Item, ...]:
    """All of one all-reduce, in the order in which they are sent and received; the two orders are the same.

    Args:
        elements: of the tensor. members: N, at least 2. me: own index in the ring.
        chunk: S in elements. chunks: C.

    Item i of a member is received as item i of its right neighbour, with the same number of elements.
    """
    found: list[Item] = []
    for first in range(0, elements, chunk * chunks * members):
        behind = min(first + chunk * chunks * members, elements)
        found += _partition(first, behind, members, me, chunk, base=len(found))
    return tuple(found)


def _partition(first: int, behind: int, members: int, me: int, chunk: int, base: int) -> list[Item]:
    bounds = [first + (behind - first) * part // members for part in range(members + 1)]
    largest = max(bounds[part + 1] - bounds[part] for part in range(members))
    count = -(-largest // chunk)

    def piece(part: int, index: int) -> tuple[int, int]:
        low, size = bounds[part], bounds[part + 1] - bounds[part]
        return low + size * index // count, low + size * (index + 1) // count

    found = []
    for step in range(2 * members - 2):
        out, into = (me - step) % members, (me - step - 1) % members
        for index in range(count):
            needs = base + len(found) - count if step else -1
            found.append(Item(step, piece(out, index), piece(into, index), needs))
    return found
