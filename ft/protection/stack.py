"""The composition of all protections of a run into one object that the trainer calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch

from ft.protection.contract import Asked, DataShare, Layer, Protection, Trainer, Update
from ft.protection.table import ProtectionEntry, asked_for
from ft.worker.session import Session
from megatron.patches.replace import wrap_attribute


class Stack(Layer):
    """The layers of a run, the outermost first. Without layers, a trainer runs as if there were no protections."""

    def __init__(self, layers: Sequence[Layer] = ()):
        self.layers = tuple(layers)

    def protect(self, optimizer: Any) -> None:
        """Route every call of ``optimizer.step`` through :meth:`update`; without layers nothing is replaced."""
        if self.layers:
            wrap_attribute(optimizer, "step", self._protected_step)

    def _protected_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.update(partial(step, *args, **kwargs))

    def run_with_recovery(self, work: Callable[[], Any]) -> Any:
        for layer in reversed(self.layers):
            work = partial(layer.run_with_recovery, work)
        return work()

    def begins(self) -> bool:
        answers = [layer.begins() for layer in self.layers]  # a list, so that every layer is called
        return all(answers)

    def catching_up(self) -> None:
        for layer in self.layers:
            layer.catching_up()

    def caught_up(self) -> None:
        for layer in self.layers:
            layer.caught_up()

    def compute(self, work: Callable[[], Update]) -> Update:
        for layer in reversed(self.layers):
            work = partial(layer.compute, work)
        return work()

    def metrics(self) -> dict[str, float]:
        return {name: value for layer in self.layers for name, value in layer.metrics().items()}

    def share(self, samples: int) -> int:
        return reduce(lambda left, layer: layer.share(left), self.layers, samples)

    def reduce(self, reported: list[torch.Tensor]) -> list[torch.Tensor]:
        return reduce(lambda sums, layer: layer.reduce(sums), reversed(self.layers), reported)

    def update(self, step: Callable[[], Any]) -> Any:
        for layer in self.layers:
            step = partial(layer.update, step)
        return step()

    def saves(self, step: int, *, is_due: bool, ends: bool) -> bool:
        return reduce(lambda due, layer: layer.saves(step, is_due=due, ends=ends), self.layers, is_due)

    def at(self, phase: str) -> None:
        for layer in self.layers:
            layer.at(phase)

    def committed(self) -> None:
        for layer in reversed(self.layers):
            layer.committed()


class Protections:
    """The protections that a run asks for, the outermost first.

    Attributes:
        joins_run, intercepts_operators, divides_steps: whether this is so of any protection; see
            :class:`ft.protection.contract.Protection`.
        session: this worker's place in ``ft run``; None before ``connected``, and outside.
        outcome: returns how training has ended; see :meth:`ends_as`.
    """

    def __init__(self, protections: Sequence[Protection] = (), entries: Sequence[ProtectionEntry] = ()):
        self._protections, self.entries = tuple(protections), tuple(entries)
        self.features = frozenset[str]().union(*(each.features for each in self._protections))
        self.joins_run = any(each.joins_run for each in self._protections)
        self.intercepts_operators = any(each.intercepts_operators for each in self._protections)
        self.divides_steps = any(each.divides_steps for each in self._protections)
        self.session: Session | None = None
        self.outcome: Callable[[], Mapping[str, Any]] = dict

    @classmethod
    def of(cls, flags: Any, environment: Mapping[str, str]) -> "Protections":
        """Return the protections that the trainer's ``flags`` and the environment of ``ft run`` ask for."""
        asked = Asked(flags, environment)
        entries = asked_for(flags, environment)
        return cls([entry.load()(asked) for entry in entries], entries)

    def __iter__(self) -> Iterator[Protection]:
        return iter(self._protections)

    def connected(self, session: Session | None) -> None:
        """Pass ``session`` to all protections, once the process groups exist."""
        self.session = session
        for each in self._protections:
            each.connected(session)

    def ends_as(self, outcome: Callable[[], Mapping[str, Any]]) -> None:
        """Set the function that returns how training has ended (:attr:`ft.worker.protocol.Member.outcome`)."""
        self.outcome = outcome
        if self.session is not None:
            self.session.outcome = outcome

    @property
    def is_given_state(self) -> bool:
        """Return whether this rank receives its state from others, so that it loads nothing."""
        return any(each.is_given_state for each in self._protections)

    @property
    def draws_weights(self) -> bool:
        """Return whether the model is built with randomly initialized weights."""
        return not self.is_given_state or any(each.draws_weights for each in self._protections)

    def share(self, extra: dict[str, Any], step: int, samples: int, block: int) -> DataShare | None:
        """Return the part of the training data to read; None: all of it. See :meth:`Protection.share`."""
        shares = (each.share(extra, step, samples, block) for each in self._protections)
        return next((found for found in shares if found is not None), None)

    def stack(self, trainer: Trainer) -> Stack:
        """Build the layers, the innermost first, and route the optimizer's step through them."""
        layers: list[Layer] = []
        for each in reversed(self._protections):
            layers.insert(0, each.layer(trainer, tuple(layers)))
        stack = Stack(layers)
        stack.protect(trainer.optimizer)
        return stack
