"""Compute a logical rank's coordinates in the parallel grid of its run, and the ranks that hold the same shards.

The grid has the dimensions of megatron-core: tensor (tp), context (cp), data (dp) and pipeline parallelism (pp), and
for experts expert-tensor (etp), expert (ep) and expert-data parallelism (edp).
"""

from collections.abc import Mapping
from functools import lru_cache


def coordinates(rank: int, layout: Mapping[str, int | None], pipeline_first: bool) -> dict[str, int]:
    """Return the coordinates of ``rank``: ``tp``, ``cp``, ``dp``, ``pp``, and with expert parallelism ``etp``, ``ep``,
    ``edp``.

    Args:
        rank: the logical rank.
        layout: sizes as in a checkpoint (``tp``, ``cp``, ``ep``, ``etp``, ``pp``, ``world_size``); 1 if absent.
        pipeline_first: --use-tp-pp-dp-mapping: the pipeline dimension varies faster than data parallelism.
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
    """Decode a rank in mixed radix: the first dimension varies fastest, as in megatron-core's ``RankGenerator``."""
    held = pp
    for _, size in inner:
        held *= size
    outer = ((replicas, max(1, layout["world_size"] // held)), ("pp", pp))
    place = {}
    for name, size in (*inner, *(reversed(outer) if pipeline_first else outer)):
        rank, place[name] = divmod(rank, size)
    return place


def copies(rank: int, layout: Mapping[str, int | None], pipeline_first: bool, expert: bool) -> list[int]:
    """Return the other ranks that hold the same shard of a parameter as ``rank``: its data-parallel replicas.

    Args:
        rank: the logical rank.
        layout: sizes as for ``coordinates``.
        pipeline_first: as for ``coordinates``.
        expert: whether the parameter belongs to an expert; with expert parallelism its replicas are other ranks.
    """
    spread = expert and (layout.get("ep") or 1) > 1
    group = _groups(tuple(sorted(layout.items())), pipeline_first, spread)
    return [other for other in group[rank] if other != rank]


@lru_cache
def _groups(layout: tuple[tuple[str, int | None], ...], pipeline_first: bool, spread: bool) -> list[list[int]]:
    """Return for every rank the list of its replicas, itself included."""
    sizes, names = dict(layout), ("etp", "ep", "pp") if spread else ("tp", "pp")
    groups: dict[tuple, list[int]] = {}
    held = []
    for rank in range(sizes["world_size"]):
        place = coordinates(rank, sizes, pipeline_first)
        group = groups.setdefault(tuple(place[name] for name in names), [])
        group.append(rank)
        held.append(group)
    return held
