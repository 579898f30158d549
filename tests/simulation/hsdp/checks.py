"""Invariants that every simulated run of FT-HSDP's protocol must keep.

The invariants are checked against the states that the ranks actually hold, not against the states in their reports. A
state is identified by its step and lineage, the number of the quorum that committed the last step. A quorum is the set
of replicas that execute a step together; a life is one set of a replica's worker processes.
"""

from typing import TYPE_CHECKING

from ft.job.quorum.state import HERE
from ft.job.quorum.values import Quorum
from ft.systems.hsdp.protocol import Agreed
from tests.simulation.engine import Violation
from tests.simulation.hsdp.held import Contribution, Held, first
from tests.simulation.hsdp.ring import address_row
from tests.simulation.hsdp.shape import RING_LIMITS

if TYPE_CHECKING:
    from tests.simulation.hsdp.rank import Rank
    from tests.simulation.hsdp.server import Server
    from tests.simulation.hsdp.world import World

STUCK_S = 25.0
"""Virtual seconds without a committed step and without a fault that count as a hang."""
FIRST_STEP_S = 2 * RING_LIMITS.aside_s
"""Further virtual seconds for a life that has no step yet: its rings have the long limit, and to find out by trial who
cannot be reached takes up to three of them.
"""
BACK_S = 45.0
"""Virtual seconds after the last fault within which all replicas must be healthy."""

KILLS = (
    *("kill", "kill a leader", "kill at the end of a ring", "kill the first one through"),
    *("kill between vote and step", "kill who catches up", "kill a source of catch-up", "kill after the last step"),
)
"""Faults that end exactly one replica each."""


class Checks:
    """The invariants and statistics of one simulated run.

    Attributes:
        commits: number of committed steps, summed over all replicas.
        redone: number of committed steps that were executed again.
        pauses: kind of fault -> longest time between two commits that this kind caused, beyond a step, in virtual
            seconds.
        all_healthy_at: virtual time in seconds at which all replicas were last healthy, -1 if never.
        progress_at: virtual time in seconds at which a new step was last committed.
        saved_at: virtual time in seconds at which a replica last ended to write a checkpoint; the others wait for it.
        returns: number of steps that replicas committed while they were behind.
        loads: number of times that a checkpoint was loaded because all state was lost.
    """

    def __init__(self, world: "World"):
        self._world = world
        self.commits, self.redone, self.all_healthy_at, self.progress_at = 0, 0, -1.0, 0.0
        self.saved_at = 0.0
        self._with_steps: set[tuple[int, int]] = set()  # (replica, life)
        self.pauses: dict[str, float] = {}
        self.returns = self.loads = 0
        self._beginning = beginning = first(world.shape)
        self._consumed = {beginning.chain: beginning.positions}
        self._named = {beginning.name: beginning.chain}
        self._newest = beginning
        self._numbers: set[int] = set()
        self._committed_at = 0.0

    @property
    def newest_step(self) -> int:
        """Return the last committed step."""
        return self._newest.step

    @property
    def quorums(self) -> int:
        """Return the number of quorums formed."""
        return len(self._numbers)

    def fail(self, text: str) -> None:
        raise Violation(text)

    # --- quorums -----------------------------------------------------------------------------------------------------

    def formed(self, server: "Server", quorum: Quorum) -> None:
        """Check a quorum that a server has formed."""
        if quorum.number in self._numbers:
            self.fail(f"a second quorum has the number {quorum.number}")
        self._numbers.add(quorum.number)
        if quorum.finished:
            return
        self._check_load(quorum)
        self._check_patience(server, quorum)
        self.loads += quorum.load and self._newest.step > self._beginning.step
        self._check_regress(server, quorum)
        server.furthest = quorum.step
        if not quorum.load and len(quorum.healthy) == self._world.shape.replicas:
            self.all_healthy_at = self._world.time.now

    def _check_load(self, quorum: Quorum) -> None:
        """Check that a quorum loads a checkpoint only if no member has a state."""
        for replica, number in quorum.lives.items():
            life = self._world.agents[replica].life
            if quorum.load and life is not None and life.number == number and life.ranks[0].held.lineage != -1:
                self.fail(f"all are to load a checkpoint, and replica {replica} holds {life.ranks[0].held.name}")

    def _check_patience(self, server: "Server", quorum: Quorum) -> None:
        """Check that the quorum does not leave out a live replica that has announced that it writes a checkpoint.

        The server must wait for the replica up to the limit ``aside_s``, as long as it receives heartbeats from the
        replica.
        """
        now, state = self._world.time.now, server.state
        for life in self._world.lives():
            replica, limits = life.agent.replica, self._world.limits
            is_here = (
                state.is_member(replica) and state.of(replica).phase == HERE and state.of(replica).ban.until <= now
            )
            is_heard = state.of(replica).heard_at > now - limits.silent_s
            since = life.aside_since
            if since is None or replica in quorum.lives or life.number != state.of(replica).life:
                continue
            if since + 0.1 < now < since + limits.aside_s and is_here and is_heard:
                self.fail(f"quorum {quorum.number} does not wait for replica {replica}, which saves since {since:.1f}")

    def _check_regress(self, server: "Server", quorum: Quorum) -> None:
        """Check that a quorum rolls back more than the interrupted step only if no replica with a newer state has been
        heard recently.
        """
        furthest = self._newest
        if quorum.load and furthest.step == self._beginning.step:
            return
        lost = furthest.step - quorum.step
        if lost > 0:
            self.redone += lost
            for life in self._world.lives():
                leader = life.ranks[0]
                if leader.held.step > quorum.step + 1 and self._must_be_waited_for(server, quorum, leader):
                    self.fail(
                        f"quorum {quorum.number} goes back to step {quorum.step}, and replica {leader.replica} lives, "
                        f"holds step {leader.held.step} and was last heard of a short while ago"
                    )
            self._newest = Held(quorum.step, quorum.lineage, 0)

    def _must_be_waited_for(self, server: "Server", quorum: Quorum, leader: "Rank") -> bool:
        """Return whether this server knows that a later step was committed, and has heard from ``leader`` within the
        limit ``regress_s``.
        """
        world = self._world
        lives = leader.is_alive and not leader.life.is_closing
        knows = server.furthest > quorum.step + 1 and leader.life.quorum is not None and lives
        unheard_s = world.time.now - world.unheard_since(leader.replica)
        return knows and unheard_s < world.limits.regress_s - 0.5

    def connects(self, rank: "Rank", agreed: Agreed, quorum: Quorum, to: str) -> None:
        """Check that a rank connects ("ring" or "fetch") to the present processes of a quorum's members."""
        for replica, life in quorum.lives.items():
            address, wanted = agreed.rows[replica][rank.index][to], address_row(replica, life, rank.index)[to]
            if address != wanted:
                self.fail(f"{_who(rank)} connects to {address!r} in quorum {quorum.number}, it should be {wanted!r}")

    # --- states ------------------------------------------------------------------------------------------------------

    def is_healthy(self, rank: "Rank", quorum: Quorum) -> None:
        """Check that a rank that is about to train holds the state named in the quorum, equal to that of the others."""
        if rank.held.name != (quorum.step, quorum.lineage):
            self.fail(f"{_who(rank)} trains step {quorum.step} of lineage {quorum.lineage} with {rank.held.name}")
        if rank.model != rank.held.chain and not rank.is_wrong:
            self.fail(f"{_who(rank)} trains step {quorum.step} with another model than its state")
        self._check_name(rank)

    def about_to_commit(self, rank: "Rank", quorum: Quorum) -> None:
        """Check that a rank that is about to commit a step holds the state named in the quorum."""
        if rank.is_wrong and len(quorum.healthy) > 1:  # alone, it has nobody to compare with
            self.fail(f"{_who(rank)} commits step {quorum.step} with a wrong model")
        if rank.held.name != (quorum.step, quorum.lineage):
            self.fail(f"{_who(rank)} commits step {quorum.step} of lineage {quorum.lineage} on {rank.held.name}")

    def estimated(self, exact: Held, estimate: Held) -> None:
        """Take note that a replica goes on from an estimate of a state: it has consumed the same samples."""
        self._consumed[estimate.chain] = self._consumed[exact.chain]

    def adopted(self, rank: "Rank") -> None:
        """Check the state that a rank has fetched and adopted."""
        self._check_name(rank)

    def _check_name(self, rank: "Rank") -> None:
        """Check that all states with the same (step, lineage) are equal, and that committed steps have led to them."""
        chain = self._named.setdefault(rank.held.name, rank.held.chain)
        if chain != rank.held.chain:
            self.fail(f"{_who(rank)} holds another state under the name {rank.held.name} than others do")
        consumed = self._consumed.get(chain)
        if consumed is None:
            self.fail(f"{_who(rank)} holds a state under the name {rank.held.name} that no step has led to")
        if consumed != rank.held.positions:
            self.fail(f"{_who(rank)} has positions {rank.held.positions}, and consumed were {consumed}")

    def committed(self, rank: "Rank", before: Held, quorum: Quorum, total: tuple[Contribution, ...]) -> None:
        """Check a committed step: its gradient contains the next block of samples of each contributing replica. On the
        way to a state, no block is trained twice and none is left out.
        """
        consumed = self._consumed.get(before.chain)
        if consumed is None:
            self.fail(f"{_who(rank)} commits step {quorum.step} on a state that no step has led to")
        now = list(consumed)
        for replica, position in total:
            if position != consumed[replica]:
                what = "again" if position < consumed[replica] else "and leaves some out before it"
                self.fail(f"step {quorum.step} trains block {position} of replica {replica} {what}: {total}")
            now[replica] += 1
        self._consumed.setdefault(rank.held.chain, tuple(now))
        self._check_name(rank)
        if rank.index == 0:
            self._progress(rank, quorum)

    def _progress(self, rank: "Rank", quorum: Quorum) -> None:
        world, held = self._world, rank.held
        self._with_steps.add((rank.replica, rank.life.number))
        self.commits += 1
        if held.name > self._newest.name:
            now = world.time.now
            if held.step > self._beginning.step + 1:
                causes = {kind for at, kind in world.over if at > self._committed_at - 15.0}
                key = causes.pop() if len(causes) == 1 else "several" if causes else "none"
                pause = now - self._committed_at - world.shape.step_s
                self.pauses[key] = max(self.pauses.get(key, 0.0), pause)
            self._newest, self._committed_at, self.progress_at = held, now, now
        if rank.replica in quorum.behind:
            self.returns += 1

    def ends_itself(self, rank: "Rank", reason: str) -> None:
        """Check that a rank ends itself only if its replica has lost a rank, or if all state is lost before the first
        checkpoint.
        """
        if not rank.life.is_closing and "there is no checkpoint" not in reason:
            self.fail(f"{_who(rank)} ends without need: {reason}")

    def at_rest(self, rank: "Rank") -> None:
        """Check that all ranks of a replica hold equal states after a step, when the last of them has committed it."""
        ranks = rank.life.ranks
        if len({each.held.step for each in ranks}) == 1 and len({each.held for each in ranks}) > 1:
            self.fail(f"the ranks of replica {rank.replica} are not equal: {[each.held.name for each in ranks]}")

    def ended(self) -> None:
        """Check at the end of a run that the last checkpoint is there, and that each kill of one replica has cost at
        most the interrupted step, unless all state was lost.
        """
        if self._world.checkpoint.step < (self._world.last_step or 0):
            self.fail(f"the run ends without its last checkpoint, that of step {self._world.last_step}")
        kinds = [kind for _, kind in self._world.struck]
        if not self.loads and all(kind in KILLS for kind in kinds) and self.redone > len(kinds):
            self.fail(f"{self.redone} steps were done again for {len(kinds)} kills of one replica")

    # --- progress ----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Check periodically that training makes progress, and that all replicas are healthy in time."""
        world, now = self._world, self._world.time.now
        since = max([self.progress_at, self.saved_at, world.blocked_until, *(at for at, _ in world.struck)])
        is_first = any((life.agent.replica, life.number) not in self._with_steps for life in world.lives())
        if now - since > STUCK_S + FIRST_STEP_S * is_first and world.unfinished:
            self.fail(f"a hang: no committed step since {self.progress_at:.1f}, no fault since {since:.1f}")
        if world.last_step is None and now > world.calm_at + BACK_S:
            self.fail(f"not all replicas are healthy {BACK_S:.0f} s after the last fault, at {world.calm_at:.1f}")


def _who(rank: "Rank") -> str:
    return f"replica {rank.replica} rank {rank.index}"
