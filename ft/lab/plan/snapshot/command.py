"""Implement ``ft plan snapshot``: compare cost and risk of keeping k copies of each rank's training state on peers."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy

from ft.adapters.megatron_lm import tree
from ft.adapters.megatron_lm.hooks import own_flags
from ft.base.errors import UserError
from ft.base.quantities import amount, argument, count, duration, gigabytes_per_second, positive, size, whole
from ft.lab.plan.snapshot.answer import MONTH, CopiesResult, Failures, SnapshotQuestion, answer
from ft.lab.plan.snapshot.shards import even, from_flags, shards
from ft.platform import slurm
from ft.platform.slurm import NODE, Topology, read_topology
from ft.show import text
from ft.show.text import left_out, seconds, table
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
_DESCRIPTION = """\
Compute the cost and the remaining risk of snapshots with k peer copies of each state, for k = 1, 2, 3: host memory,
bytes sent in each step and whether the step hides them, and the probability that a failure loses state. Give the
trainer's flags after the name of its script, or the size of the model with --params.

  ft plan snapshot --nodes 64 --nodes-per-rack 4 --step-time 10s --params 70B pretrain_gpt.py \\
      --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --use-distributed-optimizer"""


LEFT_OUT = left_out(
    "nodes without a replacement",
    "faults that take all copies alike (software)",
    "the training's own traffic",
)


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "snapshot",
        help="compute what peer copies cost in memory and bandwidth, and the remaining risk",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table or, with ``--json``, the values.

    Raises:
        UserError: the flags are invalid or contradict each other.
    """
    question = question_of(arguments)
    answers = [answer(question, k) for k in arguments.copies]
    print(json.dumps(as_values(question, answers)) if arguments.json else as_text(question, answers))
    return 0


def question_of(given: argparse.Namespace) -> SnapshotQuestion:
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
    grouped = data_parallel_groups(grid, options.core.use_tp_pp_dp_mapping)
    kinds = {kind for node in nodes for kind in node if kind != NODE}
    node_mtbf = given.node_mtbf or _GPU_MTBF_S / given.gpus_per_node
    mtbf = {NODE: node_mtbf, **dict.fromkeys(sorted(kinds), given.domain_mtbf)}
    return SnapshotQuestion(
        grid=grid,
        parameters=sum(stage.dense * grid.tp + stage.expert * grid.etp * grid.ep for stage in stages),
        has_flags=bool(words),
        where=where,
        groups=grouped.reshape(-1, grid.dp * grid.cp).tolist(),
        shards={rank: size for size, stage in zip(sizes, grouped, strict=True) for rank in stage.ravel().tolist()},
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


def data_parallel_groups(grid: Layout, pipeline_first: bool) -> numpy.ndarray:
    """Return the ranks that hold the same part of the model, in ring order, [PP, TP, DP * CP].

    Ranks are ordered TP, CP, DP, PP as in megatron-core or, with ``pipeline_first`` (--use-tp-pp-dp-mapping), TP, CP,
    PP, DP.
    """
    sizes, axes = ((grid.dp, grid.pp), (1, 3, 0, 2)) if pipeline_first else ((grid.pp, grid.dp), (0, 3, 1, 2))
    ranks = numpy.arange(grid.world_size).reshape(*sizes, grid.cp, grid.tp).transpose(axes)
    return ranks.reshape(grid.pp, grid.tp, grid.dp * grid.cp)


def as_values(question: SnapshotQuestion, answers: list[CopiesResult]) -> dict[str, Any]:
    """Return bytes, seconds and probabilities for ``--json``."""
    return {
        "nodes": question.nodes,
        "ranks": question.grid.world_size,
        "layout": asdict(question.grid),
        "parameters": question.parameters,
        "window_s": question.window_s,
        "exposure_s": question.failures.window,
        "mtbf_s": dict(question.failures.mtbf),
        "copies_carry_state": question.copies_carry,
        "without": {"loss_per_failure": 1.0, "loss_per_month": _without_per_month(answers)},
        "copies": [
            {
                **{key: value for key, value in asdict(found).items() if key != "risk"},
                "memory": found.memory,
                "fits_memory": _fits_memory(question, found),
                "loss_per_failure": found.risk.per_failure,
                "loss_per_failure_of": dict(found.risk.by_kind),
                "loss_per_month": found.risk.within(MONTH),
                "failures_per_month": found.risk.rate * MONTH,
            }
            for found in answers
        ],
    }


def as_text(question: SnapshotQuestion, answers: list[CopiesResult]) -> str:
    """Return a table with a column for a run without snapshots and one per number of copies, followed by problems."""
    rows = [(name, none, *map(cell, answers)) for name, none, cell in _rows(question, answers)]
    head = ("", "none", *(f"k = {found.k}" for found in answers))
    lines = [LEFT_OUT, "", *_head(question, answers), "", table(head, rows, right=range(1, len(head)))]
    if question.copies_carry:
        lines.append(
            "\nnone: no snapshots; every failure ends in a restart from the newest checkpoint, whose cost is in\n"
            "ft plan buy"
        )
    for found in answers:
        lines += [f"\nk = {found.k}: {problem}" for problem in found.problems]
    return "\n".join(lines)


def _without_per_month(answers: list[CopiesResult]) -> float:
    """Return the probability of at least one failure; without snapshots, each failure loses the state of its ranks."""
    return replace(answers[0].risk, per_failure=1.0).within(MONTH)


def _head(question: SnapshotQuestion, answers: list[CopiesResult]) -> list[str]:
    kinds = dict.fromkeys(kind for place in question.where.values() for kind in place)
    counts = {kind: len({place.get(kind) for place in question.where.values()}) for kind in kinds}
    noun = {kind: text.count(number, kind) for kind, number in counts.items()}
    rates = "; ".join(f"each of {noun[kind]} every {seconds(question.failures.mtbf[kind])}" for kind in kinds)
    often, ranks = answers[0].risk.rate * MONTH, question.grid.world_size
    shard = max(shard.owned + shard.replicated for shard in question.shards.values())
    lines = [
        f"{question.nodes} nodes, {question.grid}",
        f"{question.parameters / 1e9:.4g} B parameters, a rank's snapshot of up to {_size(shard)}",
        f"failures: {rates}; {often:.3g} a month; {seconds(question.failures.window)} until all copies are "
        "complete again",
    ]
    if not question.has_flags and ranks > 1:
        lines.append(
            f"without the trainer's flags all {ranks} ranks are one data-parallel group, and each holds "
            "the whole model: give the flags of the run after the name of its script"
        )
    if not question.copies_complete:
        much = "little of it" if question.copies_carry else "nothing"
        lines.append(
            "without --use-distributed-optimizer data-parallel peers already hold the same state, and "
            f"copies contain {much}"
        )
    return lines


_Row = tuple[str, str, Callable[[CopiesResult], str]]
"""Name of a row, its cell for a run that restarts from checkpoints alone, and that of a number of copies."""


def _rows(question: SnapshotQuestion, answers: list[CopiesResult]) -> list[_Row]:
    rows: list[_Row] = [
        ("host memory of a node", "0", lambda found: _size(found.memory)),
        ("  own snapshots, two each", "-", lambda found: _size(found.own)),
        ("  peer copies, two each", "-", lambda found: _size(found.copies)),
    ]
    if question.host_memory is not None:
        name = f"  fits into {_size(question.host_memory)}"
        rows.append((name, "-", lambda found: "yes" if _fits_memory(question, found) else "NO"))
    rows += [
        ("each step, GPU to host", "0", lambda found: _size(found.d2h)),
        ("  sent by a node", "0", lambda found: _size(found.sent)),
        ("  received by a node", "0", lambda found: _size(found.received)),
        ("  time, overlapped", "-", lambda found: seconds(found.transfer_s)),
        ("    GPU to host", "-", lambda found: seconds(found.d2h_s)),
        ("    network", "-", lambda found: seconds(found.network_s)),
    ]
    window = question.window_s
    if window is None:
        rows.append(("  hidden by steps of", "-", lambda found: seconds(found.transfer_s)))
    else:
        name = f"  fit into the window of {seconds(window)}"
        rows.append((name, "-", lambda f: f"{'yes' if f.fits else 'NO'}, {f.transfer_s / window:.0%}"))
    return rows + _losses(question, answers)


def _losses(question: SnapshotQuestion, answers: list[CopiesResult]) -> list[_Row]:
    if not question.copies_carry:
        peers = max(len(group) for group in question.groups)
        return [("loss of state", "-", lambda found: f"if all {peers} fail")]
    rows: list[_Row] = [("loss of state, per failure", _chance(1.0), lambda found: _chance(found.risk.per_failure))]
    kinds = answers[0].risk.by_kind
    for kind in kinds if len(kinds) > 1 else ():
        rows.append((f"  of a {kind}", "-", lambda found, kind=kind: _chance(found.risk.by_kind[kind])))  # type: ignore
    never = _chance(_without_per_month(answers))
    rows.append(("loss of state, per month", never, lambda found: _chance(found.risk.within(MONTH))))
    return rows


def _fits_memory(question: SnapshotQuestion, found: CopiesResult) -> bool | None:
    return None if question.host_memory is None else found.memory <= question.host_memory


def _size(nbytes: float) -> str:
    for unit, one in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= one:
            return f"{nbytes / one:.1f} {unit}"
    return f"{nbytes / 1024:.1f} KiB"


def _chance(probability: float) -> str:
    return "0" if probability == 0 else f"{probability:.2g}" if probability < 0.01 else f"{probability:.3g}"
