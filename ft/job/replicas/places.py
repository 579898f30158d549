"""Placement of replicas on nodes: a replica gets whole nodes, or an equal part of one. Also of faults on replicas."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from ft import faults as inject
from ft.base.errors import UserError
from ft.faults.faults import OF_CONTROL, OF_NODE, Fault
from ft.faults.spec import FaultSpec


@dataclass(frozen=True)
class LauncherPart:
    """The part of a replica that is on one node.

    Attributes:
        replica: number of the replica.
        nodes: number of nodes that the replica is on, its standby nodes included.
        node_rank: index of this node among them; the standby nodes have the highest.
        nproc: number of workers of the replica on each of them.
        first: index on this node of the replica's first worker, and of its first device.
        shared: whether other replicas have workers on this node, too.
        standby_nodes: number of its nodes that run standbys only.
    """

    replica: int
    nodes: int
    node_rank: int
    nproc: int
    first: int = 0
    shared: bool = False
    standby_nodes: int = 0

    @property
    def training_nodes(self) -> int:
        return self.nodes - self.standby_nodes

    @property
    def is_standby(self) -> bool:
        """Return whether this node has no workers of the replica that hold logical ranks from the start."""
        return self.node_rank >= self.training_nodes

    @property
    def world_size(self) -> int:
        return self.training_nodes * self.nproc


def parts_of(node_rank: int, nnodes: int, nproc: int, replicas: int, standby_nodes: int = 0) -> list[LauncherPart]:
    """Return the parts of the node ``node_rank``, in the order of replicas.

    The nodes that train form groups of equal size: the nodes of one replica, or one node that several replicas share.
    The standby nodes are dealt out to the groups in turn, and each can replace any node of its group.

    Args:
        node_rank: index of the node in the run; the last ``standby_nodes`` nodes run standbys only.
        nproc: workers on each node.
        standby_nodes: number of nodes that run standbys only.

    Raises:
        UserError: the workers cannot be divided so that each replica has whole nodes, or an equal part of one.
    """
    training = nnodes - standby_nodes
    groups = min(training, replicas)
    size, sharing = training // groups, replicas // groups
    if training * nproc % replicas:
        raise UserError(
            f"{training * nproc} workers ({training} node(s) x {nproc}) cannot be {replicas} replicas of equal size",
            "choose --nproc-per-node or --nnodes such that --ft-hsdp-replicas divides their product",
        )
    if training % groups or replicas % groups or nproc % sharing:
        raise UserError(
            f"{replicas} replicas on {training} nodes of {nproc} workers: a node would have pieces of several replicas",
            "make one of --nnodes and --ft-hsdp-replicas a multiple of the other",
        )
    if node_rank < training:
        group, index = divmod(node_rank, size)
    else:
        turn, group = divmod(node_rank - training, groups)
        index = size + turn
    standbys, each = len(range(group, standby_nodes, groups)), nproc // sharing
    return [
        LauncherPart(group * sharing + i, size + standbys, index, each, i * each, sharing > 1, standbys)
        for i in range(sharing)
    ]


def devices_of(part: LauncherPart, visible: str | None, count: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for the replica's workers, whose local ranks begin at 0; None: leave it unchanged.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the node itself, None if it is not set.
        count: number of devices that torch sees on the node.
    """
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    end = part.first + part.nproc
    if not part.shared or len(names) < end or count < end:
        return None
    return ",".join(name.strip() for name in names[part.first : end])


def plan_faults(specs: Sequence[FaultSpec], replicas: int, shape: LauncherPart, seed: int) -> dict[int, list[Fault]]:
    """Return replica -> its faults. The result is the same on every node, and faults are numbered over the whole run.

    A fault without the key ``replica`` counts ranks over all replicas: with 2 workers each, rank 3 is the second rank
    of replica 1. A fault that hits a node or a control plane without this key gets a random replica.

    Args:
        shape: any part of a replica; all replicas have the same shape.

    Raises:
        UserError: a victim does not exist.
    """
    found: list[tuple[int, Fault]] = []
    for index, spec in enumerate(specs):
        found += _of_one(spec, replicas, shape, seed * 1000 + index)
    found.sort(key=lambda entry: (entry[1].step is None, entry[1].step if entry[1].step is not None else entry[1].time))
    planned: dict[int, list[Fault]] = {replica: [] for replica in range(replicas)}
    for number, (replica, fault) in enumerate(found, 1):
        planned[replica].append(replace(fault, number=number))
    return planned


def _of_one(spec: FaultSpec, replicas: int, shape: LauncherPart, seed: int) -> list[tuple[int, Fault]]:
    nodes = [f"n{i}" for i in range(shape.training_nodes)]
    one = replace(spec, replica=None)
    if (
        spec.replica is None
        and spec.node is None
        and (spec.rank is not None or spec.kind not in (*OF_CONTROL, *OF_NODE))
    ):
        faults = inject.schedule([one], replicas * shape.world_size, nodes, seed)
        chosen = [(fault, divmod(fault.rank or 0, shape.world_size)) for fault in faults]
        return [(replica, replace(fault, rank=rank)) for fault, (replica, rank) in chosen]
    if isinstance(spec.replica, int) and spec.replica >= replicas:
        raise UserError(
            f"{spec.text!r}: there is no replica {spec.replica} among {replicas}",
            f"replica=0 to replica={replicas - 1}, or replica=random",
        )
    rng = Random(f"{seed}/replica")
    faults = inject.schedule([one], shape.world_size, nodes, seed)
    return [(spec.replica if isinstance(spec.replica, int) else rng.randrange(replicas), f) for f in faults]
