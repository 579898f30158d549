"""Mutation test of ``ft simulate hsdp-protocol``: known bugs to inject, each of which the simulation must find.

A bug is injected into the production code of the quorum server, or into the model replicas: one of their ``Habits``,
the rules of the protocol that they follow, is switched off.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

from ft.job.quorum import blame, decide, reactions
from ft.job.quorum.values import NO_STATE
from ft.lab.simulate.hsdp_protocol.shape import Habits
from ft.lab.simulate.mutation import find_in


@dataclass(frozen=True)
class Mutant:
    """A bug: the function ``owner.name`` is replaced by ``wrong(original)``, or the replicas lose one ``habit``.

    Attributes:
        title: name of the bug for the user.
        owner: module of the function; None: a bug of the model replicas.
        name: name of the function.
        wrong: takes the right function and returns the wrong one.
        habit: attribute of ``Habits`` to switch off, "" for a bug of the production code.
    """

    title: str
    owner: Any = None
    name: str = ""
    wrong: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    habit: str = ""

    def habits(self) -> Habits:
        """Return the behaviour of the model replicas with this bug."""
        return Habits(**{self.habit: False}) if self.habit else Habits()


def _steps_alone_count(right):
    def quorum(state, chosen, excluded):
        found = right(state, chosen, excluded)
        healthy = tuple(n for n, r in sorted(chosen.items()) if r.next_step == found.step and r.state != NO_STATE)
        if not healthy:
            return found
        return replace(found, healthy=healthy, behind=tuple(sorted(chosen.keys() - set(healthy))))

    return quorum


def _numbers_begin_anew(right):
    def quorum(state, chosen, excluded):
        found = right(state, chosen, excluded)
        state.planted = getattr(state, "planted", 0) + 1
        return replace(found, number=state.planted)

    return quorum


def _one_without_state_is_enough(right):
    def quorum(state, chosen, excluded):
        found = right(state, chosen, excluded)
        return replace(found, load=any(report.state == NO_STATE for report in chosen.values()))

    return quorum


PLANTS = (
    Mutant("ignores the lineage", decide, "_quorum", _steps_alone_count),
    Mutant("numbers quorums anew after a restart of the server", decide, "_quorum", _numbers_begin_anew),
    Mutant("does not wait for one that is further", decide, "_further", lambda right: lambda *arguments: None),
    Mutant("does not wait for one that saves", reactions, "aside", lambda right: lambda *arguments: None),
    Mutant("leaves nobody out", blame, "judge", lambda right: lambda *arguments: {}),
    Mutant("loads a checkpoint as soon as one has no state", decide, "_quorum", _one_without_state_is_enough),
    Mutant("one rank ignores the vote", habit="votes"),
    Mutant("each rank goes on with what it has fetched", habit="votes_on_fetch"),
    Mutant("catches up without waiting for the fetch", habit="waits_for_fetch"),
    Mutant("fetches over the state that it claims", habit="owns_up"),
    Mutant("serves a state while the optimizer changes it", habit="withdraws"),
    Mutant("never waits for who fetches", habit="lets_finish"),
    Mutant("counts its samples by itself", habit="follows_positions"),
    Mutant("advances the positions of those behind", habit="advances_healthy_only"),
    Mutant("contributes gradients while it is behind", habit="zeros"),
    Mutant("tries a failed step again in the same quorum", habit="asks_again"),
    Mutant("waits in a ring without a deadline", habit="gives_up"),
    Mutant("keeps the lineage of the step before", habit="names_its_commits"),
)


find = partial(find_in, PLANTS)


@contextmanager
def planted(plant: Mutant | None) -> Iterator[None]:
    """Inject the bug into the production code for the duration of the context. With None, or a bug of the model
    replicas, the context has no effect.
    """
    if plant is None or plant.owner is None:
        yield
        return
    with mock.patch.object(plant.owner, plant.name, plant.wrong(getattr(plant.owner, plant.name))):
        yield
