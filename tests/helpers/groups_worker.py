"""A worker for tests of process groups: it follows epochs through keys in a store, which is a fixture."""

import json
import os
import threading
import time
from dataclasses import asdict

import pytest

from ft.job.parts import GroupReport
from ft.net.store import StoreConnection, StoreServer
from ft.state.groups import Groups, Rendezvous, plan_rebuild

LIMIT_S = 60.0
TOKEN = "the token of the test"


@pytest.fixture
def address():
    """host:port of a store that outlives every rank."""
    server = StoreServer("127.0.0.1", 0, TOKEN)
    yield server.address
    server.close()


@pytest.fixture
def control(address):
    """The test's own view of the store."""
    return connect(address)


class Worker:
    """One logical rank.

    Attributes:
        failures: the arguments of all calls of ``on_failure``, which waits for the end of the epoch, for at most
            ``patience`` seconds.
    """

    def __init__(self, address, rank=None, size=None, epoch=0, alone=False, patience=LIMIT_S, device_backend="gloo"):
        self.address, self.epoch, self.patience = address, epoch, patience
        self.rank = int(os.environ["RANK"]) if rank is None else rank
        self.size = int(os.environ["WORLD_SIZE"]) if size is None else size
        self.store = connect(address)
        self.failures: list[tuple[str, str]] = []
        self._closed, self._last_closed = threading.Condition(), epoch - 1
        self.closed_at = 0.0
        self.groups: Groups | None = None
        threading.Thread(target=self._follow, args=(epoch,), daemon=True).start()
        self.groups = Groups.start(
            rendezvous=Rendezvous(address, TOKEN),
            prefix=f"groups/{epoch}",
            rank=self.rank,
            world_size=self.size,
            device_backend=device_backend,
            alone=alone,
            on_failure=self._on_failure,
            epoch=epoch,
            timeout_s=60,
        )

    def close_all(self, reason="test") -> None:
        """Close the epoch on all workers, in place of the control plane."""
        self.store.set(f"close/{self.epoch}", reason)

    def wait_closed(self) -> None:
        assert self._wait(LIMIT_S), "the epoch was not closed"

    def meet(self, what: str) -> None:
        """Wait at a barrier that does not use the groups."""
        self.store.set(f"meet/{what}/{self.rank}", "")
        self.store.wait([f"meet/{what}/{rank}" for rank in range(self.size)])

    def leave(self) -> None:
        """Leave the epoch, and report the groups as ``WorkerReleased`` does."""
        self.wait_closed()
        said = [asdict(report) for report in self.groups.reports()]
        self.groups.drop()
        self.store.set(f"reports/{self.epoch}/{self.rank}", json.dumps(said))

    def plan(self, replaced=()):
        """Return what the control plane would decide for the next epoch."""
        reports = {}
        for rank in range(self.size):
            if rank not in replaced:
                said = json.loads(self.store.get(f"reports/{self.epoch}/{rank}"))
                reports[rank] = [GroupReport(**one) for one in said]
        return plan_rebuild(reports, set(replaced))

    def enter(self, plan, epoch=None) -> float:
        """Enter the next epoch and rebuild groups, until operations are allowed; return the seconds of the rebuild."""
        self.epoch = self.epoch + 1 if epoch is None else epoch
        seconds = self.groups.rebuild(plan.rebuild, plan.defer, f"groups/{self.epoch}", self.epoch)
        self.groups.reopen(self.epoch)
        return seconds

    def renew(self, replaced=()) -> object:
        """Go from a closed epoch to the next open one."""
        self.leave()
        plan = self.plan(replaced)
        self.enter(plan)
        return plan

    def _follow(self, epoch: int) -> None:
        store = connect(self.address)
        while True:
            try:
                reason = store.get(f"close/{epoch}").decode()
            except ConnectionError:
                return  # the test has ended, and the store with it
            self.closed_at = time.monotonic()
            if self.groups is not None:
                self.groups.close(epoch, reason)
            with self._closed:
                self._last_closed = epoch
                self._closed.notify_all()
            epoch += 1

    def _on_failure(self, group: str, error: BaseException) -> None:
        self.failures.append((group, str(error)))
        self.store.set(f"suspects/{self.epoch}", str(self.rank))
        self._wait(self.patience)

    def _wait(self, limit_s: float) -> bool:
        epoch = self.epoch
        with self._closed:
            return self._closed.wait_for(lambda: self._last_closed >= epoch, limit_s)


def connect(address: str) -> StoreConnection:
    return StoreConnection(address, TOKEN, 60.0)
