"""Which step to restore, and where each logical rank's state of it comes from (paper, section VI-E)."""

from collections.abc import Collection, Mapping

from ft.job.messages import Holdings, Source


def choose(
    ranks: Collection[int],
    holdings: Mapping[int, Holdings],
    dp_peers: Mapping[int, list[int]],
    spoiled: Collection[int] = (),
    complete: Collection[int] = (),
) -> tuple[int | None, dict[int, Source], str]:
    """The largest step of which every logical rank has a complete source.

    Args:
        ranks: all logical ranks. holdings: what the workers in the seats hold, by logical rank; who is not in it has
            nothing. dp_peers: for each rank those that hold the same part of the model, itself among them.
        spoiled: steps that were tried and found unusable.
        complete: ranks a peer copy of whose state holds all of it, so that no peer is needed beside its holder.

    Returns:
        (step, sources by rank, ""); or (None, {}, why there is none).
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
    """Steps of which anybody holds anything, the newest first."""
    steps = {step for held in holdings.values() for some in (held.own, *held.copies.values()) for step in some}
    return sorted(steps, reverse=True)


def of_step(
    step: int,
    ranks: Collection[int],
    holdings: Mapping[int, Holdings],
    dp_peers: Mapping[int, list[int]],
    complete: Collection[int] = (),
) -> tuple[dict[int, Source], list[int]]:
    """(sources of ``step`` by rank, ranks that have none, in order); arguments as of :func:`choose`."""
    sources, lacking = {}, []
    for rank in sorted(ranks):
        source = _source(rank, step, holdings, dp_peers.get(rank, [rank]), rank in complete)
        if source is None:
            lacking.append(rank)
        else:
            sources[rank] = source
    return sources, lacking


def _source(
    rank: int, step: int, holdings: Mapping[int, Holdings], peers: list[int], is_complete: bool
) -> Source | None:
    own = holdings.get(rank)
    if own is not None and step in own.own:
        return Source(rank, rank)
    holders = [r for r, held in sorted(holdings.items()) if step in held.copies.get(str(rank), ())]
    if not holders:
        return None
    others = [r for r in peers if r != rank]
    if not others:
        return Source(holders[0], holders[0])  # without data parallelism the copy has all of it
    holder = next((r for r in holders if r in others), holders[0])
    whole = [r for r in others if r in holdings and step in holdings[r].own]
    if not whole:
        return Source(holder, holder) if is_complete else None
    return Source(holder, whole[0])
