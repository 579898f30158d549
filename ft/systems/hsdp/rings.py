"""Decide whether the connections of FT-HSDP's all-reduce ring can be used again in the next step.

Every step has a quorum, the set of replicas that take part in it, and the ring connects the members of one quorum.
"""

from ft.job.quorum import Quorum


def is_same_ring(last: Quorum | None, quorum: Quorum) -> bool:
    """Return whether all members of ``quorum`` still have the unbroken connections of the quorum ``last``.

    That is the case if every member committed its last step in ``last`` and was not restarted since; a member that was
    behind in ``last`` and has caught up counts as well. A replica whose connection broke in ``last`` has discarded the
    step. Every member computes the same answer.
    """
    return (
        last is not None
        and not quorum.behind
        and quorum.lineage == last.number
        and quorum.step == last.step + 1
        and quorum.members == last.members
        and dict(quorum.lives) == dict(last.lives)
    )
