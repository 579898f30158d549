"""Decide which rank is at fault when DMR finds an iteration wrong repeatedly.

An attempt at an iteration is wrong if results differed (a *mismatch*) on any rank; the iteration is then repeated. The
decision is a pure function of what all ranks found, so that every rank comes to the same decision.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import DISPUTED, MESSAGE, REDUCTION, SUM, Mismatch

Reports = Mapping[int, Sequence[Mismatch]]
"""Logical rank -> its mismatches in one attempt at an iteration."""

Wrong = tuple[frozenset[str], ...]
"""The wrong attempts of one rank: for each attempt, the names of the operators whose two executions differed."""

RETRY, EVICT, GIVE_UP = "retry", "evict", "give up"
_MOST_NAMED, _MOST_RANKS = 3, 8
_BY_CHANCE = 6
"""Times that one of two ranks is the first to differ, each time, by chance with a probability of 2^-5."""
_FIX = (
    "ft dmr selftest --out FILE finds such operators, and --ft-dmr-unstable FILE leaves them out; "
    "--deterministic-mode avoids many"
)


@dataclass(frozen=True)
class AttemptLimits:
    """Numbers of wrong attempts from which on a fault counts as permanent.

    Args:
        retries: number of times that one iteration is repeated.
        repeats: number of wrong attempts of one rank within ``memory`` iterations from which on the rank is taken to be
            at fault although a repetition of each iteration succeeded. Until the retries of an iteration are used up,
            the iteration counts as one wrong attempt.
        memory: number of iterations over which wrong attempts are remembered.
    """

    retries: int = 2
    repeats: int = 5
    memory: int = 1000


@dataclass(frozen=True)
class Outcome:
    """The decision after the attempts at an iteration: RETRY (repeat the iteration), EVICT (replace the ``ranks`` at
    fault) or GIVE_UP (end the run), why, and what the user can do if an operator is taken to be at fault."""

    action: str
    ranks: tuple[int, ...] = ()
    reason: str = ""
    fix: str = ""


def own_mismatches(found: Sequence[Mismatch]) -> list[Mismatch]:
    """Return the mismatches that only the reporting rank can have caused, because both executions ran on its device."""
    return [one for one in found if one.how not in (MESSAGE, REDUCTION, DISPUTED, SUM)]


def decide(attempts: Sequence[Reports], earlier: Mapping[int, Wrong], limits: AttemptLimits) -> Outcome:
    """Decide what to do after the last of ``attempts`` at one iteration went wrong.

    A rank whose own executions differed in every attempt is at fault. The exception: an operator that differs on
    several ranks is taken to be non-reproducible, because devices fail one by one. What follows from an earlier
    difference on another rank does not count (``origins``). Where only messages or reductions differed, the ranks that
    received wrong data in every attempt are at fault, unless all ranks did. ``earlier``: logical rank -> its wrong
    attempts in the remembered iterations, for all ranks.
    """
    begun = [origins(reports) for reports in attempts]
    wrong = {rank: [_operators(found.get(rank, ())) for found in begun] for rank in earlier}
    now = {rank: tuple(filter(None, each)) for rank, each in wrong.items()}
    if len(attempts) <= limits.retries:
        often = _too_often(now, earlier, limits, at_most=1)
        return often or Outcome(RETRY, reason=f"attempt {len(attempts)} of {limits.retries + 1} went wrong")
    always = tuple(rank for rank in sorted(now) if len(now[rank]) == len(attempts))
    first = always_first(attempts)
    if first is not None:
        reason = f"wrong in {len(attempts)} attempts out of {len(attempts)}, and the first rank to differ each time"
        return Outcome(EVICT, (first,), reason)
    if len(always) == len(earlier) > 1:
        return _of_operators(begun)
    alone = tuple(rank for rank in always if all(_of_nobody_else(rank, now)))
    if alone:
        return Outcome(EVICT, alone, f"wrong in {len(attempts)} attempts out of {len(attempts)}")
    often = _too_often(now, earlier, limits, at_most=len(attempts))
    if often is not None:
        return often
    outcome = Outcome(GIVE_UP) if always else _received(attempts, len(earlier))
    is_shared = any(len(ranks) > 1 for ranks in _operator_ranks(begun).values())
    return _of_operators(begun) if outcome.action == GIVE_UP and is_shared else outcome


def origins(reports: Reports) -> dict[int, list[Mismatch]]:
    """Return the own mismatches of each rank, without those that follow from a mismatch of another rank.

    Where ranks exchange what they have computed within a layer, as with tensor parallelism, a wrong result of one rank
    makes later results of the others differ from those of a second execution that it was not wrong in. Therefore in
    each unit (phase, chunk, microbatch) only the ranks count whose first mismatch is the earliest one, or is of the
    same operator, but not of a later part of the same call.
    """
    own = {rank: own_mismatches(found) for rank, found in reports.items()}
    following = {(rank, unit) for unit, first in _firsts(own).items() for rank in _followers(first)}
    return {rank: [one for one in found if (rank, one.at.unit) not in following] for rank, found in own.items()}


def always_first(attempts: Sequence[Reports]) -> int | None:
    """Return the rank whose first mismatch is earlier than that of all others, in each unit of each attempt in which
    several ranks have some; None if there is none, or there are too few such units to exclude chance.

    A faulty rank is the first one each time, also where others go on with the same operator. Of an operator that is not
    reproducible, now this rank and now that one is the first.
    """
    ahead: Counter[int | None] = Counter()
    for reports in attempts:
        for first in _firsts({rank: own_mismatches(found) for rank, found in reports.items()}).values():
            earliest = min(at.position for at in first.values())
            ranks = [rank for rank, at in first.items() if at.position == earliest]
            if len(first) > 1:
                ahead[ranks[0] if len(ranks) == 1 else None] += 1
    [(rank, times)] = ahead.most_common() if len(ahead) == 1 else [(None, 0)]
    return rank if times >= _BY_CHANCE else None


def _firsts(own: Mapping[int, Sequence[Mismatch]]) -> dict[tuple[str, int, int], dict[int, OperatorCall]]:
    """Return unit -> rank -> where the first mismatch of the rank is."""
    firsts: dict[tuple[str, int, int], dict[int, OperatorCall]] = {}
    for rank, found in own.items():
        for one in sorted((one.at for one in found), key=lambda at: at.position):
            firsts.setdefault(one.unit, {}).setdefault(rank, one)
    return firsts


def _followers(first: Mapping[int, OperatorCall]) -> list[int]:
    """Return the ranks whose first mismatch of a unit follows from that of another rank. ``first``: by rank."""
    earliest = min(at.position for at in first.values())
    causes = [at for at in first.values() if at.position == earliest]
    names = {at.operator for at in causes}
    calls = {(at.index, at.call) for at in causes if at.call}
    return [
        rank
        for rank, at in first.items()
        if at.position != earliest and (at.operator not in names or (at.index, at.call) in calls)
    ]


def most_telling(found: Sequence[Mismatch], most: int) -> list[Mismatch]:
    """Return the first mismatch of each unit, and others up to ``most``."""
    firsts: dict[tuple[str, int, int], Mismatch] = {}
    for one in sorted(found, key=lambda one: one.at.position):
        if own_mismatches([one]):
            firsts.setdefault(one.at.unit, one)
    told = {id(one) for one in firsts.values()}
    others = [one for one in found if id(one) not in told]
    return [*firsts.values(), *others[: max(most - len(firsts), 0)]]


def _operators(found: Sequence[Mismatch]) -> frozenset[str]:
    return frozenset(one.at.operator for one in found)


def _of_nobody_else(rank: int, wrong: Mapping[int, Wrong]) -> list[bool]:
    """Return, for each wrong attempt of ``rank``, whether the operators that differed in it differed on no other rank
    in any attempt."""
    others = frozenset().union(*(each for other, found in wrong.items() if other != rank for each in found))
    return [not others & operators for operators in wrong[rank]]


def _too_often(
    now: Mapping[int, Wrong], earlier: Mapping[int, Wrong], limits: AttemptLimits, *, at_most: int
) -> Outcome | None:
    """Return the outcome that evicts the rank with the most wrong attempts; None if there are fewer than
    ``limits.repeats``. A rank is only considered if it was also wrong in this iteration (``now``), of which at most
    ``at_most`` attempts are counted. A wrong attempt is only counted if its operators differed on no other rank."""
    together = {rank: (*before, *now[rank]) for rank, before in earlier.items()}
    counts: dict[int, int] = {}
    for rank in sorted(rank for rank in earlier if now[rank]):
        own = _of_nobody_else(rank, together)
        before = len(earlier[rank])
        counts[rank] = sum(own[:before]) + min(sum(own[before:]), at_most)
    if not counts or max(counts.values()) < limits.repeats:
        return None
    rank = max(counts, key=counts.__getitem__)
    reason = f"rank {rank} computed {counts[rank]} times wrongly within {limits.memory} iterations"
    return Outcome(EVICT, (rank,), reason)


def _operator_ranks(begun: Sequence[Mapping[int, Sequence[Mismatch]]]) -> dict[str, set[int]]:
    """Return operator -> ranks on which its two executions differed. The operators are in the order in which their
    mismatches were found. ``begun``: ``origins`` of each attempt."""
    found: dict[str, set[int]] = {}
    for of_ranks in begun:
        for rank in sorted(of_ranks):
            for one in of_ranks[rank]:
                found.setdefault(one.at.operator, set()).add(rank)
    return found


def _of_operators(begun: Sequence[Mapping[int, Sequence[Mismatch]]]) -> Outcome:
    """Return the outcome that blames operators and no rank, because several ranks computed them wrongly. The reason
    names the operators that differed on the most ranks, in the order in which they were found, because an error
    propagates to later operators."""
    found = _operator_ranks(begun)
    most = max(map(len, found.values()))
    names = [name for name, ranks in found.items() if len(ranks) == most][:_MOST_NAMED]
    ranks = sorted(set().union(*(found[name] for name in names)))
    listed = ", ".join(map(str, ranks[:_MOST_RANKS])) + (" and more" if len(ranks) > _MOST_RANKS else "")
    reason = (
        f"{len(begun)} attempts went wrong, and {', '.join(names)} differed on ranks {listed}: probably the "
        "operator is not reproducible; broken devices are less likely"
    )
    return Outcome(GIVE_UP, reason=reason, fix=_FIX)


def _received(attempts: Sequence[Reports], world: int) -> Outcome:
    """Return the outcome for attempts in which no rank computed wrongly every time. Evict the ranks that received wrong
    data in every attempt; give up if there are none, or if all ranks did."""
    sure = Counter(
        rank
        for reports in attempts
        for rank, found in reports.items()
        if any(one.how not in (DISPUTED, SUM) for one in found)
    )
    receivers = tuple(rank for rank in sorted(sure) if sure[rank] == len(attempts))
    if receivers and len(receivers) < world:
        return Outcome(EVICT, receivers, f"received or reduced wrongly in {len(attempts)} attempts")
    nobody = "all ranks received wrongly in each of them" if receivers else "no rank was wrong in each of them"
    return Outcome(GIVE_UP, reason=f"{len(attempts)} attempts went wrong, and {nobody}")


class WrongAttempts:
    """The wrong attempts of this rank in the last ``iterations``. Each worker remembers only its own. A worker that
    takes over the rank begins with none, because it runs on another device, which does not have the fault."""

    def __init__(self, iterations: int):
        self._iterations = iterations
        self._wrong: list[tuple[int, frozenset[str]]] = []

    def note(self, step: int, attempts: Sequence[Sequence[Mismatch]]) -> None:
        """Record what began on this rank (``origins``) in the attempts at ``step`` that went wrong on any rank."""
        self._wrong += [(step, operators) for operators in map(_operators, attempts) if operators]

    def before(self, step: int) -> Wrong:
        """Return the wrong attempts in the iterations that are remembered at ``step``."""
        self._wrong = [(at, operators) for at, operators in self._wrong if step - at <= self._iterations]
        return tuple(operators for _, operators in self._wrong)
