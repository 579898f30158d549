"""When the rings of one quorum serve the next one too."""

from ft.job.quorum import Quorum


def is_same_ring(last: Quorum | None, quorum: Quorum) -> bool:
    """Whether all members have the connections of ``last``, unbroken: every one then answers this alike.

    They have if each of them, in the same life, committed its last step in that very quorum; whoever was behind in it
    and has caught up did as well. A connection that broke in ``last`` made its replica drop the step.
    """
    return (
        last is not None
        and not quorum.behind
        and quorum.lineage == last.number
        and quorum.step == last.step + 1
        and quorum.members == last.members
        and dict(quorum.lives) == dict(last.lives)
    )
