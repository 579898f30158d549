"""Which step to restore, and where each logical rank's state of it comes from (paper, section VI-E)."""

from collections.abc import Collection, Mapping

from ft.messages import Holdings, Source


def choose(
    ranks: Collection[int], holdings: Mapping[int, Holdings], dp_peers: Mapping[int, list[int]]
) -> tuple[int | None, dict[int, Source], str]:
    """The largest step of which every logical rank has a complete source.

    Args:
        ranks: all logical ranks. holdings: what the workers that kept their seats hold, by logical rank; who is not in
            it has nothing. dp_peers: for each rank those that hold the same part of the model, itself among them.

    Returns:
        (step, sources by rank, ""); or (None, {}, why there is none).
    """
    steps = sorted({step for held in holdings.values() for step in held.own}, reverse=True)
    missing = ""
    for step in steps:
        sources, lacking = {}, []
        for rank in sorted(ranks):
            source = _source(rank, step, holdings, dp_peers.get(rank, [rank]))
            if source is None:
                lacking.append(rank)
            else:
                sources[rank] = source
        if not lacking:
            return step, sources, ""
        missing = missing or f"no copy of step {step} of logical rank(s) {', '.join(map(str, lacking))} is left"
    return None, {}, missing or "no worker holds a snapshot"


def _source(rank: int, step: int, holdings: Mapping[int, Holdings], peers: list[int]) -> Source | None:
    own = holdings.get(rank)
    if own is not None and step in own.own:
        return Source(rank, rank)
    copy = next((r for r, held in sorted(holdings.items()) if step in held.copies.get(str(rank), ())), None)
    if copy is None:
        return None
    others = [r for r in peers if r != rank]
    if not others:
        return Source(copy, copy)  # without data parallelism the copy has all of it
    peer = next((r for r in others if r in holdings and step in holdings[r].own), None)
    return None if peer is None else Source(copy, peer)
