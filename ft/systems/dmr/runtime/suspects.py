"""Decide which rank is at fault when DMR finds an iteration wrong repeatedly.

DMR (dual modular redundancy, SpareTrain) executes every operator twice and compares the results. An attempt at an
iteration is wrong if results differed (a *mismatch*) on any rank; the iteration is then repeated. The decision is a
pure function of what all ranks found, so that every rank comes to the same decision.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ft.systems.dmr.runtime.findings import DISPUTED, MESSAGE, REDUCTION, SUM, Mismatch

Reports = Mapping[int, Sequence[Mismatch]]
"""Logical rank -> its mismatches in one attempt at an iteration."""

Wrong = tuple[frozenset[str], ...]
"""The wrong attempts of one rank: for each attempt, the names of the operators whose two executions differed."""

RETRY, EVICT, GIVE_UP = "retry", "evict", "give up"
_MOST_NAMED, _MOST_RANKS = 3, 8
_FIX = (
    "ft dmr selftest --out FILE finds such operators, and --ft-dmr-unstable FILE leaves them out; "
    "--deterministic-mode avoids many"
)


@dataclass(frozen=True)
class Limits:
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
    """The decision after the attempts at an iteration.

    Attributes:
        action: RETRY (repeat the iteration), EVICT (replace the ranks at fault) or GIVE_UP (end the run).
        ranks: (EVICT) the ranks at fault.
        reason: explanation in words.
        fix: (GIVE_UP) what the user can do, if an operator is taken to be at fault.
    """

    action: str
    ranks: tuple[int, ...] = ()
    reason: str = ""
    fix: str = ""


def own_mismatches(found: Sequence[Mismatch]) -> list[Mismatch]:
    """Return the mismatches that only the reporting rank can have caused, because both executions ran on its device."""
    return [one for one in found if one.how not in (MESSAGE, REDUCTION, DISPUTED, SUM)]


def decide(attempts: Sequence[Reports], earlier: Mapping[int, Wrong], limits: Limits) -> Outcome:
    """Decide what to do after the last of ``attempts`` at one iteration went wrong.

    A rank whose own executions differed in every attempt is at fault. The exception: an operator that differs on
    several ranks is taken to be non-reproducible, because devices fail one by one. Where only messages or reductions
    differed, the ranks that received wrong data in every attempt are at fault, unless all ranks did.

    Args:
        attempts: the reports of each attempt.
        earlier: logical rank -> its wrong attempts in the remembered iterations, for all ranks.
        limits: numbers of wrong attempts from which on a fault counts as permanent.
    """
    wrong = {rank: [_operators(reports.get(rank, ())) for reports in attempts] for rank in earlier}
    now = {rank: tuple(filter(None, each)) for rank, each in wrong.items()}
    if len(attempts) <= limits.retries:
        often = _too_often(now, earlier, limits, at_most=1)
        return often or Outcome(RETRY, reason=f"attempt {len(attempts)} of {limits.retries + 1} went wrong")
    always = tuple(rank for rank in sorted(now) if len(now[rank]) == len(attempts))
    if len(always) == len(earlier) > 1:
        return _of_operators(attempts)
    alone = tuple(rank for rank in always if all(_of_nobody_else(rank, now)))
    if alone:
        return Outcome(EVICT, alone, f"wrong in {len(attempts)} attempts out of {len(attempts)}")
    often = _too_often(now, earlier, limits, at_most=len(attempts))
    if often is not None:
        return often
    outcome = Outcome(GIVE_UP) if always else _received(attempts, len(earlier))
    is_shared = any(len(ranks) > 1 for ranks in _operator_ranks(attempts).values())
    return _of_operators(attempts) if outcome.action == GIVE_UP and is_shared else outcome


def _operators(found: Sequence[Mismatch]) -> frozenset[str]:
    return frozenset(one.at.operator for one in own_mismatches(found))


def _of_nobody_else(rank: int, wrong: Mapping[int, Wrong]) -> list[bool]:
    """Return, for each wrong attempt of ``rank``, whether the operators that differed in it differed on no other rank
    in any attempt."""
    others = frozenset().union(*(each for other, found in wrong.items() if other != rank for each in found))
    return [not others & operators for operators in wrong[rank]]


def _too_often(
    now: Mapping[int, Wrong], earlier: Mapping[int, Wrong], limits: Limits, *, at_most: int
) -> Outcome | None:
    """Return the outcome that evicts the rank with the most wrong attempts; None if there are fewer than
    ``limits.repeats``.

    A rank is only considered if it was also wrong in this iteration. A wrong attempt is only counted if its operators
    differed on no other rank.

    Args:
        now: logical rank -> its wrong attempts in this iteration.
        earlier: logical rank -> its wrong attempts in the remembered iterations.
        limits: numbers of wrong attempts from which on a fault counts as permanent.
        at_most: maximum number of attempts of this iteration that are counted.
    """
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


def _operator_ranks(attempts: Sequence[Reports]) -> dict[str, set[int]]:
    """Return operator -> ranks on which its two executions differed. The operators are in the order in which their
    mismatches were found."""
    found: dict[str, set[int]] = {}
    for reports in attempts:
        for rank in sorted(reports):
            for one in own_mismatches(reports[rank]):
                found.setdefault(one.at.operator, set()).add(rank)
    return found


def _of_operators(attempts: Sequence[Reports]) -> Outcome:
    """Return the outcome that blames operators and no rank, because several ranks computed them wrongly. The reason
    names the operators that differed on the most ranks, in the order in which they were found, because an error
    propagates to later operators."""
    found = _operator_ranks(attempts)
    most = max(map(len, found.values()))
    names = [name for name, ranks in found.items() if len(ranks) == most][:_MOST_NAMED]
    ranks = sorted(set().union(*(found[name] for name in names)))
    listed = ", ".join(map(str, ranks[:_MOST_RANKS])) + (" and more" if len(ranks) > _MOST_RANKS else "")
    reason = (
        f"{len(attempts)} attempts went wrong, and {', '.join(names)} differed on ranks {listed}: probably the "
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
    nobody = "all ranks received wrongly in each of them" if receivers else "no rank is known to in all of them"
    return Outcome(GIVE_UP, reason=f"{len(attempts)} attempts went wrong, and {nobody}")


class Memory:
    """The wrong attempts of this rank in the last iterations.

    Each worker remembers only its own wrong attempts. A worker that takes over the rank begins with none, because it
    runs on another device, which does not have the fault.

    Args:
        iterations: number of iterations over which wrong attempts are remembered.
    """

    def __init__(self, iterations: int):
        self._iterations = iterations
        self._wrong: list[tuple[int, frozenset[str]]] = []

    def note(self, step: int, attempts: Sequence[Sequence[Mismatch]]) -> None:
        """Record the mismatches of this rank in the attempts at ``step`` that went wrong on any rank."""
        self._wrong += [(step, operators) for operators in map(_operators, attempts) if operators]

    def before(self, step: int) -> Wrong:
        """Return the wrong attempts in the iterations that are remembered at ``step``."""
        self._wrong = [(at, operators) for at, operators in self._wrong if step - at <= self._iterations]
        return tuple(operators for _, operators in self._wrong)
