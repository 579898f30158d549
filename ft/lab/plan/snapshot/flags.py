"""Define the flags of ``ft plan snapshot``, and build from them the run for which the command plans peer copies.

A snapshot is a copy of one rank's training state in host memory, of which other ranks hold peer copies. A logical rank
is a position in the parallel grid. A failure domain is a node or a set of nodes that fail together, such as a rack.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from ft.adapters.megatron_lm import tree
from ft.adapters.megatron_lm.hooks import own_flags
from ft.base.errors import UserError
from ft.base.quantities import amount, argument, count, duration, gigabytes_per_second, positive, size, whole
from ft.lab.plan.snapshot.answer import Question
from ft.lab.plan.snapshot.loss import Failures
from ft.lab.plan.snapshot.shards import even, from_flags, shards
from ft.platform import slurm
from ft.platform.slurm import NODE, Topology, read_topology
from megatron.ft_trainer.arguments import Layout, Options, layout, parse, read

GB = 1e9
_GPU_MTBF_S = 18 * 60.0 * 100_000  # DEADPOOL, section V-C: an interruption every 18 min on 100,000 GPUs
_DOMAIN_MTBF = "730d"
_RECOVERY = "30s"  # DEADPOOL, figure 11: 17.1 to 29.8 s


@dataclass(frozen=True)
class Plan:
    """The run for which copies are planned, and further figures for the output.

    Attributes:
        question: cluster, snapshots and failure rates.
        grid: sizes of the parallel groups.
        nodes: number of nodes.
        parameters: number of parameters of the whole model.
        copies: the numbers of copies to compare.
        host_memory: bytes of a node's host memory, or None.
        expects_rack_failures: whether there are failure domains other than nodes.
        has_flags: whether the trainer's flags are known, not only the model's size.
    """

    question: Question
    grid: Layout
    nodes: int
    parameters: float
    copies: list[int]
    host_memory: float | None
    expects_rack_failures: bool
    has_flags: bool


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag to ``parser``; the trainer's own flags follow the name of its script, as with ``ft run``."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--nodes", type=count(), required=True, metavar="N", help="number of nodes that train, without standbys"
    )
    group.add_argument("--gpus-per-node", type=count(), default=8, metavar="N", help="default: 8")
    group.add_argument(
        "--topology", metavar="FILE", help="topology file as for ft run; its hosts, in order, are the nodes"
    )
    group.add_argument(
        "--hosts",
        default="",
        metavar="LIST",
        help="hosts of the topology that are the nodes: a[1-4],b7 (default: the first ones)",
    )
    group.add_argument(
        "--nodes-per-rack", type=count(), metavar="N", help="number of nodes of a rack, instead of --topology"
    )
    group.add_argument(
        "--host-memory",
        type=argument(lambda text: size(text, bare=None)),
        metavar="SIZE",
        help="host memory of a node, such as 2TB, to show which numbers of copies fit into it",
    )
    group.add_argument(
        "--pcie",
        type=argument(gigabytes_per_second),
        default=25.0,
        metavar="GB/S",
        help="bandwidth of each GPU to its host (default: 25)",
    )
    group.add_argument(
        "--network",
        type=argument(gigabytes_per_second),
        default=25.0,
        metavar="GB/S",
        help="network bandwidth of a node in each direction (default: 25)",
    )
    group = parser.add_argument_group("state")
    group.add_argument(
        "--params",
        type=argument(amount),
        metavar="N",
        help="number of parameters of the model, such as 70B, instead of the trainer's flags",
    )
    group.add_argument(
        "--expert-params",
        type=argument(amount),
        metavar="N",
        help="how many of the --params parameters belong to experts (default: none)",
    )
    group.add_argument(
        "--bytes-per-parameter",
        type=argument(positive),
        metavar="N",
        help="bytes of main copy and optimizer state per parameter (default: 4 + 8 with Adam, 4 + 4 with SGD)",
    )
    group.add_argument("--copies", type=argument(_copies), default=[1, 2, 3], metavar="K,...", help="default: 1,2,3")
    group = parser.add_argument_group("time")
    group.add_argument("--step-time", type=duration(), metavar="TIME", help="duration of one step")
    group.add_argument(
        "--optimizer-time",
        type=duration(0.0),
        default=0.0,
        metavar="TIME",
        help="part of --step-time in which the optimizer runs (default: 0)",
    )
    group.add_argument(
        "--node-mtbf",
        type=duration(),
        metavar="TIME",
        help=f"mean time between failures of one node (default: {_GPU_MTBF_S / 86400:g}d by the number of its GPUs)",
    )
    group.add_argument(
        "--domain-mtbf",
        type=duration(),
        default=_DOMAIN_MTBF,
        metavar="TIME",
        help=f"mean time between failures of one rack, switch, ... (default: {_DOMAIN_MTBF})",
    )
    group.add_argument(
        "--recovery-time",
        type=duration(0.0),
        default=_RECOVERY,
        metavar="TIME",
        help=f"time until a lost node is replaced (default: {_RECOVERY})",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table, with bytes and seconds"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="pretrain_gpt.py with the flags of the run"
    )


def plan_of(given: argparse.Namespace) -> Plan:
    """Build the plan from the flags.

    Raises:
        UserError: the flags are invalid or contradict each other.
    """
    words = given.command[1:] if given.command and not given.command[0].startswith("--") else given.command
    options = _options(words[1:] if words[:1] == ["--"] else words)
    _check(given)
    world = given.nodes * given.gpus_per_node
    grid = _layout(options, world)
    topology = read_topology(given.topology) if given.topology else None
    hosts = slurm.hosts(given.hosts) if given.hosts else []
    nodes = nodes_of(given.nodes, topology, hosts, given.nodes_per_rack)
    where = seats(nodes, given.gpus_per_node)
    if given.params is not None:
        stages = even(given.params, given.expert_params or 0.0, grid)
    else:
        stages = from_flags(options, grid)
    sizes = shards(stages, options, grid, given.bytes_per_parameter)
    pipeline_first = options.core.use_tp_pp_dp_mapping
    kinds = {kind for node in nodes for kind in node if kind != NODE}
    node_mtbf = given.node_mtbf or _GPU_MTBF_S / given.gpus_per_node
    mtbf = {NODE: node_mtbf, **dict.fromkeys(sorted(kinds), given.domain_mtbf)}
    question = Question(
        where=where,
        groups=data_parallel_groups(grid, pipeline_first),
        shards={rank: sizes[stage] for rank, stage in enumerate(stage_of(grid, pipeline_first))},
        copies_complete=all(not shard.replicated for shard in sizes),
        pcie=given.pcie * GB,
        network=given.network * GB,
        step_s=given.step_time,
        optimizer_s=given.optimizer_time,
        failures=Failures(mtbf, given.recovery_time + (given.step_time or 0.0)),
    )
    memory = given.host_memory
    total = sum(stage.dense * grid.tp + stage.expert * grid.etp * grid.ep for stage in stages)
    return Plan(question, grid, given.nodes, total, given.copies, memory, bool(kinds), bool(words))


def _options(words: list[str]) -> Options:
    """Parse the flags of the trainer that would run; flags that NVIDIA's has and the reference trainer has not say
    nothing about the size of the state.

    Raises:
        UserError: flags are unknown or have a wrong value.
    """
    is_nvidias, words = tree.choose(words, tree.installed_release())
    if not is_nvidias:
        return parse(words)
    options, problems, _ = read(words, guesses=False)
    if problems:
        known = own_flags(tree.installed(), tree.SCRIPT)
        problems = [each for each in problems if each[0].removeprefix("unknown flag ") not in known]
    if problems or options is None:
        raise UserError.of(problems)
    return options


def _check(given: argparse.Namespace) -> None:
    if given.step_time is not None and given.optimizer_time >= given.step_time:
        raise UserError(
            f"--optimizer-time {given.optimizer_time:g} s of a step of {given.step_time:g} s leaves no time to copy",
            "--optimizer-time is a part of --step-time and must be shorter",
        )
    if given.expert_params is not None and (given.params is None or given.expert_params > given.params):
        raise UserError("--expert-params is a part of --params", "give the number of all parameters with --params")
    if given.topology and given.nodes_per_rack:
        raise UserError("--topology and --nodes-per-rack define the same thing", "give one of them")
    if given.hosts and not given.topology:
        raise UserError("--hosts names hosts of a topology, and no --topology is given", "add --topology FILE")
    if given.recovery_time + (given.step_time or 0.0) <= 0:
        raise UserError(
            "--recovery-time 0 without a --step-time leaves no time in which failures could coincide",
            "give one of them",
        )
    world = given.nodes * given.gpus_per_node
    if max(given.copies) >= world:
        raise UserError(
            f"{max(given.copies)} copies are requested, but only {world - 1} other rank(s) can hold them",
            "give fewer --copies",
        )


def _layout(options: Options, world: int) -> Layout:
    parallel = options.core
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    etp, ep = parallel.expert_tensor_parallel_size or tp, parallel.expert_model_parallel_size
    for what, need in (
        (f"TP {tp} x PP {pp} x CP {cp}", tp * pp * cp),
        (f"ETP {etp} x EP {ep} x PP {pp}", etp * ep * pp),
    ):
        if world % need:
            raise UserError(
                f"{world} ranks (nodes x GPUs) cannot be split into {what} = {need}", f"use a multiple of {need} ranks"
            )
    return layout(parallel, options.core.num_layers or pp, world)


def _copies(text: str) -> list[int]:
    return sorted({whole(1)(part) for part in text.split(",")})


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
