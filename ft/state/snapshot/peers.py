"""Chooses the ranks that hold a rank's peer copies (copies of its snapshot) if failure domains are ignored."""

from collections.abc import Sequence

from ft.state.placement.assign import ring_of


def peers_of(rank: int, dp_ranks: Sequence[int], k: int, world: int) -> list[int]:
    """Return the logical ranks that hold a copy of ``rank``'s snapshot (DEADPOOL, section V-B), if all nodes are alike.

    These are the next ``k`` ranks in the ring of its data-parallel group. Without data parallelism the holders are the
    next ranks of the world; the copy then has to contain the whole state, because no other rank has any of it. For
    nodes in several failure domains (racks, switches) see :func:`ft.state.placement.assign.place`.

    Args:
        rank: logical rank of the owner.
        dp_ranks: logical ranks that hold the same part of the model, in ring order, including ``rank``.
        k: number of copies.
        world: number of logical ranks.

    Returns:
        at most ``k`` ranks, fewer if the ring is shorter, none in a world of one.
    """
    return ring_of(rank, dp_ranks, k, world)
