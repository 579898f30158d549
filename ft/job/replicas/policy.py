"""Policy of the launcher as pure functions: the reaction to agents that have ended, and the end of the run."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ft.base.errors import ENDED_EARLY, NOT_SAVED, PLANNED_ENDS, UserError
from ft.net.backoff import doubled

AGAIN, DONE, GIVE_UP = "again", "done", "give up"
"""Actions after the end of an agent: start another one, accept that it has finished, or give the replica up."""
ENDS = {0: "finished", NOT_SAVED: "finished, not saved", ENDED_EARLY: "ended early"}
"""How an agent or a run has ended, by its exit code."""
WAIT, TELL, END = "wait", "tell", "end"
"""What the launcher does next: continue, tell replicas to end, or end itself."""

SETTLED_S = 120.0
"""An agent that has lived this long, in seconds, was started successfully."""
MOST_SHORT_LIVES = 6
"""Number of consecutive agents that died earlier than this, after which the replica is given up."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
"""First and longest pause before a restart, in seconds."""
LATE_S = 60.0
"""Seconds after the end of the first replica for which the launcher waits for a replica that lacks workers."""


@dataclass(frozen=True)
class Reaction:
    """The launcher's reaction to the end of an agent.

    Attributes:
        action: AGAIN, DONE or GIVE_UP.
        reason: why, in words.
        pause_s: seconds until the agent is started again.
    """

    action: str
    reason: str
    pause_s: float = 0.0


def after_exit(code: int, how: str, lives: Sequence[float]) -> Reaction:
    """Decide what to do after the end of a replica's agent.

    The exit code is all that is known of the error, and a new agent starts from scratch, so the agent is started again
    with increasing pauses. Invalid input is the exception: it stays invalid.

    Args:
        code: exit code of the agent, or -N if signal N killed it.
        lives: lifetimes in seconds of this replica's agents so far, the last one last.
    """
    if code in PLANNED_ENDS:
        return Reaction(DONE, ENDS[code])
    if code == UserError.exit_code:
        return Reaction(GIVE_UP, f"its agent {how}: its input cannot work")
    short = 0
    for life in reversed(lives):
        if life >= SETTLED_S:
            break
        short += 1
    if short >= MOST_SHORT_LIVES:
        return Reaction(GIVE_UP, f"its agent {how}, after {short} starts that each lasted less than {SETTLED_S:g} s")
    pause_s = 0.0 if short <= 1 else doubled(short - 1, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    return Reaction(AGAIN, f"its agent {how}", pause_s)


@dataclass(frozen=True)
class ReplicaView:
    """One replica of this launcher, as the policy sees it.

    Attributes:
        up: whether its agent runs.
        code: exit code of its agent, once it is certain that no other agent is started.
        given_up: whether no other agent is started because the replica failed.
        restarts_then: number of warm restarts inside the replica when the first replica of the run had finished.
        restarts: number of warm restarts inside the replica now.
        gathering: whether some of its workers have not joined yet.
    """

    up: bool
    code: int | None = None
    given_up: bool = False
    restarts_then: int = 0
    restarts: int = 0
    gathering: bool = False


@dataclass(frozen=True)
class NextAction:
    """The next action of the launcher.

    Attributes:
        what: WAIT, TELL or END.
        reason: why, in words.
        replicas: replicas that are asked to end (TELL).
        code: exit code of the launcher (END).
    """

    what: str
    reason: str = ""
    replicas: tuple[int, ...] = ()
    code: int = 0


def judge(
    views: Mapping[int, ReplicaView],
    finished_s: float | None,
    lost: Collection[int],
    replicas: int,
    least: int,
    ending: Collection[int] = (),
) -> NextAction:
    """Decide whether the run continues at this launcher.

    Args:
        views: replica -> its view, for the replicas of this launcher.
        finished_s: seconds since the first replica of the run finished, None if none has.
        lost: replicas of the whole run that were given up.
        least: number of replicas that the run needs.
        ending: replicas that were already asked to end.
    """
    ended = all(view.code is not None for view in views.values())
    if finished_s is not None:
        late = tuple(r for r, view in views.items() if r not in ending and _is_late(view, finished_s))
        if ended:
            code = planned([view.code for view in views.values() if view.code in PLANNED_ENDS])
            return NextAction(END, f"the run has {ENDS[code]}", code=code)
        return NextAction(TELL, "the others have finished", late) if late else NextAction(WAIT)
    if (left := replicas - len(lost)) < least:
        short = f"{left} of {replicas} replicas are left, at least {least} must be"
        return NextAction(END, short, code=_worst(views))
    if ended:
        return NextAction(END, "no replica is left here", code=_worst(views))
    return NextAction(WAIT)


def planned(codes: Collection[int]) -> int:
    """Return the exit code of a run whose replicas have ended as planned, with ``codes``.

    A last checkpoint that could not be saved counts most, because one replica writes it for all. One replica that has
    done all steps suffices for a run that has finished.
    """
    return NOT_SAVED if NOT_SAVED in codes else ENDED_EARLY if codes and 0 not in codes else 0


def _is_late(view: ReplicaView, finished_s: float) -> bool:
    """Return whether a replica cannot finish any more.

    It has lost its workers after another replica had finished, or has lacked workers for too long. In both cases no
    peer is left from which it could fetch state.
    """
    if view.code is not None:
        return False
    return not view.up or view.restarts > view.restarts_then or (view.gathering and finished_s > LATE_S)


def _worst(views: Mapping[int, ReplicaView]) -> int:
    """Return the exit code of a run that has failed; that of a replica with invalid input comes first."""
    codes = [view.code for view in views.values() if view.code]
    if UserError.exit_code in codes:
        return UserError.exit_code
    return next((code for code in codes if code > 0), 1)
