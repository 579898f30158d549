"""Schedule of faults: draws random victims and times, and numbers the faults. The same seed gives the same schedule."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from ft.base.errors import UserError
from ft.faults.faults import OF_CONTROL, OF_NODE, Fault
from ft.faults.spec import FaultSpec
from ft.faults.trace import read_trace

HORIZON_S = 7 * 24 * 3600.0
"""Default limit for drawn times, in seconds: one week."""
MOST_OF_A_DISTRIBUTION = 1000
"""Maximum number of faults of one entry without ``count``. It is limited because a worker reads all faults at its
start.
"""


def schedule(
    specs: Sequence[FaultSpec], world_size: int, nodes: Sequence[str], seed: int, horizon_s: float = HORIZON_S
) -> list[Fault]:
    """Return the faults of a run, numbered from 1: first those with a step, by step, then those with a time, by time.

    The random draws for an entry depend only on the seed and its place in the list, so adding an entry at the end
    changes no other.

    Args:
        specs: the faults that were asked for.
        world_size: number of logical ranks.
        nodes: names of the nodes, in the order of their node ranks. The first node hosts the control plane; a random
            node is one of the others if there are any.
        seed: seed of the random draws.
        horizon_s: limit for drawn times, in seconds.

    Raises:
        UserError: a victim does not exist.
    """
    faults = []
    for spec in specs:
        if spec.replica is not None:
            raise UserError(f"{spec.text!r}: the run has no replicas", "add --ft-hsdp-replicas R, or remove replica")
    for index, spec in enumerate(specs):
        rng = random.Random(f"{seed}/{index}")
        faults += [_seat(one, world_size, nodes, rng) for one in _moments(spec, rng, horizon_s)]
    faults.sort(key=lambda fault: (fault.step is None, fault.step if fault.step is not None else fault.time))
    return [replace(fault, number=number) for number, fault in enumerate(faults, 1)]


def _moments(spec: FaultSpec, rng: random.Random, horizon_s: float) -> list[FaultSpec]:
    """Return one entry for each fault, with a fixed step or time."""
    if spec.every is None and spec.trace is None:
        return [spec]
    end = min(horizon_s, spec.until if spec.until is not None else horizon_s)
    most = spec.count if spec.count is not None else MOST_OF_A_DISTRIBUTION
    if spec.trace is not None:
        return [one for one in read_trace(spec) if one.time <= end][:most]
    if spec.every.in_steps:  # a drawn value of 3.2 means step 4: three whole steps are done before
        return [replace(spec, every=None, step=math.ceil(at)) for at in islice(spec.every.times(rng), most)]
    found = []
    for time in islice(spec.every.times(rng), most):
        if time > end:
            break
        found.append(replace(spec, every=None, time=round(time, 3)))
    return found


def _seat(spec: FaultSpec, world_size: int, nodes: Sequence[str], rng: random.Random) -> Fault:
    return Fault(
        number=0,
        kind=spec.kind,
        step=spec.step,
        time=spec.time,
        rank=_rank(spec, world_size, rng),
        node=_node(spec, nodes, rng),
        phase=spec.phase,
        seconds=spec.seconds,
        factor=spec.factor,
        error=spec.error,
        copies=spec.copies,
        value=spec.value,
        flip=None if spec.flip is None else replace(spec.flip, seed=rng.getrandbits(32)),
    )


def _rank(spec: FaultSpec, world_size: int, rng: random.Random) -> int | None:
    if spec.node is not None or (spec.rank is None and spec.kind in (*OF_CONTROL, *OF_NODE)):
        return None
    if spec.rank is None or spec.rank == "random":
        return rng.randrange(world_size)
    if spec.rank >= world_size:
        raise UserError(
            f"{spec.text!r}: there is no logical rank {spec.rank} among {world_size}",
            f"rank=0 to rank={world_size - 1}, or rank=random",
        )
    return spec.rank


def _node(spec: FaultSpec, nodes: Sequence[str], rng: random.Random) -> str | None:
    asked = "random" if spec.kind in OF_NODE and spec.node is None and spec.rank is None else spec.node
    if asked is None:
        return None
    if asked == "random":
        return rng.choice(nodes[1:] or nodes)
    if asked in nodes:
        return asked
    if asked.isdecimal() and int(asked) < len(nodes):
        return nodes[int(asked)]
    raise UserError(f"{spec.text!r}: there is no node {asked}", f"one of: {', '.join(nodes)}, or random")
