"""What protections of users' own did in a run, from its events."""

from dataclasses import dataclass

from ft.base import events
from ft.record.run import Run
from ft.show.text import table

HEAD = ("step", "protection", "what it did")


@dataclass(frozen=True)
class Action:
    """One action, on all ranks alike. ``step``: the step it concerns. ``what``: a sentence without a subject."""

    step: int
    protection: str
    what: str


def actions(run: Run) -> list[Action]:
    """Return the actions of a run in the order of steps, each once however many ranks report it."""
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
    """Return a table for the terminal; "" where there is nothing to tell."""
    return table(HEAD, rows(found), right=(0,)) if found else ""
