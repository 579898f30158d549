"""The simulation of FT-HSDP's protocol: how a seed becomes replicas with faults, and the report of many histories."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

from ft.show.text import seconds
from tests.simulation.campaign import Simulation, Summary
from tests.simulation.engine import Options
from tests.simulation.hsdp.checks import BACK_S, FIRST_STEP_S, STUCK_S
from tests.simulation.hsdp.faults import KINDS, Schedule
from tests.simulation.hsdp.mutants import PLANTS
from tests.simulation.hsdp.shape import draw_shape
from tests.simulation.hsdp.world import World


@contextmanager
def world(seed: int, options: Options, lines: list[str] | None) -> Iterator[World]:
    """Yield the replicas and the quorum server of a seed, before their run."""
    rng = random.Random(seed)
    shape, schedule = draw_shape(rng), Schedule(rng, options.faults, options.kinds)
    if lines is not None:
        lines.append(f"seed {seed}: {shape}")
        lines.append("planned faults: " + (", ".join(kind.name for kind in schedule.kinds) or "none"))
    yield World(rng, shape, schedule, lines)


def report(summary: Summary) -> list[str]:
    """Return the lines of the report that are about this simulation."""
    count = summary.counts
    return [
        f"{sum(summary.struck.values())} faults, {count['quorums']} quorums, {count['steps']} steps, {count['redone']} "
        f"committed ones done again, {count['loads']} loads of a checkpoint because nobody had a state any more,",
        f"{count['returns']} steps committed by a replica that was behind, {count['deaths_of_server']} deaths of the "
        "quorum server",
        f"in each: training never stands still for {seconds(STUCK_S)} while the minimum lives "
        f"({seconds(STUCK_S + FIRST_STEP_S)} before a life's first step), all are healthy within "
        f"{seconds(BACK_S)} of the last fault",
        "",
        "faults                       struck  alone: longest time without a commit beyond a step (worst, median)",
        *(f"  {kind:26s} {summary.struck[kind]:6d}  {_pause(summary, kind)}" for kind in sorted(summary.struck)),
        f"  {'none':26s} {'':6s}  {_pause(summary, 'none')}",
    ]


def _pause(summary: Summary, kind: str) -> str:
    found = sorted(summary.pauses.get(kind, []))
    return f"{seconds(found[-1])}, {seconds(found[len(found) // 2])}" if found else "-"


SIMULATION = Simulation(
    "hsdp",
    "FT-HSDP's protocol under simulated faults: plays histories of simulated replicas, each from its seed, with "
    "production's protocol of replicas and quorum server in them, and checks that healthy replicas are equal, that the "
    "line of steps that survives has every sample once, that at most the interrupted step is done again, and that "
    "nobody waits for ever.",
    KINDS,
    most=8,
    world=world,
    mutants=PLANTS,
    report=report,
    columns=(56, 120),
)
