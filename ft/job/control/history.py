"""What earlier failures say about a new one: what keeps coming back is not what it was taken for."""

from ft.faults.verdict import REPLACE, RESTART, RETRY, SOFTWARE, STOP, Verdict, raised
from ft.job.control.state import Incident, Recovery, Return

WINDOW_S, WINDOW_STEPS = 60.0, 10
"""How close in time, or in steps, failures of one logical rank belong together."""
MOST_RETRIES = 2
MOST_REPLACEMENTS = 2
MOST_RETURNS = 2
_REMEMBERED = 200


def weigh(history: list[Incident], now: float, rank: int | None, step: int, found: Verdict) -> Verdict:
    """The verdict after a look at what happened before.

    - the same rank was retried in place twice within the window: it is replaced (paper, section VI-B: elevated);
    - the same rank was replaced twice for the same error at the same step: the error goes with the work, not with the
      node: warm restart (where it was waited for in vain, ``going_round`` says more);
    - the same software error has come before, at the same step (or the next): a restart leads there again: stop.

    Args:
        rank: logical rank of the failed worker. step: last committed one.
    """
    mine = [incident for incident in history if incident.rank == rank]
    if found.action == RETRY:
        close = [i for i in mine if i.action == RETRY and (now - i.at < WINDOW_S or abs(step - i.step) < WINDOW_STEPS)]
        if len(close) >= MOST_RETRIES:
            found = raised(found, REPLACE, f"retried {len(close)} times in vain, no longer taken for transient")
    if found.action == REPLACE:
        same = [i for i in mine if i.action == REPLACE and i.step == step and i.key == found.key]
        if len(same) >= MOST_REPLACEMENTS and not found.in_vain:
            found = raised(found, RESTART, f"{len(same)} replacements failed alike at step {step}")
    if found.action == RESTART and found.category == SOFTWARE:
        same = [i for i in history if i.action == RESTART and abs(i.step - step) <= 1 and i.key == found.key]
        if same:
            found = raised(found, STOP, f"the same error as before the warm restart, again after step {step}")
    return found


def returned(before: list[Return], step: int, recovery: Recovery, fired: int) -> list[Return]:
    """The returns to ``step`` with nothing new in between, this one the last: ``before`` goes on only where training
    stopped at the same place, nothing has died or raised an error since, and no fault was injected."""
    this = Return(step, list(recovery.verdicts), fired)
    goes_on = bool(before) and recovery.in_vain and (before[-1].step, before[-1].fired) == (step, fired)
    return [*before, this] if goes_on else [this]


def going_round(returns: list[Return]) -> str:
    """Why no further return to the step is worth it, "" where it is: twice may be a coincidence."""
    if len(returns) <= MOST_RETURNS:
        return ""
    lines = [
        f"training has stopped {len(returns)} times after committed step {returns[-1].step}, and since the first time "
        "nothing has died, no error was raised and no fault injected:",
        *(f"  {number}. {'; '.join(one.verdicts)}" for number, one in enumerate(returns, 1)),
        "  going back once more would lead there again: look for a group operation that not all ranks of its group "
        "take part in, or for one that never ends",
    ]
    return "\n".join(lines)


def of_joiner(found: Verdict) -> Verdict:
    """A worker that has only just taken a seat fails: there is another one, and the others' state is untouched."""
    return raised(found, REPLACE, "it had only just taken the seat")


def record(history: list[Incident], now: float, rank: int | None, step: int, found: Verdict) -> None:
    """Remembers a verdict; the oldest are forgotten."""
    history.append(Incident(now, rank, step, found.action, found.key))
    del history[:-_REMEMBERED]
