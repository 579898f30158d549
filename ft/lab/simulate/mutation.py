"""What the mutation tests of the simulations share: a known bug that replaces a function, and the choice of bugs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ft.base.errors import UserError
from ft.lab.simulate.histories import Mutant

M = TypeVar("M", bound=Mutant)


@dataclass(frozen=True)
class Replaced:
    """A bug: the function ``owner.name`` is replaced by ``wrong(original function)``.

    Attributes:
        title: name of the bug for the user.
        owner: module or class of the function.
        name: name of the function.
        wrong: takes the right function and returns the wrong one.
    """

    title: str
    owner: Any
    name: str
    wrong: Callable[[Callable[..., Any]], Callable[..., Any]]


def find_in(plants: Sequence[M], name: str) -> list[M]:
    """Return the bugs of ``plants`` that the user has asked for.

    Args:
        plants: all bugs of a simulation.
        name: title of one bug, or "all".

    Raises:
        UserError: no bug has this title.
    """
    found = [plant for plant in plants if name in ("all", plant.title)]
    if not found:
        titles = "".join(f"\n    {plant.title}" for plant in plants)
        raise UserError(f"no bug is called {name!r}", f"give all, or one of{titles}")
    return found
