"""Who is left out when all members live but a quorum does not carry its step through (a partition between replicas).

Every member may name those that its rings could not reach. One such word proves little: who leaves a ring because he
lost his other neighbour looks lost himself. So a failure is forgiven while a lost member explains it, and at first;
then those go whom more blame than vouch for, and one of any two that blame each other; but whoever alone has the
furthest state stays, and those go that cannot reach it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ft.job.quorum.state import Ban
from ft.job.quorum.values import Quorum, Report

_WEAK_EVIDENCE_AFTER = 3
"""Failed quorums in a row after which it takes no majority of witnesses: no endless retries."""


@dataclass(frozen=True)
class Evidence:
    """For and against one member: who could not reach it, and which neighbours in the ring could."""

    blamers: frozenset[int]
    vouchers: frozenset[int]

    @property
    def weight(self) -> int:
        return len(self.blamers) - len(self.vouchers)

    def __str__(self) -> str:
        against = f"replicas {_names(self.blamers)} could not reach it"
        return f"{against}, {_names(self.vouchers)} could" if self.vouchers else against


def judge(quorum: Quorum, returned: Mapping[int, Report], failed: int, forgiven: int, least: int = 1) -> dict[int, str]:
    """Members to leave out of the next quorum, with the reason of each.

    Args:
        quorum: the one that failed. returned: reports of its members that are done with it. failed: how many like it
            failed in a row before. forgiven: how many may. least: members that must stay: the worst go first.
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
    """The ban after one more offence."""
    length = min(first_s * 2.0**ban.times, most_s)
    return Ban(now + length, length, ban.times + 1)


def _evidence(quorum: Quorum, returned: Mapping[int, Report], gone: set[int]) -> dict[int, Evidence]:
    """Those who are left out witness nothing."""
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
    """Without it the others would do steps again that it has done."""
    return all(returned[other].state < returned[one].state for other in returned if other != one and other not in gone)


def _behind(report: Report) -> tuple[int, int]:
    """Larger for one whose state is less far: of two, the furthest state stays."""
    return (-report.next_step, -report.lineage)


def _names(replicas: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(replicas))) or "none"
