"""List the actions that user-defined protections took during a run, from the run's events.

A protection is a component that wraps each training step in order to detect or repair failures; users can register
their own, which report their actions as events.
"""

from dataclasses import dataclass

from ft.base import events
from ft.record.run import Run
from ft.show.text import table

HEAD = ("step", "protection", "what it did")


@dataclass(frozen=True)
class Action:
    """One action of a protection, which all ranks took together.

    Attributes:
        step: the step that the action concerns.
        protection: name of the protection.
        what: what the protection did, as text that begins with a verb.
    """

    step: int
    protection: str
    what: str


def actions(run: Run) -> list[Action]:
    """Return the actions of a run in the order of steps; an action that several ranks report is listed once."""
    found = (
        Action(event.step, str(event.detail["protection"]), str(event.detail["what"]))
        for event in run.events
        if event.name == events.PROTECTION_ACTED
    )
    return sorted(dict.fromkeys(found), key=lambda action: action.step)


def rows(found: list[Action]) -> list[tuple[str, ...]]:
    """Return the rows of a table of actions with the columns ``HEAD``."""
    return [(str(action.step), action.protection, action.what) for action in found]


def text_table(found: list[Action]) -> str:
    """Return a table of actions for the terminal; "" if there are none."""
    return table(HEAD, rows(found), right=(0,)) if found else ""
