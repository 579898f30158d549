"""Choice of the step to restore and of the source of each logical rank's state (DEADPOOL, section VI-E)."""

from collections.abc import Collection, Mapping

from ft.job.messages import Holdings, Source


def choose(
    ranks: Collection[int],
    holdings: Mapping[int, Holdings],
    dp_peers: Mapping[int, list[int]],
    spoiled: Collection[int] = (),
    complete: Collection[int] = (),
) -> tuple[int | None, dict[int, Source], str]:
    """Return the largest step for which every logical rank has a complete source.

    A snapshot is one rank's state at a committed step, in host memory; a peer copy is the copy of it on another rank.

    Args:
        ranks: all logical ranks.
        holdings: logical rank -> the snapshots in the memory of its worker. A rank that is missing here holds none.
        dp_peers: logical rank -> the ranks that hold the same part of the model, including the rank itself.
        spoiled: steps that were tried and turned out to be unusable.
        complete: ranks whose peer copies hold all of their state, so that the holder of a copy is the only source
            needed.

    Returns:
        (step, logical rank -> source, ""), or (None, {}, reason) if there is no such step.
    """
    missing = f"step(s) {', '.join(map(str, spoiled))} are unusable" if spoiled else ""
    for step in steps_held(holdings):
        if step in spoiled:
            continue
        sources, lacking = of_step(step, ranks, holdings, dp_peers, complete)
        if not lacking:
            return step, sources, ""
        missing = missing or f"of step {step}, nobody has all that logical rank(s) {', '.join(map(str, lacking))} need"
    return None, {}, missing or "nobody holds a snapshot"


def steps_held(holdings: Mapping[int, Holdings]) -> list[int]:
    """Return all steps for which any rank holds a snapshot or a peer copy, the newest first."""
    steps = {step for held in holdings.values() for some in (held.own, *held.copies.values()) for step in some}
    return sorted(steps, reverse=True)


def of_step(
    step: int,
    ranks: Collection[int],
    holdings: Mapping[int, Holdings],
    dp_peers: Mapping[int, list[int]],
    complete: Collection[int] = (),
) -> tuple[dict[int, Source], list[int]]:
    """Return (logical rank -> source, sorted ranks without a source) for ``step``. The arguments are those of
    :func:`choose`.
    """
    sources: dict[int, Source] = {}
    lacking, holders = [], _holders(step, holdings)
    for rank in sorted(ranks):
        source = _source(rank, step, holdings, holders.get(rank, []), dp_peers.get(rank, [rank]), rank in complete)
        if source is None:
            lacking.append(rank)
        else:
            sources[rank] = source
    return sources, lacking


def _holders(step: int, holdings: Mapping[int, Holdings]) -> dict[int, list[int]]:
    """Return logical rank -> sorted ranks whose workers hold a peer copy of its snapshot of ``step``."""
    found: dict[int, list[int]] = {}
    for holder, held in sorted(holdings.items()):
        for owner, steps in held.copies.items():
            if step in steps:
                found.setdefault(owner, []).append(holder)
    return found


def _source(
    rank: int,
    step: int,
    holdings: Mapping[int, Holdings],
    holders: list[int],
    peers: list[int],
    is_complete: bool,
) -> Source | None:
    own = holdings.get(rank)
    if own is not None and step in own.own:
        return Source(rank, rank)
    if not holders:
        return None
    others = [r for r in peers if r != rank]
    if not others:
        return Source(holders[0], holders[0])  # without data parallelism the peer copy holds the whole state
    holder = next((r for r in holders if r in others), holders[0])
    whole = [r for r in others if r in holdings and step in holdings[r].own]
    if not whole:
        return Source(holder, holder) if is_complete else None
    return Source(holder, whole[0])
