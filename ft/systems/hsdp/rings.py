"""Reuse of ring connections from one quorum to the next."""

from ft.job.quorum import Quorum


def is_same_ring(last: Quorum | None, quorum: Quorum) -> bool:
    """Return whether all members still have the unbroken connections of ``last``; every member computes the same
    answer.

    That is the case if each of them committed its last step in exactly that quorum, in the same life; a member that was
    behind in it and has caught up counts as well. A replica whose connection broke in ``last`` has discarded the step.
    """
    return (
        last is not None
        and not quorum.behind
        and quorum.lineage == last.number
        and quorum.step == last.step + 1
        and quorum.members == last.members
        and dict(quorum.lives) == dict(last.lives)
    )
