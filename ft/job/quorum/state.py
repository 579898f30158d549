"""State of the quorum server: its data about each replica and about the last quorum.

The lineage of a state is the number of the quorum in which its last step was committed.
"""

from dataclasses import dataclass, field, replace

from ft.base.errors import UserError
from ft.job.quorum.limits import Limits
from ft.job.quorum.values import Quorum, Report

EXPECTED, ARRIVING, HERE, LOST, OFFLINE = "expected", "arriving", "here", "lost", "offline"
"""Phases of a replica, explained at ``Replica.phase``."""
SPAN = 10**9
"""Quorum numbers of one term: the server of term t counts from t * SPAN + 1, so no two servers use the same number."""


@dataclass(frozen=True)
class QuorumOptions:
    """Options of a run's quorum, given to the server at its start.

    Attributes:
        replicas: number of replicas at full strength, numbered 0 to replicas - 1; replicas with higher numbers may
            join.
        min_replicas: smallest number of replicas in a quorum; with fewer, no replica trains.
        forgiven: number of consecutive quorums that may fail with all members alive before a member is excluded for it.
        limits: timeouts of the quorum.
    """

    replicas: int
    min_replicas: int = 1
    forgiven: int = 1
    limits: Limits = field(default_factory=Limits)

    def check(self) -> "QuorumOptions":
        """Check the options and return them.

        Raises:
            UserError: the options contradict each other or are out of range.
        """
        if not 1 <= self.min_replicas <= self.replicas:
            raise UserError(
                f"min_replicas is {self.min_replicas} of {self.replicas} replicas",
                f"give a minimum of 1 to {self.replicas}",
            )
        if self.forgiven < 0:
            raise UserError(f"forgiven is {self.forgiven}", "give 0 or more")
        self.limits.check()
        return self


@dataclass
class Ban:
    """Temporary exclusion of a replica from quorums.

    Attributes:
        until: end of the exclusion, in seconds of the server's monotonic clock.
        length_s: length of the last exclusion, in seconds.
        times: number of exclusions, each doubling the length of the next; reset once the replica is healthy in a quorum
            more than ``length_s`` after the end of the last one.
    """

    until: float = 0.0
    length_s: float = 0.0
    times: int = 0


@dataclass
class Replica:
    """The server's data about one replica. All times are in seconds of the server's monotonic clock.

    Attributes:
        phase: EXPECTED: nothing was heard from the replica. ARRIVING: its processes have started. HERE: its leader is
            connected. LOST: that connection broke. OFFLINE: the replica has left, was given up, or its connection
            stayed broken.
        since: time at which the phase began.
        reason: reason of the last change of phase.
        life: number of its newest life (world of worker processes).
        over: number of the newest life that has left or was given up.
        heard_at: time of its last heartbeat or message.
        report: its report that waits for an answer, or None.
        reported_at: time at which that report arrived.
        answered: its last report that was answered on the present connection.
        steps: least number of committed steps that the state of its present life contains, as far as is known.
        waited_s: seconds that the other replicas have waited for its present arrival.
        step_s: its usual duration of a step in seconds, None while unknown.
        is_online: whether it has reported in its present life.
        has_finished: whether it has done the last step of the run.
        is_aside: whether it has announced that its next report will take longer than a step does.
        is_cut_off: whether it is OFFLINE only because its connection broke; neither the replica nor its launcher has
            confirmed its end.
        is_given_up: whether its launcher has announced that no other life of it will start.
        repairs_since: time at which ranks of it announced that a lost worker of it is being replaced; None if none is.
        ban: its temporary exclusion.
    """

    phase: str = EXPECTED
    since: float = 0.0
    reason: str = ""
    life: int = -1
    over: int = -1
    heard_at: float = 0.0
    report: Report | None = None
    reported_at: float = 0.0
    answered: Report | None = None
    steps: int = 0
    waited_s: float = 0.0
    step_s: float | None = None
    is_online: bool = False
    has_finished: bool = False
    is_aside: bool = False
    is_cut_off: bool = False
    is_given_up: bool = False
    repairs_since: float | None = None
    ban: Ban = field(default_factory=Ban)

    def becomes(self, phase: str, now: float, reason: str = "") -> None:
        """Enter ``phase`` at time ``now`` because of ``reason``; a report is kept only in phase HERE."""
        if phase != self.phase:
            self.since = now
        self.phase, self.reason, self.is_cut_off = phase, reason, False
        if phase != HERE:
            self.report = None


@dataclass
class QuorumState:
    """Everything that the quorum server knows; :mod:`ft.job.quorum.reactions` changes it, ``decide`` reads it.

    Attributes:
        options: options of the run.
        term: term of this server.
        began_at: time at which this server started.
        replicas: replicas by number.
        last: the last quorum, None before the first.
        formed_at: time at which the last quorum was formed, or at which this server learned of it.
        highest: number that the next quorum's number must exceed.
        failed: number of consecutive retries: quorums with the same members for the same step as the one before.
        end: (next_step, lineage) of the furthest replica that has finished, kept for replicas that connect after it has
            left.
        looked_at: time at which the server last called ``reactions.time_passed``.
    """

    options: QuorumOptions
    term: int
    began_at: float
    replicas: dict[int, Replica] = field(default_factory=dict)
    last: Quorum | None = None
    formed_at: float = 0.0
    highest: int = 0
    failed: int = 0
    end: tuple[int, int] | None = None
    looked_at: float = 0.0

    @classmethod
    def begin(cls, options: QuorumOptions, term: int, now: float, end: tuple[int, int] | None = None) -> "QuorumState":
        """Return the initial state of a server. ``end``: as in the attributes, taken over from the previous server."""
        known = {number: Replica(since=now) for number in range(options.replicas)}
        return cls(options, term, now, known, formed_at=now, highest=term * SPAN, end=end, looked_at=now)

    def of(self, replica: int) -> Replica:
        """Return the entry of ``replica``, created if it is new."""
        if replica not in self.replicas:
            self.replicas[replica] = Replica()
        return self.replicas[replica]

    def pending(self) -> dict[int, Report]:
        """Return the reports that wait for an answer, by replica."""
        return {number: one.report for number, one in sorted(self.replicas.items()) if one.report is not None}

    def returned(self) -> dict[int, Report]:
        """Return the pending reports of members of the last quorum that are done with it, successfully or not."""
        last = self.last
        if last is None:
            return {}
        return {
            number: report
            for number, report in self.pending().items()
            if last.lives.get(number) == report.life and report.number >= last.number
        }

    def is_member(self, replica: int) -> bool:
        """Return whether the present life of ``replica`` was a member of the last quorum."""
        return self.last is not None and self.last.lives.get(replica) == self.of(replica).life

    def step_s(self) -> float | None:
        """Return the longest usual step, in seconds, of the replicas whose reports are pending; None if none is
        known.
        """
        known = [self.of(number).step_s for number in self.pending()]
        return max((value for value in known if value is not None), default=None)

    def needed_term(self) -> int:
        """Return the term that contains the highest quorum number that this server or a client knows."""
        return self.highest // SPAN


def heard_of(state: QuorumState, now: float, quorum: Quorum | None, number: int) -> None:
    """Adopt the last quorum and the highest number that a client knows of, so that this server continues from there."""
    state.highest = max(state.highest, number, quorum.number if quorum else 0)
    if quorum is not None and not quorum.finished and (state.last is None or quorum.number > state.last.number):
        state.last, state.formed_at, state.failed = quorum, now, 0
        for replica, life in quorum.lives.items():
            one = state.of(replica)
            if life > one.life:
                one.life, one.steps = life, 0
            if life == one.life and replica in quorum.healthy:
                one.steps = max(one.steps, quorum.step)


def started(replica: Replica, life: int, now: float) -> None:
    """Begin a new life of ``replica``. An exclusion ends at once, but its count is kept for the next one."""
    replica.life, replica.report, replica.steps, replica.waited_s, replica.step_s = life, None, 0, 0.0, None
    replica.has_finished = replica.is_aside = replica.is_given_up = False
    replica.ban = replace(replica.ban, until=now)
