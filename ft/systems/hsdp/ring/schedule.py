"""Schedule of FT-HSDP's ring all-reduce: which elements each member sends to its right neighbour, in which order.

Follows FT-HSDP, section 4.2. With N members, chunks of S elements and C chunks per member, the tensor is cut into
partitions of at most S x C x N elements, and each partition into N parts. A partition takes 2N-2 steps. In the first
N-1 steps (reduce-scatter), each member sends the part to which it has just added its own values, beginning with the
part of its own index. In the other steps (all-gather), the finished parts are passed around the ring. A part is sent in
C chunks, so that one chunk is forwarded while the next one is received.
"""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Item:
    """One chunk to send and the chunk to receive at the same time, as ranges of elements of the tensor.

    Attributes:
        step: step within the partition, 0 to 2N-3.
        send: (first element, end) of the chunk to send; the end is exclusive.
        receive: (first element, end) of the chunk to receive; the end is exclusive.
        needs: index of the item that must have been received before this one is sent; -1: none.
    """

    step: int
    send: tuple[int, int]
    receive: tuple[int, int]
    needs: int


@lru_cache(maxsize=256)
def items(elements: int, members: int, me: int, chunk: int, chunks: int) -> tuple[Item, ...]:
    """Return all items of one all-reduce, in the order in which their chunks are sent and received.

    Item i of a member is received as item i of its right neighbour, with the same number of elements.

    Args:
        elements: number of elements of the tensor.
        members: N, the number of members, at least 2.
        me: index of this member in the ring.
        chunk: S, the size of a chunk in elements.
        chunks: C, the number of chunks of a part.
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
