"""Who holds whose peer copies."""

from collections.abc import Sequence


def peers_of(rank: int, dp_ranks: Sequence[int], k: int, world: int) -> list[int]:
    """The logical ranks that hold a copy of ``rank``'s snapshot (section V-B): the next ``k`` of its DP ring.

    Without data parallelism they are the next ranks of the world; then the copy has to hold all of the state, because
    nobody else has any of it.

    Args:
        dp_ranks: logical ranks that hold the same part of the model, in ring order, ``rank`` among them.
        world: number of logical ranks.

    Returns:
        at most ``k`` ranks, fewer where the ring is shorter, none in a world of one.
    """
    ring = list(dp_ranks) if len(dp_ranks) > 1 else list(range(world))
    place = ring.index(rank)
    return [ring[(place + distance) % len(ring)] for distance in range(1, min(k, len(ring) - 1) + 1)]
