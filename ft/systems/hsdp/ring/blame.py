"""Diagnosis of a stall in FT-HSDP's all-reduce ring, as pure functions.

A member that sees no progress pings its two neighbours, and later gives up. From the answers it finds out which
neighbour seems to be the cause. An operation is one all-reduce; operations are counted since the ring was connected.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft.systems.hsdp.ring.links import ControlMessage

LEFT, RIGHT = "left", "right"
WAIT, ASK, GIVE_UP = "wait", "ask", "give up"


_HEARSAY_S = 1.0
"""Maximum number of seconds that a member without a suspect waits longer for the report of another member."""


def patience(now: float, last: float, asked: float | None, knows: bool, limit_s: float) -> tuple[str, float]:
    """Return what a member that sees no progress has to do, and the time until which it then waits at most.

    The first result is WAIT, ASK (ping the neighbours) or GIVE_UP. The neighbours are pinged at half of the limit and
    have the other half to answer, also if this process itself was paused past the limit. A member that suspects no
    neighbour waits up to 1 s longer, because another member may know the cause.

    Args:
        last: time of the last progress, in seconds of the same clock.
        asked: time at which the neighbours were pinged since the last progress, None if they were not.
        knows: whether this member suspects a neighbour.
        limit_s: time limit without progress, in seconds.
    """
    half = limit_s / 2
    if asked is None:
        return (ASK, max(last + limit_s, now + half)) if now - last >= half else (WAIT, last + half)
    until = max(last + limit_s, asked + half) + (0.0 if knows else min(half, _HEARSAY_S))
    return (GIVE_UP if now >= until else WAIT), until


def blame(operation: int, left: "ControlMessage | None", right: "ControlMessage | None") -> tuple[str | None, str]:
    """Return which neighbour is the cause of a stall (LEFT, RIGHT or None) and the reason in words.

    The rules, in this order:

    - A neighbour that does not answer is the cause: its host has died, it is stopped, or it cannot be reached.
    - A neighbour that answers, has not begun this operation and is in no earlier one is the cause: it keeps the others
      waiting.
    - A left neighbour that has ended this operation is the cause: it has sent data that do not arrive. A right
      neighbour that has ended the operation is not: it has received everything from this member, and sends it nothing.
    - Otherwise another member is the cause, and both neighbours wait for it as this member does. They may be one
      operation behind, because a member that has received its last data begins the next operation while others still
      wait for their
        data.

    Args:
        operation: number of operations that this member has begun.
        left: last answer of the left neighbour since the stall began, None if there is none.
        right: last answer of the right neighbour since the stall began, None if there is none.
    """
    if left is None or right is None:
        return LEFT if left is None else RIGHT, "does not answer"
    for side, answer in ((LEFT, left), (RIGHT, right)):
        if answer.operation < operation and not answer.busy:
            return side, f"has not come to operation {operation}, it is at {answer.operation}"
    if left.operation == operation and not left.busy:
        return LEFT, f"has ended operation {operation}, and the rest of its data does not come"
    return None, "both neighbours wait too"
