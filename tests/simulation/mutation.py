"""What the mutation tests of the simulations share: a known bug that replaces a function, its choice and injection."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from ft.base.errors import UserError


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


def find_in(plants: Sequence[Replaced], name: str) -> list[Replaced]:
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


@contextmanager
def planted(plant: Replaced | None) -> Iterator[None]:
    """Inject the bug into the production code for the duration of the context; None injects nothing."""
    if plant is None:
        yield
        return
    with mock.patch.object(plant.owner, plant.name, plant.wrong(getattr(plant.owner, plant.name))):
        yield
