"""The simulated cluster: replicas, their networks, the quorum server, and the faults.

A quorum is the set of replicas that execute a step of FT-HSDP together. A life is one set of a replica's worker
processes. A ring is an all-reduce of gradients between the ranks with the same index in the members of a quorum.
"""

import random
from collections.abc import Callable

from ft.job.quorum.state import QuorumOptions
from ft.job.quorum.values import Quorum
from tests.simulation import engine
from tests.simulation.hsdp.checks import Checks
from tests.simulation.hsdp.faults import Schedule
from tests.simulation.hsdp.held import Held, first
from tests.simulation.hsdp.rank import Rank
from tests.simulation.hsdp.replica import Agent, Life
from tests.simulation.hsdp.ring import Ring
from tests.simulation.hsdp.server import Server
from tests.simulation.hsdp.shape import LIMITS, Shape

_MOST_RINGS = 60
"""Number of rings above which those that nobody uses are forgotten."""


LONGEST_S = 400.0
"""Virtual seconds after which a run counts as a hang."""
LAST_STEPS = 3
"""Number of steps that a run continues after all faults are over and all replicas are healthy."""


class World(engine.World):
    """The state of one simulated run.

    Args:
        rng: source of all randomness but that of ``repairing`` and ``fetching``.
        shape: parameters of the run.
        schedule: the faults.
        lines: event log to append to, None if no log is needed.

    Attributes:
        repairing: source of what is decided about lost workers, so that the rest of a history does not depend on it.
        fetching: source of what is decided about lost states.
        standing: the quorum server that the lease record names (the file ``quorum.json``); clients connect to it.
        lease_term: the server's term in the lease record.
        newest_term: the last term that a quorum server has claimed; each new server has a higher term.
        unfinished: number of replicas for which the run has not finished.
        last_step: step after which the run ends, None while undecided.
        checkpoint: the newest persistent checkpoint.
        aims: moment of the protocol -> actions to run when a rank reaches the moment.
        blocked_until: virtual time in seconds until which training may stop because of a fault.
        outages: replica -> (begin, end) of the times in which the quorum server receives nothing from the replica.
        over: (virtual time of the end, kind) of each fault so far.
    """

    def __init__(self, rng: random.Random, shape: Shape, schedule: Schedule, lines: list[str] | None):
        super().__init__(rng, lines)
        self.shape, self._schedule, self.limits = shape, schedule, LIMITS
        self.repairing = random.Random(f"mending {shape!r}")
        self.fetching = random.Random(f"fetching {shape!r}")
        self.checks = Checks(self)
        self.standing: Server
        self.lease_term, self._lease_end = -1, None
        self.newest_term, self.deaths_of_server = -1, 0
        self.unfinished = shape.replicas
        self.last_step: int | None = None
        self.checkpoint: Held = first(shape)
        self.aims: dict[str, list[Callable[[Rank], None]]] = {}
        self.over: list[tuple[float, str]] = []
        self.blocked_until = 0.0
        self.outages: dict[int, list[tuple[float, float]]] = {replica: [] for replica in range(shape.replicas)}
        self._slow: dict[int, tuple[float, float]] = {}
        self._rings: dict[tuple[int, int], Ring] = {}
        self.agents = [Agent(self, replica) for replica in range(shape.replicas)]

    def start(self) -> None:
        self.start_server()
        for agent in self.agents:
            agent.build(self.rng.uniform(0.05, 1.0))
        self._schedule.begin(self)

    @property
    def has_ended(self) -> bool:
        return not self.unfinished

    def look(self) -> bool:
        """Let the run end soon if all replicas are healthy, and check that it goes on."""
        if self.last_step is None and self.checks.all_healthy_at > self.calm_at:
            # after a load, no step may have been committed yet: the state is then that of the checkpoint
            self.last_step = max(self.checks.newest_step, self.checkpoint.step) + LAST_STEPS
            self.note("all are healthy: the run ends after step {}", self.last_step)
        self.checks.look()
        if self.time.now > LONGEST_S:
            self.checks.fail("the run does not end")
        return False

    def ended(self) -> None:
        self.checks.ended()

    def sum_up(self, history: engine.History) -> None:
        checks = self.checks
        history.struck, history.pauses = [name for _, name in self.struck], checks.pauses
        history.counts.update(steps=checks.newest_step, redone=checks.redone, returns=checks.returns)
        history.counts.update(quorums=checks.quorums, loads=checks.loads, deaths_of_server=self.deaths_of_server)
        if history.violation:
            self.note("VIOLATION: {}", history.violation)

    # --- the quorum server -------------------------------------------------------------------------------------------

    def claim(self, least: int) -> int:
        """Return a new term for a quorum server, higher than all before and at least ``least``."""
        self.newest_term = max(least, self.newest_term + 1)
        return self.newest_term

    def start_server(self) -> None:
        options = QuorumOptions(self.shape.replicas, self.shape.minimum, limits=self.limits).check()
        end, term = self._lease_end, self.claim(0)
        self.keep_lease(Server(self, term, options, end), term, end)
        self.note("a quorum server starts: term {}", term)
        self.standing.start()

    def keep_lease(self, server: Server, term: int, end: tuple[int, int] | None) -> None:
        """Write the lease record; see ``ft.job.quorum.dispatch.Dispatch.keep_lease``."""
        self.standing, self.lease_term, self._lease_end = server, term, end

    def formed(self, server: Server, quorum: Quorum) -> None:
        """Log and check a quorum that a server has formed."""
        self.note(
            "term {}: quorum {} of step {}, lineage {}: healthy {}, behind {}: {}",
            *(server.term, quorum.number, quorum.step, quorum.lineage),
            *(list(quorum.healthy), list(quorum.behind), quorum.reason),
        )
        self.checks.formed(server, quorum)
        self._forget_rings(quorum.number)

    def _forget_rings(self, newest: int) -> None:
        if len(self._rings) > _MOST_RINGS:
            used = {id(rank.ring) for life in self.lives() for rank in life.ranks}
            self._rings = {key: ring for key, ring in self._rings.items() if key[0] > newest - 20 or id(ring) in used}

    # --- replicas and ranks ------------------------------------------------------------------------------------------

    def lives(self) -> list[Life]:
        """Return the current life of each replica that has one."""
        return [agent.life for agent in self.agents if agent.life is not None]

    def is_over(self, replica: int, life: int) -> bool:
        """Return whether the replica's life with the number ``life`` has ended."""
        there = self.agents[replica].life
        return there is None or there.number != life

    def rank_of(self, replica: int, life: int, index: int) -> Rank | None:
        """Return a rank of a replica's life, None if the life or the rank has ended."""
        if self.is_over(replica, life):
            return None
        rank = self.agents[replica].life.ranks[index]
        return rank if rank.is_alive else None

    def ring(self, quorum: Quorum, index: int) -> Ring:
        """Return the ring of the ranks with this index in a quorum."""
        return self._rings.setdefault((quorum.number, index), Ring(self, quorum, index))

    def rank_gone(self, rank: Rank) -> None:
        """Close the connections of a rank that has died."""
        for (_, index), ring in self._rings.items():
            if index == rank.index and ring.quorum.lives.get(rank.replica) == rank.life.number:
                self.time.after(self.rng.uniform(0.0005, 0.02), ring.member_gone, rank.replica)

    def compute_s(self, replica: int) -> float:
        """Draw the duration of a replica's forward and backward pass, in virtual seconds."""
        until, factor = self._slow.get(replica, (0.0, 1.0))
        return self.shape.step_s * self.rng.uniform(0.7, 1.1) * (factor if self.time.now < until else 1.0)

    # --- faults ------------------------------------------------------------------------------------------------------

    def slow_down(self, replica: int, factor: float, seconds: float) -> None:
        self._slow[replica] = (self.time.now + seconds, factor)

    def cut(self, one: int, other: int | None, seconds: float) -> None:
        """Cut the network between two replicas, or between a replica and the quorum server's host (None)."""
        if other is None:
            self.outage(one, seconds)
        self.network.cut(frozenset((one, other)), seconds)

    def outage(self, replica: int, seconds: float) -> None:
        """Record that the quorum server receives nothing from a replica for ``seconds`` virtual seconds."""
        self.outages[replica].append((self.time.now, self.time.now + seconds))

    def unheard_since(self, replica: int) -> float:
        """Return the virtual time since which the quorum server has received nothing from a replica; the present time
        if no outage is in progress.

        Outages in close succession count as one.
        """
        since = self.time.now
        for begin, end in sorted(self.outages[replica], reverse=True):
            if end >= since - self.limits.contact_s - 0.5:
                since = min(since, begin)
        return since

    def cut_until(self, one: int, other: int | None) -> float:
        return self.network.cut_until(frozenset((one, other)))

    def is_cut(self, one: int, other: int | None) -> bool:
        return self.network.is_cut(frozenset((one, other)))

    def at(self, moment: str, rank: Rank) -> None:
        """Run the action that waits for a rank to reach this moment of the protocol, if there is one."""
        if waiting := self.aims.get(moment):
            waiting.pop()(rank)
