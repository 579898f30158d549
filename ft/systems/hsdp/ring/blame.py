"""Stall diagnosis of a ring, as pure functions: when to ping or give up, and which neighbour the answers point to."""

from ft.systems.hsdp.ring.control import Message

LEFT, RIGHT = "left", "right"
WAIT, ASK, GIVE_UP = "wait", "ask", "give up"


_HEARSAY_S = 1.0


def patience(now: float, last: float, asked: float | None, knows: bool, limit_s: float) -> tuple[str, float]:
    """Return what a member does that sees no progress, and until when it waits at most after that.

    The neighbours are pinged at half of the limit and have the other half to answer, also when this process itself was
    paused past the limit. A member that has nobody to blame waits up to 1 s longer, because others may know the cause.

    Args:
        now: present time, in seconds.
        last: time of the last progress, in seconds of the same clock.
        asked: time at which the neighbours were pinged since then, None if they were not.
        knows: whether this member has a neighbour to blame.
        limit_s: time limit without progress, in seconds.
    """
    half = limit_s / 2
    if asked is None:
        return (ASK, max(last + limit_s, now + half)) if now - last >= half else (WAIT, last + half)
    until = max(last + limit_s, asked + half) + (0.0 if knows else min(half, _HEARSAY_S))
    return (GIVE_UP if now >= until else WAIT), until


def blame(operation: int, left: Message | None, right: Message | None) -> tuple[str | None, str]:
    """Return which neighbour is the cause of a stall (LEFT, RIGHT or None) and the reason in words.

    A neighbour that does not answer has died with its host, is stopped, or cannot be reached. A neighbour that answers,
    is in no operation and has not come to this one keeps the others waiting. Two neighbours that wait as this member
    does blame a third; so do neighbours that are one operation behind, since a member that has received its last data
    goes on while others still wait for theirs. A left neighbour that has ended this operation has sent data that does
    not arrive. A right neighbour that has ended it is no cause: it has all that it needs from this member, which
    receives nothing from it.

    Args:
        operation: count of this member, as in :class:`ft.systems.hsdp.ring.control.Message`.
        left: last answer of the left neighbour since the stall began, None if there is none.
        right: the same for the right neighbour.
    """
    if left is None or right is None:
        return LEFT if left is None else RIGHT, "does not answer"
    for side, answer in ((LEFT, left), (RIGHT, right)):
        if answer.operation < operation and not answer.busy:
            return side, f"has not come to operation {operation}, it is at {answer.operation}"
    if left.operation == operation and not left.busy:
        return LEFT, f"has ended operation {operation}, and the rest of its data does not come"
    return None, "both neighbours wait too"
