"""Quorum decision as a pure function: whether to form a quorum now or to wait, for which replicas, and until when.

The leader of each replica asks for the quorum with a report. Healthy members have the furthest state and train; members
that are behind fetch this state during the step. A quorum forms as soon as every replica that is known to be alive has
reported. Every wait is bounded (:mod:`ft.job.quorum.limits`), with a limit for each kind of wait (:func:`awaited`).

:func:`judge` chooses the members to exclude when a quorum fails although all of them are alive (a partition between
replicas). The members are connected in all-reduce rings, and every member may report other members that it could not
reach there. A single report is weak evidence: a member that leaves a ring because it lost one neighbour looks lost to
its other neighbour. So no member is excluded after the first failures, nor while a lost member explains the failure.
After that, a member is excluded if more members could not reach it than could, and so is one of two members that blame
each other. But if one member alone has the furthest state, it stays, and the members that cannot reach it are excluded
instead.

The functions do no I/O and use neither a clock nor randomness.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ft.job.quorum.limits import Limits
from ft.job.quorum.state import ARRIVING, EXPECTED, HERE, LOST, OFFLINE, SPAN, Ban, QuorumState, Replica
from ft.job.quorum.values import NO_STATE, Quorum, Report
from ft.net.backoff import doubled

_WEAK_EVIDENCE_AFTER = 3
"""Number of consecutive failed quorums after which a single report is enough to exclude a member, so that retries
end.
"""


@dataclass(frozen=True)
class Evidence:
    """Evidence about one member.

    Attributes:
        blamers: members that could not reach it.
        vouchers: its neighbours in the ring that could reach it.
    """

    blamers: frozenset[int]
    vouchers: frozenset[int]

    @property
    def weight(self) -> int:
        return len(self.blamers) - len(self.vouchers)

    def __str__(self) -> str:
        against = f"replicas {_names(self.blamers)} could not reach it"
        return f"{against}, {_names(self.vouchers)} could" if self.vouchers else against


def judge(quorum: Quorum, returned: Mapping[int, Report], failed: int, forgiven: int, least: int = 1) -> dict[int, str]:
    """Return the members to exclude from the next quorum, with the reason for each.

    Args:
        returned: reports of its members that are done with it, by replica.
        failed: number of similar quorums that failed in a row before.
        forgiven: number of such failures that are tolerated.
        least: number of members that must stay; the members with the most evidence against them are excluded first.
    """
    if failed < forgiven or any(member not in returned for member in quorum.members):
        return {}
    found: dict[int, str] = {}
    while len(found) < len(quorum.members) - max(1, least):
        evidence = _evidence(quorum, returned, set(found))
        guilty = [one for one in evidence if _is_guilty(one, evidence, failed > _WEAK_EVIDENCE_AFTER)]
        if not guilty:
            break
        worst = max(guilty, key=lambda one: (evidence[one].weight, _behind(returned[one]), one))
        if _is_alone_so_far(worst, returned, found):
            reason = f"it cannot reach replica {worst}, and nobody else is as far as that one"
            found[max(evidence[worst].blamers)] = reason
        else:
            found[worst] = str(evidence[worst])
    return found


def longer(ban: Ban, now: float, first_s: float, most_s: float) -> Ban:
    """Return the ban after one more offence: twice as long as the last one, ``most_s`` seconds at most."""
    length = doubled(ban.times + 1, first_s, most_s)
    return Ban(now + length, length, ban.times + 1)


def _evidence(quorum: Quorum, returned: Mapping[int, Report], gone: set[int]) -> dict[int, Evidence]:
    """Collect the evidence about each member; excluded members (``gone``) are not counted as witnesses."""
    found, members = {}, quorum.members
    witnesses = [one for one in members if one not in gone]
    for place, member in enumerate(members):
        if member in gone:
            continue
        neighbours = {members[place - 1], members[(place + 1) % len(members)]} - {member}
        blamers = frozenset(one for one in witnesses if member in returned[one].suspects)
        found[member] = Evidence(blamers, frozenset((neighbours & set(witnesses)) - blamers))
    return found


def _is_guilty(one: int, evidence: Mapping[int, Evidence], weak: bool) -> bool:
    own = evidence[one]
    is_mutual = any(one in evidence[other].blamers for other in own.blamers if other in evidence)
    return bool(own.blamers) and (own.weight > 0 or is_mutual or weak)


def _is_alone_so_far(one: int, returned: Mapping[int, Report], gone: Mapping[int, str]) -> bool:
    """Return whether all other members are behind ``one``, so that a quorum without this member would repeat steps."""
    return all(returned[other].state < returned[one].state for other in returned if other != one and other not in gone)


def _behind(report: Report) -> tuple[int, int]:
    """Return a sort key that is larger for an older state: of members with equal evidence, the furthest state stays."""
    return (-report.next_step, -report.lineage)


def _names(replicas: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(replicas))) or "none"


@dataclass(frozen=True)
class QuorumDecision:
    """Result of :func:`decide`.

    Attributes:
        quorum: the quorum; None if none can be formed now.
        reason: why this quorum was formed, or why the server waits.
        until: time at which to decide again if nothing is received before; None if no report is pending.
        to: replicas whose reports the quorum answers.
        excluded: replica -> why it is excluded from now on.
        refused: replicas that get no quorum; the server sends them the reason.
        is_repeated: whether the quorum is the last one, repeated for a member that has not received it.
    """

    quorum: Quorum | None
    reason: str
    until: float | None = None
    to: tuple[int, ...] = ()
    excluded: Mapping[int, str] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    is_repeated: bool = False


@dataclass(frozen=True)
class Awaited:
    """A wait for the report of one replica.

    Attributes:
        replica: number of the replica.
        until: time at which the wait ends, in seconds.
        why: the reason, for people.
    """

    replica: int
    until: float
    why: str


def decide(state: QuorumState, now: float) -> QuorumDecision:
    """Decide what to answer to the pending reports at time ``now``."""
    pending = state.pending()
    if not pending:
        return QuorumDecision(None, "nobody has reported")
    for rule in (_repeated, _finished):
        if decision := rule(state, pending):
            return decision
    candidates = _candidates(state, now, pending)
    waits = [one for one in awaited(state, now, candidates) if one.until > now]
    if waits:
        names = "; ".join(f"replica {one.replica} {one.why}, {one.until - now:.3g} s more" for one in waits)
        return QuorumDecision(None, f"waiting: {names}", max(one.until for one in waits))
    least = state.options.min_replicas
    last, forgiven = state.last, state.options.forgiven
    excluded = judge(last, state.returned(), state.failed, forgiven, least) if last else {}
    chosen = {number: report for number, report in candidates.items() if number not in excluded}
    if len(chosen) < least <= len(pending):  # a replica that is hard to reach is better than no quorum
        chosen, excluded = pending, {}
    if len(chosen) < least:
        return _too_few(state, now, pending, chosen)
    quorum = _quorum(state, chosen, excluded)
    return QuorumDecision(quorum, quorum.reason, to=quorum.members, excluded=excluded)


def missing(state: QuorumState, now: float) -> dict[int, str]:
    """Return the replicas whose reports a quorum waits for, each with the reason; none while nobody has asked."""
    pending = state.pending()
    if not pending:
        return {}
    candidates = _candidates(state, now, pending)
    found = {one.replica: one.why for one in reversed(awaited(state, now, candidates)) if one.until > now}
    if found or len(candidates) >= state.options.min_replicas:
        return dict(sorted(found.items()))
    absent = {number: one for number, one in sorted(state.replicas.items()) if one.report is None}
    return {number: f"is {one.phase}, and too few are here" for number, one in absent.items() if not one.has_finished}


def _candidates(state: QuorumState, now: float, pending: Mapping[int, Report]) -> Mapping[int, Report]:
    """Return the pending reports without those of excluded replicas; all reports if only excluded replicas are
    furthest.

    Losing committed steps would be worse than a member that others can hardly reach. If only excluded replicas have
    reported, the server still waits first for the members that are training in the last quorum.
    """
    free = {number: report for number, report in pending.items() if state.of(number).ban.until <= now}
    furthest = max(report.state for report in pending.values())
    return free if any(report.state == furthest for report in free.values()) else pending


def awaited(state: QuorumState, now: float, candidates: Mapping[int, Report]) -> list[Awaited]:
    """Return every replica whose report the server waits for, with its time limit, which may have passed already."""
    is_first = state.last is None and all(report.number == 0 for report in candidates.values())
    is_load = all(report.state == NO_STATE for report in candidates.values())
    limits = state.options.limits.calibrated(state.step_s())
    round_ = _Round(state, limits, is_first, is_load, _began(state, candidates))
    found = []
    for number, one in sorted(state.replicas.items()):
        if one.report is not None or one.has_finished or one.ban.until > now:
            continue
        if entry := _await(round_, number, one):
            found.append(entry)
    return found if is_first else [*found, *_further(state, candidates)]


@dataclass(frozen=True)
class _Round:
    """Values that all waits of one decision share.

    Attributes:
        state: state of the server.
        limits: timeouts, extended by the step time.
        is_first: whether this is the first quorum of the run.
        is_load: whether no replica that reported has a training state.
        began: time at which the first member of the last quorum reported, or else the first new replica.
    """

    state: QuorumState
    limits: Limits
    is_first: bool
    is_load: bool
    began: float


def _began(state: QuorumState, candidates: Mapping[int, Report]) -> float:
    which = state.returned() or candidates or state.pending()
    return min(state.of(number).reported_at for number in which)


def _await(round_: _Round, number: int, one: Replica) -> Awaited | None:
    state, limits = round_.state, round_.limits
    if one.repairs_since is not None:
        return Awaited(number, one.repairs_since + limits.repair_s, "is replacing a lost worker")
    is_expected = number < state.options.replicas and not one.is_given_up
    if round_.is_first and (is_expected or one.phase in (HERE, ARRIVING)):
        return Awaited(number, state.began_at + limits.start_s, f"is {one.phase} and the run begins with all")
    if state.is_member(number):
        return _await_member(round_, number, one)
    if one.phase not in (HERE, ARRIVING):
        return None
    if round_.is_load:
        until = max(round_.began, one.since) + limits.start_s
        if one.is_aside:
            until = max(until, min(one.heard_at + limits.silent_s, round_.began + limits.aside_s))
        return Awaited(number, until, f"is {one.phase}, and nobody who has reported has a state")
    left = max(0.0, (limits.wait_s if one.phase == HERE else limits.arrive_s) - one.waited_s)
    return Awaited(number, round_.began + left, f"is {one.phase}, about to join")


def _await_member(round_: _Round, number: int, one: Replica) -> Awaited | None:
    """Return the wait for a member of the last quorum that has not reported since; None if the server does not wait for
    it.
    """
    state, limits = round_.state, round_.limits
    if one.phase == EXPECTED:
        return Awaited(number, state.began_at + limits.back_s, "was in the last quorum and has not come back")
    if one.phase == LOST:
        return Awaited(number, one.since + limits.lost_s, "has lost its connection")
    if one.phase != HERE:
        return None
    silent = one.heard_at + limits.silent_s
    returned = state.returned()
    loads = state.last is not None and state.last.load
    if not returned:
        span = limits.load_s if loads else limits.stall_s
        return Awaited(number, min(silent, state.formed_at + span), "is at work in the last quorum")
    if one.is_aside:
        return Awaited(number, min(silent, round_.began + limits.aside_s), "is busy with something else than a step")
    if any(number in report.suspects for report in returned.values()):
        return Awaited(number, min(silent, round_.began + limits.blamed_s), "could not be reached by a ring")
    span = limits.load_s if loads else limits.member_s
    return Awaited(number, min(silent, round_.began + span), "was in the last quorum and is slower")


def _further(state: QuorumState, candidates: Mapping[int, Report]) -> Iterator[Awaited]:
    """Yield the wait for each replica that is or may be alive and has, or may have, committed more steps than any
    replica that reported.
    """
    limits = state.options.limits
    furthest = max(report.next_step for report in candidates.values())
    for number, one in sorted(state.replicas.items()):
        if one.report is not None or one.has_finished or _most_steps(state, number) <= furthest:
            continue
        if one.phase in (LOST, EXPECTED) or (one.phase == OFFLINE and one.is_cut_off):
            since = max(one.since, state.began_at)
            yield Awaited(number, since + limits.regress_s, "is further than all others, and may live")
        elif one.phase == HERE:
            until = min(one.heard_at + limits.regress_s, _began(state, candidates) + limits.stall_s)
            yield Awaited(number, until, "is further than all others, and lives")


def _most_steps(state: QuorumState, number: int) -> int:
    """Return how many steps the state of a replica may contain: more than known if it was behind in the last quorum."""
    known, last = state.of(number).steps, state.last
    if last is None or number not in last.behind or not state.is_member(number):
        return known
    return max(known, last.step)


def _repeated(state: QuorumState, pending: Mapping[int, Report]) -> QuorumDecision | None:
    """Repeat the last quorum for members that report without having received it, while the others are at work in it."""
    last = state.last
    if last is None or state.returned():
        return None
    if any(not state.is_member(number) or state.of(number).phase != HERE for number in last.members):
        return None
    unaware = tuple(number for number, report in pending.items() if _lacks(last, report))
    if not unaware or set(unaware) == set(last.members):
        return None
    return QuorumDecision(last, "it had not received this one", to=unaware, is_repeated=True)


def _lacks(last: Quorum, report: Report) -> bool:
    is_member = last.lives.get(report.replica) == report.life and report.number < last.number
    is_equal = report.state == (last.step, last.lineage)
    return is_member and is_equal == (report.replica in last.healthy) and report.state <= (last.step, last.lineage)


def _finished(state: QuorumState, pending: Mapping[int, Report]) -> QuorumDecision | None:
    """Notify replicas at or behind the last step that the last step is done, once a replica has finished the run."""
    if state.end is None:
        return None
    behind = {number: report for number, report in pending.items() if report.next_step <= state.end[0]}
    if not behind:
        return None
    quorum = _quorum(state, behind, {})
    reason = f"the last step was done, {state.end[0]} in all"
    return QuorumDecision(replace(quorum, load=False, finished=True, reason=reason), reason, to=quorum.members)


def _too_few(
    state: QuorumState, now: float, pending: Mapping[int, Report], chosen: Mapping[int, Report]
) -> QuorumDecision:
    least, began = state.options.min_replicas, min(state.of(number).reported_at for number in pending)
    until = began + state.options.limits.minimum_s
    reason = f"{len(chosen)} of at least {least} replicas can be in a quorum"
    if now >= until:
        return QuorumDecision(None, f"{reason}, for {now - began:.0f} s", refused=tuple(pending))
    ends = [state.of(number).ban.until for number in pending if state.of(number).ban.until > now]
    return QuorumDecision(None, reason, min([until, *ends]))


def _quorum(state: QuorumState, chosen: Mapping[int, Report], excluded: Mapping[int, str]) -> Quorum:
    furthest = max(report.state for report in chosen.values())
    healthy = tuple(number for number, report in sorted(chosen.items()) if report.state == furthest)
    return Quorum(
        number=next_number(state),
        step=furthest[0],
        lineage=furthest[1],
        healthy=healthy,
        behind=tuple(sorted(chosen.keys() - set(healthy))),
        lives={number: report.life for number, report in sorted(chosen.items())},
        load=furthest == NO_STATE,
        reason=_why(state, chosen, excluded),
    )


def next_number(state: QuorumState) -> int:
    """Return the number of the next quorum."""
    return max(state.highest, state.term * SPAN) + 1


def _why(state: QuorumState, chosen: Mapping[int, Report], excluded: Mapping[int, str]) -> str:
    words = [f"{len(chosen)} of {max(state.options.replicas, len(state.replicas))} replicas have reported"]
    before = state.last.members if state.last is not None else ()
    for number, one in sorted(state.replicas.items()):
        if number in chosen:
            if before and not state.is_member(number):
                words.append(f"replica {number} has come")
        elif number in excluded:
            words.append(f"replica {number} is left out: {excluded[number]}")
        elif one.report is not None:
            words.append(f"replica {number} stays left out")
        elif number in before:
            why = "too slow" if one.phase == HERE else one.reason
            words.append(f"replica {number} is {one.phase}" + f": {why}" * bool(why))
    return "; ".join(words)
