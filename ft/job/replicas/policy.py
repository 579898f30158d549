"""What the launcher does about agents that have ended, and when the run is over: pure functions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ft.base.errors import UserError

AGAIN, DONE, GIVE_UP = "again", "done", "give up"
WAIT, TELL, END = "wait", "tell", "end"

SETTLED_S = 120.0
"""An agent that has lived so long has not died of its start."""
MOST_SHORT_LIVES = 6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
LATE_S = 60.0
"""The others have finished: a replica whose workers have not come back after so long is not waited for."""


@dataclass(frozen=True)
class Answer:
    """What follows from the end of an agent, and why. ``pause_s``: until it is started again."""

    action: str
    reason: str
    pause_s: float = 0.0


def after_exit(code: int, how: str, lives: Sequence[float]) -> Answer:
    """What follows from the end of a replica's agent.

    Nobody but the agent knows more about an error than its exit code, and a new one knows nothing of what the old one
    has seen: so it is tried again, with longer and longer pauses. Bad input stays bad.

    Args:
        code: its exit code, or -N: killed by signal N. how: the same in words.
        lives: seconds that each of this replica's agents has lived, this one the last.
    """
    if code == 0:
        return Answer(DONE, "it has finished")
    if code == UserError.exit_code:
        return Answer(GIVE_UP, f"its agent {how}: its input cannot work")
    short = 0
    for life in reversed(lives):
        if life >= SETTLED_S:
            break
        short += 1
    if short >= MOST_SHORT_LIVES:
        return Answer(GIVE_UP, f"its agent {how}, after {short} starts that each lasted less than {SETTLED_S:g} s")
    pause_s = 0.0 if short <= 1 else min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (short - 2))
    return Answer(AGAIN, f"its agent {how}", pause_s)


@dataclass(frozen=True)
class View:
    """A replica of this launcher, as it stands.

    Attributes:
        up: its agent runs. code: of its agent, once it is not started again. given_up: it is not because it failed.
        restarts: warm restarts inside it, when the first replica had finished and now. gathering: it has no workers at
        their places.
    """

    up: bool
    code: int | None = None
    given_up: bool = False
    restarts_then: int = 0
    restarts: int = 0
    gathering: bool = False


@dataclass(frozen=True)
class Verdict:
    """What to do, with which replicas (TELL) or exit code (END), and why."""

    what: str
    reason: str = ""
    replicas: tuple[int, ...] = ()
    code: int = 0


def judge(
    views: Mapping[int, View],
    finished_s: float | None,
    lost: Collection[int],
    replicas: int,
    least: int,
    told: Collection[int] = (),
) -> Verdict:
    """Whether the run goes on here.

    Args:
        views: replica -> how it stands, for those of this launcher. finished_s: seconds since the first replica of the
            run finished, None: none has. lost: replicas of the whole run that were given up.
        replicas, least: of the run, and how many it needs. told: those that were told to end.
    """
    ended = all(view.code is not None for view in views.values())
    if finished_s is not None:
        late = tuple(r for r, view in views.items() if r not in told and _is_late(view, finished_s))
        if ended:
            return Verdict(END, "the run has finished")
        return Verdict(TELL, "the others have finished", late) if late else Verdict(WAIT)
    if replicas - len(lost) < least:
        left = f"{replicas - len(lost)} of {replicas} replicas are left, at least {least} must be"
        return Verdict(END, left, code=_worst(views))
    if ended:
        return Verdict(END, "no replica is left here", code=_worst(views))
    return Verdict(WAIT)


def _is_late(view: View, finished_s: float) -> bool:
    """It has lost its workers after the others had finished, or they do not come: nobody is left to come back to."""
    if view.code is not None:
        return False
    return not view.up or view.restarts > view.restarts_then or (view.gathering and finished_s > LATE_S)


def _worst(views: Mapping[int, View]) -> int:
    """The exit code of a run that has failed: that of a replica whose input cannot work first."""
    codes = [view.code for view in views.values() if view.code]
    if UserError.exit_code in codes:
        return UserError.exit_code
    return next((code for code in codes if code > 0), 1)
