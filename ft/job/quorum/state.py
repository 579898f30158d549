"""What the quorum server knows, and how what it is told changes that."""

from dataclasses import dataclass, field, replace
from typing import Any

from ft.base.errors import UserError
from ft.job.quorum.limits import Limits
from ft.job.quorum.values import Quorum, Report

EXPECTED, ARRIVING, HERE, LOST, OFFLINE = "expected", "arriving", "here", "lost", "offline"
SPAN = 10**9
"""Numbers of quorums that belong to one term of a server: no two servers can ever give the same one."""


@dataclass(frozen=True)
class Options:
    """Of a run.

    Attributes:
        replicas: how many there are at full strength, 0 to replicas - 1; more may come. min_replicas: below it nobody
            trains. forgiven: quorums in a row that may fail, all members alive, before one is left out for it.
    """

    replicas: int
    min_replicas: int = 1
    forgiven: int = 1
    limits: Limits = field(default_factory=Limits)

    def check(self) -> "Options":
        """Returns itself.

        Raises:
            UserError: they cannot work.
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
    """Why a replica is left out: ``until`` when, and how often it had to be."""

    until: float = 0.0
    length_s: float = 0.0
    times: int = 0


@dataclass
class Replica:
    """One replica.

    Attributes:
        phase: EXPECTED: nothing was heard of it; ARRIVING: its processes have begun; HERE: its leader is connected;
            LOST: that connection broke; OFFLINE. since: when that began. reason: of the last change.
        life: the newest. over: the newest that has left, or that was given up. heard_at: last sign of life.
        report: the one that waits for an answer, at reported_at; answered: the last one that got it on this connection.
        waited_s: how long the others have waited for this arrival. step_s: its usual step. is_online: it has reported
        in this life. has_finished: it has done the last step. is_aside: it has said that its next report will take
        longer than steps do. is_cut_off: OFFLINE by its broken connection alone: nobody has said so. is_given_up: no
        other life of it is to come.
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
    waited_s: float = 0.0
    step_s: float | None = None
    is_online: bool = False
    has_finished: bool = False
    is_aside: bool = False
    is_cut_off: bool = False
    is_given_up: bool = False
    ban: Ban = field(default_factory=Ban)

    def becomes(self, phase: str, now: float, reason: str = "") -> None:
        if phase != self.phase:
            self.since = now
        self.phase, self.reason, self.is_cut_off = phase, reason, False
        if phase != HERE:
            self.report = None


@dataclass(frozen=True)
class Note:
    """An event: its name in ``ft.base.events`` and its values."""

    name: str
    values: dict[str, Any]


@dataclass
class State:
    """What the server knows.

    Attributes:
        term: of this server. began_at: when it did. last: the last quorum; formed_at: when that was, or was heard of.
        highest: number that the next quorum's has to exceed. failed: how often in a row quorums of the same members for
            the same step did not carry it through. end: the furthest state of a replica that has finished, known for
            those that come when it has left. looked_at: when the server last took note that time passes.
    """

    options: Options
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
    def begin(cls, options: Options, term: int, now: float, end: tuple[int, int] | None = None) -> "State":
        """Before anything was heard. ``end``: what the server before this one knew of it."""
        known = {number: Replica(since=now) for number in range(options.replicas)}
        return cls(options, term, now, known, formed_at=now, highest=term * SPAN, end=end, looked_at=now)

    def of(self, replica: int) -> Replica:
        return self.replicas.setdefault(replica, Replica())

    def pending(self) -> dict[int, Report]:
        """Reports that wait for an answer, by replica."""
        return {number: one.report for number, one in sorted(self.replicas.items()) if one.report is not None}

    def returned(self) -> dict[int, Report]:
        """Those of members of the last quorum that are done with it, well or not."""
        last = self.last
        if last is None:
            return {}
        return {
            number: report
            for number, report in self.pending().items()
            if last.lives.get(number) == report.life and report.number >= last.number
        }

    def is_member(self, replica: int) -> bool:
        """Whether this life of it was in the last quorum."""
        return self.last is not None and self.last.lives.get(replica) == self.of(replica).life

    def step_s(self) -> float | None:
        """The longest usual step of those that wait."""
        known = [self.of(number).step_s for number in self.pending()]
        return max((value for value in known if value is not None), default=None)

    def needed_term(self) -> int:
        """The term whose numbers are above all that were heard of."""
        return self.highest // SPAN


def heard_of(state: State, now: float, quorum: Quorum | None, number: int) -> None:
    """A client knows of this last quorum and number: this server goes on from there."""
    state.highest = max(state.highest, number, quorum.number if quorum else 0)
    if quorum is not None and not quorum.finished and (state.last is None or quorum.number > state.last.number):
        state.last, state.formed_at, state.failed = quorum, now, 0
        for replica, life in quorum.lives.items():
            one = state.of(replica)
            one.life = max(one.life, life)


def started(replica: Replica, life: int, now: float) -> None:
    """A new life of it: what was held against the old one is not forgotten, but tried out."""
    replica.life, replica.report, replica.waited_s, replica.step_s = life, None, 0.0, None
    replica.has_finished = replica.is_aside = replica.is_given_up = False
    replica.ban = replace(replica.ban, until=now)
