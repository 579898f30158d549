"""Faults in the simulation of FT-HSDP's protocol: their kinds, their relative frequencies, and their schedule.

A history is one simulated run, drawn from a seed. Its ``World`` contains the replicas, their networks and the quorum
server. A *life* is one incarnation of a replica's worker processes. A *ring* all-reduces gradients between the ranks
with equal numbers in different replicas.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation import engine

if TYPE_CHECKING:
    from tests.simulation.hsdp.rank import Rank
    from tests.simulation.hsdp.world import World

_FIRST_S, _GAP_S, _BURST_S = (1.5, 4.0), (0.3, 5.0), (0.0, 0.3)
"""Virtual seconds (least, most) until the first fault, between two faults, and between two faults of a burst."""


@dataclass(frozen=True)
class Kind(engine.Kind):
    """A kind of fault. ``strike`` returns the fault's duration in virtual seconds, or None if the world has no target
    for it.

    Attributes:
        blocks: whether training may stop for the duration of the fault. A fault of the network between replicas does
            not stop training, unless the quorum needs a minimum of more than one replica: the quorum server then has to
            find out by trial which replica to exclude.
    """

    blocks: bool = True


def kill(rank: "Rank", why: str = "killed") -> None:
    """End a rank's process; the agent of its replica then ends the other ranks of the life."""
    rank.world.note("replica {} rank {}: {}", rank.replica, rank.index, why)
    rank.dies()
    rank.life.agent.lost(rank.life, why)


def _any(world: "World", index: int | None = None) -> "Rank | None":
    lives = [life for life in world.lives() if all(rank.is_alive for rank in life.ranks)]
    if not lives:
        return None
    ranks = world.rng.choice(lives).ranks
    return world.rng.choice(ranks) if index is None else ranks[index]


def _kills(number: int, index: int | None = None):
    def strike(world: "World") -> float | None:
        lives = world.rng.sample(world.lives(), min(number, len(world.lives())))
        for life in lives:
            kill(world.rng.choice(life.ranks) if index is None else life.ranks[index])
        return 0.0 if lives else None

    return strike


def _kill_all_but_one(world: "World") -> float | None:
    return _kills(max(1, len(world.lives()) - 1))(world)


def _kill_all(world: "World") -> float | None:
    return _kills(world.shape.replicas)(world)


def _pause(world: "World") -> float | None:
    rank = _any(world)
    if rank is None:
        return None
    seconds = world.rng.uniform(0.1, 1.8)
    world.note("replica {} rank {}: pauses for {:.2f} s", rank.replica, rank.index, seconds)
    rank.awake_at = max(rank.awake_at, world.time.now + seconds)
    world.outage(rank.replica, seconds)
    return seconds


def _hang(world: "World") -> float | None:
    rank = _any(world)
    if rank is None:
        return None
    world.note("replica {} rank {}: hangs", rank.replica, rank.index)
    rank.awake_at = 1e9
    world.outage(rank.replica, world.shape.hang_s)
    world.time.after(world.shape.hang_s, rank.life.agent.lost, rank.life, "hung")
    return world.shape.hang_s


def _cut_from_server(world: "World") -> float | None:
    replica, seconds = world.rng.randrange(world.shape.replicas), world.rng.uniform(0.05, 4.0)
    world.note("replica {}: cut off from the quorum server for {:.2f} s", replica, seconds)
    world.cut(replica, None, seconds)
    return seconds


def _cut_two(world: "World") -> float | None:
    one, other = world.rng.sample(range(world.shape.replicas), 2)
    seconds = world.rng.uniform(0.05, 6.0) if world.rng.random() < 0.8 else world.rng.uniform(30.0, 40.0)
    world.note("replicas {} and {}: cut off from each other for {:.2f} s", one, other, seconds)
    world.cut(one, other, seconds)
    return seconds


def _change_sides(world: "World") -> float | None:
    """Cut off all replicas but one from the quorum server, then cut off that one when the others return.

    The one replica trains alone until the others are connected again. Half of the time it then stays away for longer
    than the server waits for a replica that is further, so that the others repeat its steps.
    """
    alone, seconds = world.rng.randrange(world.shape.replicas), world.rng.uniform(1.0, 2.5)
    for other in range(world.shape.replicas):
        if other != alone:
            world.note("replica {}: cut off from the quorum server for {:.2f} s", other, seconds)
            world.cut(other, None, seconds)
    then = world.rng.uniform(0.5, 2.5) + (world.limits.regress_s if world.rng.random() < 0.5 else 0.0)
    world.note("replica {}: then cut off from it for {:.2f} s", alone, then)
    world.time.after(seconds - 0.2, world.cut, alone, None, then)
    return seconds + then


def _cut_from_all(world: "World") -> float | None:
    one, seconds = world.rng.randrange(world.shape.replicas), world.rng.uniform(0.05, 4.0)
    world.note("replica {}: cut off from everybody for {:.2f} s", one, seconds)
    for other in (None, *range(world.shape.replicas)):
        if other != one:
            world.cut(one, other, seconds)
    return seconds


def _end_server(world: "World") -> float | None:
    server = world.standing
    if not server.is_alive:
        return None
    world.note("the quorum server of term {} is killed", server.term)
    world.deaths_of_server += 1
    server.dies()
    seconds = world.rng.uniform(0.05, 1.0)
    world.time.after(seconds, world.start_server)
    return seconds


def _pause_server(world: "World") -> float | None:
    """Pause the quorum server. With probability 0.5, start another server meanwhile, so that two servers exist when the
    paused one resumes.
    """
    server, seconds = world.standing, world.rng.uniform(0.2, 3.0)
    if not server.is_alive:
        return None
    world.note("the quorum server of term {} pauses for {:.2f} s", server.term, seconds)
    server.awake_at = max(server.awake_at, world.time.now + seconds)
    if world.rng.random() < 0.5:
        world.time.after(world.rng.uniform(0.1, 1.5), world.start_server)
    return seconds + 1.5


def _reset(world: "World") -> float | None:
    server = world.standing
    open_ones = [c for c in server.connections if c.replica is not None]
    if not open_ones:
        return None
    connection = world.rng.choice(open_ones)
    world.note("replica {}: its connection to the quorum server breaks", connection.replica)
    connection.closed_by_server()
    server.loses(connection)
    return 0.0


def _slow(world: "World") -> float | None:
    replica, seconds = world.rng.randrange(world.shape.replicas), world.rng.uniform(0.5, 4.0)
    factor = world.rng.uniform(2.0, 8.0)
    world.note("replica {}: steps last {:.1f} times as long for {:.2f} s", replica, factor, seconds)
    world.slow_down(replica, factor, seconds)
    return seconds


def _aimed(moment: str, act: "Callable[[Rank], None]", most: int = 3):
    """Return a ``strike`` function that waits until a rank reaches a moment of the protocol, and then applies ``act``
    to this rank. The ranks that reach the moment first are skipped: a random number, at most ``most``.
    """

    def strike(world: "World") -> float | None:
        left = [world.rng.randint(0, most)]

        def when(rank: "Rank") -> None:
            if left[0] > 0:
                left[0] -= 1
                world.aims[moment].append(when)
                return
            act(rank)
            world.lasts(0.0)
            world.blocked_until = max(world.blocked_until, world.time.now)

        world.aims.setdefault(moment, []).append(when)
        return 0.0

    return strike


def _kill_other(rank: "Rank") -> None:
    """Kill another member of the ring that ``rank`` has just completed. The members may then see different outcomes."""
    others = [life for life in rank.world.lives() if life is not rank.life]
    if others:
        kill(rank.world.rng.choice(others).ranks[rank.index], "killed at the end of a ring")


def _kill_source(rank: "Rank") -> None:
    others = [life for life in rank.world.lives() if life is not rank.life and life.ranks[0].held.step > 0]
    if others:
        kill(rank.world.rng.choice(others).ranks[rank.index], "killed while its state is fetched")


def _kill_server_now(rank: "Rank") -> None:
    _end_server(rank.world)


def _end_with_server(rank: "Rank") -> None:
    """Kill a rank that has done the last step, and the quorum server when other replicas may have left already."""
    kill(rank, "killed after the last step")
    rank.world.time.after(rank.world.rng.uniform(0.0, 1.0), _kill_server_now, rank)


def _undo(rank: "Rank") -> None:
    """Have all ranks of a replica find its next step wrong after the update, when the others may have committed it."""
    step = rank.held.step + 2
    rank.life.undone.add(step)
    rank.world.note("replica {}: step {} will be undone", rank.replica, step)


def _corrupt(rank: "Rank") -> None:
    """Change the model of a rank."""
    rank.is_wrong = True
    rank.world.note("replica {} rank {}: its model changes", rank.replica, rank.index)


KINDS = (
    Kind("kill", 10, _kills(1)),
    Kind("kill a leader", 3, _kills(1, index=0)),
    Kind("kill two replicas", 4, _kills(2)),
    Kind("kill all but one", 2, _kill_all_but_one),
    Kind("kill all", 1, _kill_all),
    Kind("pause", 5, _pause),
    Kind("hang", 4, _hang),
    Kind("cut from the server", 4, _cut_from_server),
    Kind("cut two replicas", 4, _cut_two, blocks=False),
    Kind("change of sides", 2, _change_sides),
    Kind("cut from everybody", 3, _cut_from_all),
    Kind("kill the server", 5, _end_server),
    Kind("pause the server", 3, _pause_server),
    Kind("reset a connection", 3, _reset),
    Kind("slow replica", 3, _slow),
    Kind("kill at the end of a ring", 6, _aimed("ring", _kill_other)),
    Kind("kill the first one through", 4, _aimed("ring", lambda rank: kill(rank, "killed when through"))),
    Kind("kill between vote and step", 4, _aimed("decided", lambda rank: kill(rank, "killed before its step"))),
    Kind("kill who catches up", 3, _aimed("fetch", lambda rank: kill(rank, "killed while it catches up"), most=1)),
    Kind("kill a source of catch-up", 4, _aimed("fetch", _kill_source, most=1)),
    Kind("kill the server at a vote", 3, _aimed("decided", _kill_server_now)),
    Kind("kill after the last step", 2, _aimed("last", lambda rank: kill(rank, "killed after the last step"))),
    Kind("undo a step", 4, _aimed("decided", _undo)),
    Kind("change a model", 2, _aimed("begins", _corrupt)),
    Kind("kill the server after the last step", 2, _aimed("last", _end_with_server)),
)


class Schedule:
    """The faults of one history, at random times; some of them follow the previous fault within 0.3 s.

    Args:
        rng: source of randomness.
        most: maximum number of faults.
        names: kinds of faults to draw from; None: all kinds.
    """

    def __init__(self, rng: random.Random, most: int, names: tuple[str, ...] | None):
        number = rng.randint(0 if names is None else 1, most) if most else 0
        self.kinds = engine.draw(rng, KINDS, names, number)
        self._times, at = [], rng.uniform(*_FIRST_S)
        for _ in self.kinds:
            self._times.append(at)
            at += rng.uniform(*(_BURST_S if rng.random() < 0.4 else _GAP_S))

    def begin(self, world: "World") -> None:
        """Schedule all faults."""
        world.calm_at = self._times[-1] if self._times else 2.0
        for at, kind in zip(self._times, self.kinds, strict=True):
            world.time.after(at, self._strike, world, kind)

    def _strike(self, world: "World", kind: Kind) -> None:
        lasts = kind.strike(world)
        if lasts is not None and (kind.blocks or world.shape.minimum > 1):
            world.blocked_until = max(world.blocked_until, world.time.now + lasts)
        if lasts is not None:
            world.struck.append((world.time.now, kind.name))
            world.over.append((world.time.now + lasts, kind.name))
            world.lasts(lasts)
