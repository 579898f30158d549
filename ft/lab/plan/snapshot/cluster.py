"""Map logical ranks to nodes and racks, to pipeline stages and to data-parallel groups, for ``ft plan snapshot``.

A logical rank is a position in the parallel grid. A failure domain is a node or a set of nodes that fail together, such
as a rack.
"""

from collections.abc import Mapping, Sequence

import numpy

from ft.base.errors import UserError
from ft.platform.slurm import NODE, Topology
from megatron.ft_trainer.arguments.layout import Layout


def nodes_of(count: int, topology: Topology | None, hosts: Sequence[str], per_rack: int | None) -> list[dict[str, str]]:
    """Return for each node, in order, kind of failure domain -> name of the domain that contains the node.

    Args:
        count: number of nodes.
        topology: the cluster's topology, or None.
        hosts: names of the nodes in the topology; if empty, its first hosts are the nodes.
        per_rack: number of nodes in a rack, for use without a topology; None: no racks.

    Raises:
        UserError: there are too few hosts, or a host is not in the topology.
    """
    if topology is None:
        racks = {} if per_rack is None else {i: {"rack": f"r{i // per_rack}"} for i in range(count)}
        return [{NODE: f"n{i}", **racks.get(i, {})} for i in range(count)]
    names = list(hosts) or list(topology.hosts)
    if len(names) < count:
        raise UserError(
            f"there are {count} nodes, but only {len(names)} host(s)", "give more --hosts, or fewer --nodes"
        )
    return [{NODE: name, **topology.find([name], name)[1]} for name in names[:count]]


def seats(nodes: Sequence[Mapping[str, str]], per_node: int) -> dict[int, Mapping[str, str]]:
    """Return logical rank -> kind -> name of the failure domain; ranks fill the nodes in order, as with torchrun."""
    return {rank: nodes[rank // per_node] for rank in range(len(nodes) * per_node)}


def stage_of(grid: Layout, pipeline_first: bool) -> list[int]:
    """Return the pipeline stage of each logical rank (``pipeline_first``: --use-tp-pp-dp-mapping)."""
    inner, outer = grid.tp * grid.cp, grid.dp
    if pipeline_first:
        return [rank // inner % grid.pp for rank in range(grid.world_size)]
    return [rank // (inner * outer) for rank in range(grid.world_size)]


def data_parallel_groups(grid: Layout, pipeline_first: bool) -> list[list[int]]:
    """Return the groups of ranks that hold the same part of the model, in ring order.

    Ranks are ordered TP, CP, DP, PP as in megatron-core or, with ``pipeline_first``, TP, CP, PP, DP.
    """
    if pipeline_first:
        ranks = numpy.arange(grid.world_size).reshape(grid.dp, grid.pp, grid.cp, grid.tp).transpose(1, 3, 0, 2)
    else:
        ranks = numpy.arange(grid.world_size).reshape(grid.pp, grid.dp, grid.cp, grid.tp).transpose(0, 3, 1, 2)
    return ranks.reshape(-1, grid.dp * grid.cp).tolist()
