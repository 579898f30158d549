"""Who holds whose peer copies."""

from collections.abc import Sequence

from ft.state.placement.assign import ring_of


def peers_of(rank: int, dp_ranks: Sequence[int], k: int, world: int) -> list[int]:
    """The logical ranks that hold a copy of ``rank``'s snapshot (section V-B) where all nodes are alike: the next ``k``
    of its DP ring.

    Without data parallelism they are the next ranks of the world; then the copy has to hold all of the state, because
    nobody else has any of it. Where nodes and failure domains count: :func:`ft.state.placement.assign.place`.

    Args:
        dp_ranks: logical ranks that hold the same part of the model, in ring order, ``rank`` among them.
        world: number of logical ranks.

    Returns:
        at most ``k`` ranks, fewer where the ring is shorter, none in a world of one.
    """
    return ring_of(rank, dp_ranks, k, world)
