"""Where a logical rank is in the grid of its run, and which ranks hold the same shards."""

from collections.abc import Mapping
from functools import lru_cache


def coordinates(rank: int, layout: Mapping[str, int | None], pipeline_first: bool) -> dict[str, int]:
    """The place of ``rank``: ``tp``, ``cp``, ``dp``, ``pp``, and ``etp``, ``ep``, ``edp`` where experts are spread.

    Args:
        layout: sizes, as checkpoints have them (``tp``, ``cp``, ``ep``, ``etp``, ``pp``, ``world_size``); 1 if absent.
        pipeline_first: --use-tp-pp-dp-mapping: ranks are counted along the pipeline before data parallelism.
    """
    size = {name: layout.get(name) or 1 for name in ("tp", "cp", "ep", "pp")}
    size["etp"] = layout.get("etp") or size["tp"]
    place = _place(rank, (("tp", size["tp"]), ("cp", size["cp"])), "dp", size["pp"], layout, pipeline_first)
    if size["ep"] > 1:
        place |= _place(rank, (("etp", size["etp"]), ("ep", size["ep"])), "edp", size["pp"], layout, pipeline_first)
    return place


def _place(
    rank: int, inner: tuple[tuple[str, int], ...], replicas: str, pp: int, layout: Mapping, pipeline_first: bool
) -> dict[str, int]:
    """Mixed radix: the first dimension counts fastest, as in megatron-core's ``RankGenerator``."""
    held = pp
    for _, size in inner:
        held *= size
    outer = ((replicas, max(1, layout["world_size"] // held)), ("pp", pp))
    place = {}
    for name, size in (*inner, *(reversed(outer) if pipeline_first else outer)):
        rank, place[name] = divmod(rank, size)
    return place


def copies(rank: int, layout: Mapping[str, int | None], pipeline_first: bool, expert: bool) -> list[int]:
    """The other ranks that hold the shard of a parameter that ``rank`` holds: its data-parallel replicas.

    Args:
        expert: the parameter is one of an expert that is spread over expert-parallel ranks.
    """
    spread = expert and (layout.get("ep") or 1) > 1
    group = _groups(tuple(sorted(layout.items())), pipeline_first, spread)
    return [other for other in group[rank] if other != rank]


@lru_cache
def _groups(layout: tuple[tuple[str, int | None], ...], pipeline_first: bool, spread: bool) -> list[list[int]]:
    """Every rank's replicas, and itself."""
    sizes, names = dict(layout), ("etp", "ep", "pp") if spread else ("tp", "pp")
    groups: dict[tuple, list[int]] = {}
    held = []
    for rank in range(sizes["world_size"]):
        place = coordinates(rank, sizes, pipeline_first)
        group = groups.setdefault(tuple(place[name] for name in names), [])
        group.append(rank)
        held.append(group)
    return held
