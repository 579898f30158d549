"""Choose the members to exclude when a quorum fails although all of them are alive (a partition between replicas).

The members of a quorum are the replicas (full copies of the model) of a training step. They are connected in all-reduce
rings, and every member may report other members that it could not reach there. A single report is weak evidence: a
member that leaves a ring because it lost one neighbour looks lost to its other neighbour. So no member is excluded
after the first failures, nor while a lost member explains the failure. After that, a member is excluded if more members
could not reach it than could, and so is one of two members that blame each other. But if one member alone has the
furthest state, it stays, and the members that cannot reach it are excluded instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ft.job.quorum.state import Ban
from ft.job.quorum.values import Quorum, Report
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
        quorum: the quorum that failed.
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
    """Return the ban after one more offence: twice as long as the last one, ``most_s`` seconds at most.

    Args:
        ban: the last exclusion of the replica.
        now: present time in seconds.
        first_s: length of a first exclusion, in seconds.
        most_s: maximum length of an exclusion, in seconds.
    """
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
