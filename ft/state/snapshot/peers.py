"""Which ranks hold a rank's peer copies."""

from collections.abc import Sequence

from ft.state.placement.assign import ring_of


def peers_of(rank: int, dp_ranks: Sequence[int], k: int, world: int) -> list[int]:
    """Return the logical ranks that hold a copy of ``rank``'s snapshot (DEADPOOL, section V-B), if all nodes are alike.

    They are the next ``k`` ranks of its data-parallel ring. Without data parallelism they are the next ranks of the
    world; the copy then has to hold the whole state, because no other rank has any of it. For nodes in several failure
    domains see :func:`ft.state.placement.assign.place`.

    Args:
        rank: the owner's logical rank.
        dp_ranks: logical ranks that hold the same part of the model, in ring order, with ``rank``.
        k: number of copies.
        world: number of logical ranks.

    Returns:
        at most ``k`` ranks, fewer if the ring is shorter, none in a world of one.
    """
    return ring_of(rank, dp_ranks, k, world)
