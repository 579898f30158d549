"""The flags of ``ft plan snapshot``, and the run that they describe."""

import argparse
from collections.abc import Sequence
from typing import Any

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


def _copies(text: str) -> list[int]:
    return sorted({whole(1)(part) for part in text.split(",")})


_RATE, _AMOUNT = argument(gigabytes_per_second), argument(amount)
_FLAGS: dict[str, list[tuple[str, str, Any, Any, str]]] = {
    "cluster": [
        ("--gpus-per-node", "N", count(), 8, "default: 8"),
        ("--topology", "FILE", None, None, "topology file as for ft run; its hosts, in order, are the nodes"),
        ("--hosts", "LIST", None, "", "hosts of the topology that are the nodes: a[1-4],b7 (default: the first ones)"),
        ("--nodes-per-rack", "N", count(), None, "number of nodes of a rack, instead of --topology"),
        ("--host-memory", "SIZE", argument(lambda text: size(text, bare=None)), None,
         "host memory of a node, such as 2TB, to show which numbers of copies fit into it"),
        ("--pcie", "GB/S", _RATE, 25.0, "bandwidth of each GPU to its host (default: 25)"),
        ("--network", "GB/S", _RATE, 25.0, "network bandwidth of a node in each direction (default: 25)"),
    ],
    "state": [
        ("--params", "N", _AMOUNT, None, "parameters of the model, such as 70B, instead of the trainer's flags"),
        ("--expert-params", "N", _AMOUNT, None, "how many of --params belong to experts (default: none)"),
        ("--bytes-per-parameter", "N", argument(positive), None,
         "bytes of main copy and optimizer state per parameter (default: 4 + 8 with Adam, 4 + 4 with SGD)"),
        ("--copies", "K,...", argument(_copies), [1, 2, 3], "default: 1,2,3"),
    ],
    "time": [
        ("--step-time", "TIME", duration(), None, "duration of one step"),
        ("--optimizer-time", "TIME", duration(0.0), 0.0,
         "part of --step-time in which the optimizer runs (default: 0)"),
        ("--node-mtbf", "TIME", duration(), None, "mean time between failures of one node "
         f"(default: {_GPU_MTBF_S / 86400:g}d by the number of its GPUs)"),
        ("--domain-mtbf", "TIME", duration(), _DOMAIN_MTBF,
         f"mean time between failures of one rack, switch, ... (default: {_DOMAIN_MTBF})"),
        ("--recovery-time", "TIME", duration(0.0), _RECOVERY,
         f"time until a lost node is replaced (default: {_RECOVERY})"),
    ],
}  # fmt: skip
"""Title of a group -> (flag, placeholder, type, default, help) of each of its flags."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag to ``parser``; the trainer's own flags follow the name of its script, as with ``ft run``."""
    about = "number of nodes that train, without standbys"
    parser.add_argument("--nodes", type=count(), required=True, metavar="N", help=about)
    for title, flags in _FLAGS.items():
        group = parser.add_argument_group(title)
        for name, metavar, kind, default, about in flags:
            group.add_argument(name, metavar=metavar, type=kind, default=default, help=about)
    about = "print one JSON object instead of a table, with bytes and seconds"
    parser.add_argument("--json", action="store_true", help=about)
    about = "pretrain_gpt.py with the flags of the run"
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help=about)


def question_of(given: argparse.Namespace) -> Question:
    """Build the question from the flags.

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
    where = {rank: nodes[rank // given.gpus_per_node] for rank in range(world)}  # as with torchrun
    if given.params is not None:
        stages = even(given.params, given.expert_params or 0.0, grid)
    else:
        stages = from_flags(options, grid)
    sizes = shards(stages, options, grid, given.bytes_per_parameter)
    pipeline_first = options.core.use_tp_pp_dp_mapping
    kinds = {kind for node in nodes for kind in node if kind != NODE}
    node_mtbf = given.node_mtbf or _GPU_MTBF_S / given.gpus_per_node
    mtbf = {NODE: node_mtbf, **dict.fromkeys(sorted(kinds), given.domain_mtbf)}
    return Question(
        grid=grid,
        parameters=sum(stage.dense * grid.tp + stage.expert * grid.etp * grid.ep for stage in stages),
        has_flags=bool(words),
        where=where,
        groups=data_parallel_groups(grid, pipeline_first),
        shards={rank: sizes[stage] for rank, stage in enumerate(stage_of(grid, pipeline_first))},
        copies_complete=all(not shard.replicated for shard in sizes),
        host_memory=given.host_memory,
        pcie=given.pcie * GB,
        network=given.network * GB,
        step_s=given.step_time,
        optimizer_s=given.optimizer_time,
        failures=Failures(mtbf, given.recovery_time + (given.step_time or 0.0)),
    )


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
    core = options.core
    grid = layout(core, core.num_layers or core.pipeline_model_parallel_size, world)
    for what, need in (
        (f"TP {grid.tp} x PP {grid.pp} x CP {grid.cp}", grid.tp * grid.pp * grid.cp),
        (f"ETP {grid.etp} x EP {grid.ep} x PP {grid.pp}", grid.etp * grid.ep * grid.pp),
    ):
        if world % need:
            raise UserError(
                f"{world} ranks (nodes x GPUs) cannot be split into {what} = {need}", f"use a multiple of {need} ranks"
            )
    return grid


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
