"""Which logical rank is on which node of which racks, and who are data-parallel peers."""

from collections.abc import Mapping, Sequence

import numpy

from ft.base.errors import UserError
from ft.platform.topology import NODE, Topology
from megatron.training.arguments.layout import Layout


def nodes_of(count: int, topology: Topology | None, hosts: Sequence[str], per_rack: int | None) -> list[dict[str, str]]:
    """kind -> name for each node, in order.

    Args:
        topology: with the hosts in ``hosts``, or its own first ones. per_rack: nodes in a rack, without a topology.

    Raises:
        UserError: there are too few hosts, or one is not in the topology.
    """
    if topology is None:
        racks = {} if per_rack is None else {i: {"rack": f"r{i // per_rack}"} for i in range(count)}
        return [{NODE: f"n{i}", **racks.get(i, {})} for i in range(count)]
    names = list(hosts) or list(topology.hosts)
    if len(names) < count:
        raise UserError(
            f"{count} nodes, but {len(names)} host(s) to put them on", "give more --hosts, or fewer --nodes"
        )
    return [{NODE: name, **topology.find([name], name)[1]} for name in names[:count]]


def seats(nodes: Sequence[Mapping[str, str]], per_node: int) -> dict[int, Mapping[str, str]]:
    """Logical rank -> kind -> name: nodes in order, as torchrun."""
    return {rank: nodes[rank // per_node] for rank in range(len(nodes) * per_node)}


def stage_of(grid: Layout, pipeline_first: bool) -> list[int]:
    """The pipeline stage of each logical rank. ``pipeline_first``: --use-tp-pp-dp-mapping."""
    inner, outer = grid.tp * grid.cp, grid.dp
    if pipeline_first:
        return [rank // inner % grid.pp for rank in range(grid.world_size)]
    return [rank // (inner * outer) for rank in range(grid.world_size)]


def data_parallel_groups(grid: Layout, pipeline_first: bool) -> list[list[int]]:
    """Groups of ranks that hold the same part of the model, in ring order; core's orders TP, CP, DP, PP and TP, CP, PP,
    DP."""
    if pipeline_first:
        ranks = numpy.arange(grid.world_size).reshape(grid.dp, grid.pp, grid.cp, grid.tp).transpose(1, 3, 0, 2)
    else:
        ranks = numpy.arange(grid.world_size).reshape(grid.pp, grid.dp, grid.cp, grid.tp).transpose(0, 3, 1, 2)
    return ranks.reshape(-1, grid.dp * grid.cp).tolist()
