"""Simulate one history from its seed, and check its invariants."""

import random
import traceback
from dataclasses import dataclass, field

from ft.lab.simulate.hsdp_protocol.checks import Violation
from ft.lab.simulate.hsdp_protocol.faults import Schedule
from ft.lab.simulate.hsdp_protocol.shape import Habits, draw_shape
from ft.lab.simulate.hsdp_protocol.world import World

LONGEST_S = 400.0
LAST_STEPS = 3


@dataclass(frozen=True)
class Wish:
    """Options of the histories.

    Attributes:
        faults: the most faults in one history.
        kinds: kinds of faults to use; None: all.
    """

    faults: int = 8
    kinds: tuple[str, ...] | None = None


@dataclass
class History:
    """The result of one seed.

    Attributes:
        seed: the seed.
        violation: the property that does not hold, "" if all do.
        struck: kinds of the injected faults.
        seconds: virtual seconds.
        steps: committed steps of the run.
        redone: committed steps that were executed again.
        returns: steps committed by replicas that were behind.
        quorums: quorums formed.
        loads: loads of a checkpoint because all state was lost.
        deaths_of_server: deaths of the quorum server.
        pauses: cause -> longest time without a commit beyond a step, in seconds.
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


def simulate(seed: int, wish: Wish, habits: Habits | None = None, with_lines: bool = False) -> History:
    """Simulate the history of ``seed``. It is deterministic: the same arguments give the same history.

    Args:
        seed: seed of all randomness.
        wish: options of the history.
        habits: behaviour of the model replicas; None: correct.
        with_lines: whether to keep the event log.
    """
    history, rng = History(seed), random.Random(seed)
    shape, schedule = draw_shape(rng), Schedule(rng, wish.faults, wish.kinds)
    if with_lines:
        history.lines.append(f"seed {seed}: {shape}")
        history.lines.append("faults to come: " + (", ".join(kind.name for kind in schedule.kinds) or "none"))
    world = World(rng, shape, habits or Habits(), history.lines if with_lines else None)
    try:
        _play(world, schedule)
    except Violation as violation:
        history.violation = str(violation)
    except Exception as error:  # an exception in the decision code is a finding too, reported with its history
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
    while not all(agent.has_ended for agent in world.agents):
        if not world.time.turn():
            world.checks.fail("nothing is left to happen, and the run has not ended")
        turns += 1
        if turns % 64:
            continue
        if world.last_step is None and world.checks.all_healthy_at > world.calm_at:
            world.last_step = world.checks.newest_step + LAST_STEPS
            world.note("all are healthy: the run ends after step {}", world.last_step)
        world.checks.look()
        if world.time.now > LONGEST_S:
            world.checks.fail("the run does not end")
    world.checks.ended()
