"""Placement of replicas (full copies of the model) on nodes: a replica gets whole nodes, or an equal part of one
node.
"""

from dataclasses import dataclass

from ft.base.errors import UserError


@dataclass(frozen=True)
class Part:
    """The part of a replica that is on one node.

    Attributes:
        replica: number of the replica.
        nodes: number of nodes that the replica is on.
        node_rank: index of this node among them.
        nproc: number of workers of the replica on each of them.
        first: index on this node of the replica's first worker, and of its first device.
        shared: whether other replicas have workers on this node, too.
    """

    replica: int
    nodes: int
    node_rank: int
    nproc: int
    first: int = 0
    shared: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc


def parts_of(node_rank: int, nnodes: int, nproc: int, replicas: int) -> list[Part]:
    """Return the parts of the node ``node_rank``, in the order of replicas.

    Args:
        node_rank: index of the node in the run.
        nnodes: number of nodes of the run.
        nproc: workers on each node.
        replicas: number of replicas of the run.

    Raises:
        UserError: the workers cannot be divided so that each replica has whole nodes, or an equal part of one.
    """
    workers = nnodes * nproc
    if workers % replicas:
        raise UserError(
            f"{workers} workers ({nnodes} node(s) x {nproc}) cannot be {replicas} replicas of equal size",
            "choose --nproc-per-node or --nnodes such that --ft-hsdp-replicas divides their product",
        )
    if nnodes % replicas == 0:
        nodes = nnodes // replicas
        return [Part(node_rank // nodes, nodes, node_rank % nodes, nproc)]
    if replicas % nnodes == 0 and nproc % (replicas // nnodes) == 0:
        here = replicas // nnodes
        each = nproc // here
        return [Part(node_rank * here + i, 1, 0, each, i * each, here > 1) for i in range(here)]
    raise UserError(
        f"{replicas} replicas on {nnodes} nodes of {nproc} workers: a node would have pieces of several replicas",
        "make one of --nnodes and --ft-hsdp-replicas a multiple of the other",
    )


def devices_of(part: Part, visible: str | None, count: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for the replica's workers, whose local ranks begin at 0; None: leave it unchanged.

    Args:
        part: the part of the replica on this node.
        visible: CUDA_VISIBLE_DEVICES of the node itself, None if it is not set.
        count: number of devices that torch sees on the node.
    """
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    end = part.first + part.nproc
    if not part.shared or len(names) < end or count < end:
        return None
    return ",".join(name.strip() for name in names[part.first : end])
