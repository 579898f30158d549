"""Which workers of which replica are where: replicas are sets of whole nodes, or parts of one node."""

from dataclasses import dataclass

from ft.base.errors import UserError


@dataclass(frozen=True)
class Part:
    """What one node does for one replica.

    Attributes:
        replica: its number. nodes: that it is on; node_rank: of this one among them. nproc: its workers on each.
        first: of this node's workers, and devices, the first that is the replica's. shared: other replicas have others.
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
    """The parts of the node ``node_rank``, in the order of replicas.

    Args:
        nnodes: of the run. nproc: workers on each node. replicas: of the run.

    Raises:
        UserError: the workers cannot be divided so that each replica has nodes, or an equal share of one, to itself.
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
    """CUDA_VISIBLE_DEVICES for the replica's workers, whose local ranks begin at 0; None: leave it as it is.

    Args:
        visible: the node's own CUDA_VISIBLE_DEVICES, None if it is not set. count: of devices that torch sees there.
    """
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    end = part.first + part.nproc
    if not part.shared or len(names) < end or count < end:
        return None
    return ",".join(name.strip() for name in names[part.first : end])
