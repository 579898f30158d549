"""Planned faults, connected to the parts of a worker that they break."""

import random
from collections.abc import Callable

from ft import events
from ft.errors import FallbackError
from ft.inject.faults import Fault
from ft.inject.phases import plant
from ft.inject.worker import Injector
from ft.snapshot import Snapshots
from ft.worker.session import Session
from ft.worker.subject import Subject


class Breakage:
    """What an injected fault does to this worker's connections and snapshots (``ft.inject.worker.Actions``)."""

    def __init__(self, session: Session, snapshots: Snapshots):
        self._session, self._snapshots = session, snapshots
        self._choice = random.Random(session.rank)

    def drop(self) -> None:
        self._session.groups.break_connection(self._choice)

    def corrupt(self, copies: str) -> None:
        """Nothing complete to corrupt: the next moment's snapshot stays whole."""
        owners = [None] if copies == "own" else [int(owner) for owner in self._snapshots.holdings().copies]
        for owner in owners:
            try:
                self._snapshots.corrupt(owner, byte=self._choice.randrange(1 << 20))
            except FallbackError as missing:
                print(f"injected corruption found nothing: {missing}", flush=True)


def make_injector(session: Session, snapshots: Snapshots) -> Injector:
    """The faults that are planned for this worker's logical rank and have not happened."""

    def announce(fault: Fault) -> None:
        where = fault.phase if fault.step is not None else "time"
        session.observe(events.FAULT_INJECTED, number=fault.number, kind=fault.kind, where=where, fault=str(fault))

    actions = Breakage(session, snapshots)
    return Injector.from_environment(session.rank, session.node, session.fired, announce, actions)


def plant_phases(injector: Injector, subject: Subject, step: Callable[[], int]) -> None:
    """Puts the points inside forward, backward and gradient reduction in place, where a fault is planned there."""
    plant(injector, subject.chunks, step)
    if not injector.has("reduce"):
        return
    config = subject.chunks[0].config
    finalize = config.finalize_model_grads_func

    def finalize_with_faults(*args, **kwargs):
        injector.at("reduce", step())
        return finalize(*args, **kwargs)

    config.finalize_model_grads_func = finalize_with_faults
