"""Assignment of the faults of ``--inject`` and ``--scenario`` to replicas, the full copies of the model that they
hit.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from ft import faults as inject
from ft.base.errors import UserError
from ft.faults.faults import OF_CONTROL, OF_NODE, Fault
from ft.faults.spec import FaultSpec
from ft.job.replicas.places import Part


def plan(specs: Sequence[FaultSpec], replicas: int, shape: Part, seed: int) -> dict[int, list[Fault]]:
    """Return replica -> its faults. The result is the same on every node, and faults are numbered over the whole run.

    A fault without the key ``replica`` counts ranks over all replicas: with 2 workers each, rank 3 is the second rank
    of replica 1. A fault that hits a node or a control plane without this key gets a random replica.

    Args:
        specs: the faults that were asked for.
        replicas: number of replicas.
        shape: any part of a replica; all replicas have the same shape.
        seed: seed of the random choices.

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


def _of_one(spec: FaultSpec, replicas: int, shape: Part, seed: int) -> list[tuple[int, Fault]]:
    nodes = [f"n{i}" for i in range(shape.training_nodes)]
    one = replace(spec, replica=None)
    if (
        spec.replica is None
        and spec.node is None
        and (spec.rank is not None or spec.kind not in (*OF_CONTROL, *OF_NODE))
    ):
        faults = inject.schedule([one], replicas * shape.world_size, nodes, seed)
        return [(f.rank // shape.world_size, replace(f, rank=f.rank % shape.world_size)) for f in faults]
    if isinstance(spec.replica, int) and spec.replica >= replicas:
        raise UserError(
            f"{spec.text!r}: there is no replica {spec.replica} among {replicas}",
            f"replica=0 to replica={replicas - 1}, or replica=random",
        )
    rng = Random(f"{seed}/replica")
    faults = inject.schedule([one], shape.world_size, nodes, seed)
    return [(spec.replica if isinstance(spec.replica, int) else rng.randrange(replicas), f) for f in faults]
