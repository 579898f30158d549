"""When nothing moves any more: what to do about it, and who is the cause by what the neighbours have answered."""

from ft.systems.hsdp.ring.control import Message

LEFT, RIGHT = "left", "right"
WAIT, ASK, GIVE_UP = "wait", "ask", "give up"


_HEARSAY_S = 1.0


def patience(now: float, last: float, asked: float | None, knows: bool, limit_s: float) -> tuple[str, float]:
    """What a member does for which nothing moves, and until when at the latest it waits after that.

    Args:
        now, last: this moment, and the last one at which something moved, in seconds of one clock.
        asked: when the neighbours were asked since; None: they were not. knows: whether it has somebody to blame.

    They are asked at half of the limit, and have the other half to answer: also when this process itself was stopped
    past the limit. Who has nobody to blame leaves it a little longer to others, who may have.
    """
    half = limit_s / 2
    if asked is None:
        return (ASK, max(last + limit_s, now + half)) if now - last >= half else (WAIT, last + half)
    until = max(last + limit_s, asked + half) + (0.0 if knows else min(half, _HEARSAY_S))
    return (GIVE_UP if now >= until else WAIT), until


def blame(operation: int, left: Message | None, right: Message | None) -> tuple[str | None, str]:
    """Which neighbour, if one, and the reason in words.

    Args:
        operation: own count, as in :class:`ft.systems.hsdp.ring.control.Message`.
        left, right: the neighbours' last answers since nothing moves; None: none has come.

    A neighbour that does not answer has died with its host, is stopped or cannot be reached. One that answers, is in no
    operation and has not come to this one keeps the others waiting. Two that wait as this member does have a third to
    blame; also those that are an operation behind: who has received its last data goes on while others still wait for
    theirs. A left neighbour that has ended this one has sent what does not come; a right one has all that it needs from
    this member, and gives nothing to it.
    """
    answers = ((LEFT, left), (RIGHT, right))
    for side, answer in answers:
        if answer is None:
            return side, "does not answer"
    for side, answer in answers:
        if answer.operation < operation and not answer.busy:
            return side, f"has not come to operation {operation}, it is at {answer.operation}"
    if left.operation == operation and not left.busy:
        return LEFT, f"has ended operation {operation}, and the rest of its data does not come"
    return None, "both neighbours wait too"
