"""Simulation of one run of FT-HSDP's protocol from a seed, with its invariants checked.

A simulated run is called a history. Its replicas and faults are drawn from the seed.
"""

import random
import traceback
from dataclasses import dataclass, field

from tests.simulation.hsdp.checks import Violation
from tests.simulation.hsdp.faults import Schedule
from tests.simulation.hsdp.shape import draw_shape
from tests.simulation.hsdp.world import World

LONGEST_S = 400.0
"""Virtual seconds after which a run counts as a hang."""
LAST_STEPS = 3
"""Number of steps that a run continues after all faults are over and all replicas are healthy."""


@dataclass(frozen=True)
class SimulationOptions:
    """The user's options for all simulated runs.

    Attributes:
        faults: maximum number of faults in one run.
        kinds: kinds of faults to use; None: all.
    """

    faults: int = 8
    kinds: tuple[str, ...] | None = None


@dataclass
class History:
    """The result of one simulated run.

    Attributes:
        seed: seed from which the run was drawn.
        violation: the property that does not hold, "" if all properties hold.
        struck: kinds of the injected faults.
        seconds: duration of the run in virtual seconds.
        steps: number of committed steps of the run.
        redone: number of committed steps that were executed again.
        returns: number of steps committed by replicas that were behind the others.
        quorums: number of quorums (sets of replicas that execute a step together) that were formed.
        loads: number of times that a checkpoint was loaded because all state was lost.
        deaths_of_server: number of deaths of the quorum server.
        pauses: kind of fault -> longest time without a commit that this kind caused, beyond a step, in virtual seconds.
        lines: event log, empty unless requested.
    """

    seed: int
    violation: str = ""
    struck: list[str] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    redone: int = 0
    returns: int = 0
    quorums: int = 0
    loads: int = 0
    deaths_of_server: int = 0
    pauses: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def simulate(seed: int, options: SimulationOptions, with_lines: bool = False) -> History:
    """Simulate the run of ``seed``. The simulation is deterministic: the same arguments give the same result.

    Args:
        seed: seed of all randomness.
        options: the user's options.
        with_lines: whether to keep the event log.
    """
    history, rng = History(seed), random.Random(seed)
    shape, schedule = draw_shape(rng), Schedule(rng, options.faults, options.kinds)
    if with_lines:
        history.lines.append(f"seed {seed}: {shape}")
        history.lines.append("planned faults: " + (", ".join(kind.name for kind in schedule.kinds) or "none"))
    world = World(rng, shape, history.lines if with_lines else None)
    try:
        _play(world, schedule)
    except Violation as violation:
        history.violation = str(violation)
    except Exception as error:  # an exception in the decision code is reported as a violation too
        where = traceback.extract_tb(error.__traceback__)[-1]
        history.violation = f"{type(error).__name__} in {where.name}, line {where.lineno}: {error}"
    checks = world.checks
    history.struck, history.seconds = [name for _, name in world.struck], world.time.now
    history.steps, history.redone, history.pauses = checks.newest_step, checks.redone, checks.pauses
    history.loads = checks.loads
    history.returns, history.quorums = checks.returns, checks.quorums
    history.deaths_of_server = world.deaths_of_server
    if history.violation:
        world.note("VIOLATION: {}", history.violation)
    return history


def _play(world: World, schedule: Schedule) -> None:
    world.start()
    schedule.begin(world)
    turns = 0
    while world.unfinished:
        if not world.time.turn():
            world.checks.fail("no event is left, but the run has not ended")
        turns += 1
        if turns % 64:  # checking the state after every event would take too long
            continue
        if world.last_step is None and world.checks.all_healthy_at > world.calm_at:
            # after a load, no step may have been committed yet: the state is then that of the checkpoint
            world.last_step = max(world.checks.newest_step, world.checkpoint.step) + LAST_STEPS
            world.note("all are healthy: the run ends after step {}", world.last_step)
        world.checks.look()
        if world.time.now > LONGEST_S:
            world.checks.fail("the run does not end")
    world.checks.ended()
