"""Who is at fault when iterations keep turning out wrong: a pure decision, the same on every rank."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ft.dmr.runtime.findings import MESSAGE, REDUCTION, Mismatch

Reports = Mapping[int, Sequence[Mismatch]]
"""Logical rank -> its mismatches in one attempt at an iteration."""

RETRY, EVICT, GIVE_UP = "retry", "evict", "give up"


@dataclass(frozen=True)
class Limits:
    """When a fault counts as permanent.

    Args:
        retries: how often one iteration is taken once more. repeats: wrong attempts of one rank in ``memory``
            iterations that make it suspect although each was made good.
    """

    retries: int = 2
    repeats: int = 5
    memory: int = 1000


@dataclass(frozen=True)
class Outcome:
    """What follows. ``ranks``: those at fault (EVICT). ``reason``: in words."""

    action: str
    ranks: tuple[int, ...] = ()
    reason: str = ""


def own_mismatches(found: Sequence[Mismatch]) -> list[Mismatch]:
    """Those that only the rank itself can have caused: two executions on its own device."""
    return [one for one in found if one.how not in (MESSAGE, REDUCTION)]


def decide(attempts: Sequence[Reports], earlier: Mapping[int, int], limits: Limits) -> Outcome:
    """What to do after the last of ``attempts`` at one iteration went wrong.

    A rank whose own executions differed in every attempt is at fault. Where only messages or reductions differed, it is
    who received them wrongly each time, unless that is everybody. ``earlier``: rank -> wrong attempts in the iterations
    remembered, of all ranks.
    """
    wrong = Counter(rank for reports in attempts for rank, found in reports.items() if own_mismatches(found))
    often = [rank for rank in sorted(wrong) if wrong[rank] + earlier.get(rank, 0) >= limits.repeats]
    if often:
        rank = max(often, key=lambda one: wrong[one] + earlier.get(one, 0))
        count = wrong[rank] + earlier.get(rank, 0)
        return Outcome(EVICT, (rank,), f"rank {rank} computed {count} times wrongly within {limits.memory} iterations")
    if len(attempts) <= limits.retries:
        return Outcome(RETRY, reason=f"attempt {len(attempts)} of {limits.retries + 1} went wrong")
    always = tuple(rank for rank in sorted(wrong) if wrong[rank] == len(attempts))
    if always:
        return Outcome(EVICT, always, f"wrong in {len(attempts)} attempts out of {len(attempts)}")
    on_wires = Counter(rank for reports in attempts for rank, found in reports.items() if found)
    receivers = tuple(rank for rank in sorted(on_wires) if on_wires[rank] == len(attempts))
    if receivers and len(receivers) < len(earlier):
        return Outcome(EVICT, receivers, f"received or reduced wrongly in {len(attempts)} attempts")
    nobody = "all ranks received wrongly in each of them" if receivers else "no rank did so in all of them"
    return Outcome(GIVE_UP, reason=f"{len(attempts)} attempts went wrong, and {nobody}")


class Memory:
    """Wrong attempts of this rank in the last iterations. Each rank keeps its own: a worker that takes over brings
    another device, and none of its predecessor's faults."""

    def __init__(self, iterations: int):
        self._iterations = iterations
        self._wrong: list[int] = []

    def note(self, step: int, attempts: int) -> None:
        """So many attempts at ``step`` went wrong here."""
        self._wrong += [step] * attempts

    def before(self, step: int) -> int:
        """Wrong attempts in the iterations remembered at ``step``."""
        self._wrong = [at for at in self._wrong if step - at <= self._iterations]
        return len(self._wrong)
