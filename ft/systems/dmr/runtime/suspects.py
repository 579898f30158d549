"""Who is at fault when iterations keep turning out wrong: a pure decision, the same on every rank."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ft.systems.dmr.runtime.findings import DISPUTED, MESSAGE, REDUCTION, Mismatch

Reports = Mapping[int, Sequence[Mismatch]]
"""Logical rank -> its mismatches in one attempt at an iteration."""

Wrong = tuple[frozenset[str], ...]
"""Wrong attempts of one rank: of each, the operators whose two executions differed."""

RETRY, EVICT, GIVE_UP = "retry", "evict", "give up"
_MOST_NAMED, _MOST_RANKS = 3, 8
_FIX = (
    "ft dmr selftest --out FILE finds such operators, and --ft-dmr-unstable FILE leaves them out; "
    "--deterministic-mode avoids many"
)


@dataclass(frozen=True)
class Limits:
    """When a fault counts as permanent.

    Args:
        retries: how often one iteration is taken once more. repeats: wrong attempts of one rank in ``memory``
            iterations that make it suspect although each was made good; until its retries are used up, an iteration
            counts as one.
    """

    retries: int = 2
    repeats: int = 5
    memory: int = 1000


@dataclass(frozen=True)
class Outcome:
    """What follows. ``ranks``: those at fault (EVICT). ``reason``: in words. ``fix``: (GIVE_UP) what the user can do
    where an operator is taken to be at fault."""

    action: str
    ranks: tuple[int, ...] = ()
    reason: str = ""
    fix: str = ""


def own_mismatches(found: Sequence[Mismatch]) -> list[Mismatch]:
    """Those that only the rank itself can have caused: two executions on its own device."""
    return [one for one in found if one.how not in (MESSAGE, REDUCTION, DISPUTED)]


def decide(attempts: Sequence[Reports], earlier: Mapping[int, Wrong], limits: Limits) -> Outcome:
    """What to do after the last of ``attempts`` at one iteration went wrong.

    A rank whose own executions differed in every attempt is at fault, unless the operator is: one that differs on
    several ranks is not reproducible, for devices break one by one. Where only messages or reductions differed, it is
    who received them wrongly each time, unless that is everybody. ``earlier``: wrong attempts in the iterations
    remembered, of all ranks.
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
    """Of each wrong attempt of ``rank``: no operator of it has differed on another rank, too."""
    others = frozenset().union(*(each for other, found in wrong.items() if other != rank for each in found))
    return [not others & operators for operators in wrong[rank]]


def _too_often(
    now: Mapping[int, Wrong], earlier: Mapping[int, Wrong], limits: Limits, *, at_most: int
) -> Outcome | None:
    """Who has computed wrongly too often, and did again, by operators that differed nowhere else; None: nobody.
    ``at_most``: that many attempts of this iteration count."""
    together = {rank: (*before, *now[rank]) for rank, before in earlier.items()}
    counts = {}
    for rank in sorted(rank for rank in earlier if now[rank]):
        own = _of_nobody_else(rank, together)
        before = len(earlier[rank])
        counts[rank] = sum(own[:before]) + min(sum(own[before:]), at_most)
    rank = max(counts, key=counts.get, default=None)
    if rank is None or counts[rank] < limits.repeats:
        return None
    reason = f"rank {rank} computed {counts[rank]} times wrongly within {limits.memory} iterations"
    return Outcome(EVICT, (rank,), reason)


def _operator_ranks(attempts: Sequence[Reports]) -> dict[str, set[int]]:
    """Operators that differed on ranks themselves, in the order in which that was found -> these ranks."""
    found: dict[str, set[int]] = {}
    for reports in attempts:
        for rank in sorted(reports):
            for one in own_mismatches(reports[rank]):
                found.setdefault(one.at.operator, set()).add(rank)
    return found


def _of_operators(attempts: Sequence[Reports]) -> Outcome:
    """No rank is blamed for what several computed wrongly. What differs first makes much else differ."""
    found = _operator_ranks(attempts)
    most = max(map(len, found.values()))
    names = [name for name, ranks in found.items() if len(ranks) == most][:_MOST_NAMED]
    ranks = sorted(set().union(*(found[name] for name in names)))
    told = ", ".join(map(str, ranks[:_MOST_RANKS])) + (" and more" if len(ranks) > _MOST_RANKS else "")
    reason = (
        f"{len(attempts)} attempts went wrong, and {', '.join(names)} differed on ranks {told}: rather an operator "
        "that is not reproducible than broken devices"
    )
    return Outcome(GIVE_UP, reason=reason, fix=_FIX)


def _received(attempts: Sequence[Reports], world: int) -> Outcome:
    """Nobody computed wrongly each time: who received wrongly is blamed, if others did not."""
    sure = Counter(
        rank for reports in attempts for rank, found in reports.items() if any(one.how != DISPUTED for one in found)
    )
    receivers = tuple(rank for rank in sorted(sure) if sure[rank] == len(attempts))
    if receivers and len(receivers) < world:
        return Outcome(EVICT, receivers, f"received or reduced wrongly in {len(attempts)} attempts")
    nobody = "all ranks received wrongly in each of them" if receivers else "no rank is known to in all of them"
    return Outcome(GIVE_UP, reason=f"{len(attempts)} attempts went wrong, and {nobody}")


class Memory:
    """Wrong attempts of this rank in the last iterations. Each rank keeps its own: a worker that takes over brings
    another device, and none of its predecessor's faults."""

    def __init__(self, iterations: int):
        self._iterations = iterations
        self._wrong: list[tuple[int, frozenset[str]]] = []

    def note(self, step: int, attempts: Sequence[Sequence[Mismatch]]) -> None:
        """What this rank found in the attempts at ``step`` that went wrong somewhere."""
        self._wrong += [(step, operators) for operators in map(_operators, attempts) if operators]

    def before(self, step: int) -> Wrong:
        """Wrong attempts in the iterations remembered at ``step``."""
        self._wrong = [(at, operators) for at, operators in self._wrong if step - at <= self._iterations]
        return tuple(operators for _, operators in self._wrong)
