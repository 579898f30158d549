"""A worker's protocol with the control plane, on a queue of orders."""

import asyncio
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ft.base.errors import EpochClosed
from ft.faults.hang.format import is_in_own_wait
from ft.faults.hang.inspection import Rank
from ft.job.messages import Close, Finish, Open, Repair, Resume
from ft.job.parts import Seat
from ft.worker import protocol
from ft.worker.progress import Progress
from ft.worker.protocol import Orders
from ft.worker.session import Session, running_threads

REPAIR = Repair(1, 7, [], [], {})


class Member(protocol.Member):
    """A worker that has received ``orders``. ``quiet``: how often nothing arrives in time before the first of them."""

    def __init__(self, *orders, quiet=0, epoch=1):
        super().__init__("n0.w0", "n0")
        self.address, self.progress, self.epoch = "n0:1", Progress(), epoch
        self.sent, self.errors, self._quiet = [], [], quiet
        self._orders = Orders(self.note_close)
        for order in orders:
            self._orders.deliver(order)

    def send(self, report):
        self.sent.append(report)

    async def next_order(self, within_s):
        if self._quiet:
            assert within_s == protocol.REPEAT_S
            self._quiet -= 1
            return None
        return self._orders.next(0.0)

    async def wait_closed(self, within_s):
        self._quiet -= 1
        return self._quiet < 0

    def log_error(self, error):
        self.errors.append(error)


def opens(epoch, *workers, fresh=False):
    seats = {rank: Seat(name, "n0", f"{name}:1", rank) for rank, name in enumerate(workers)}
    return Open(epoch, seats, [], fresh)


def test_a_report_is_sent_again_until_its_order_arrives():
    member = Member(REPAIR, quiet=3)
    assert protocol.run(protocol.await_order(member, Repair, "arrived")) is REPAIR
    assert member.sent == ["arrived"] * 4


def test_a_report_that_is_answered_at_once_is_sent_once():
    member = Member(Repair(0, 6, [], [], {}), Resume(1, 7), REPAIR)
    assert protocol.run(protocol.await_order(member, Repair, "arrived")) is REPAIR
    assert member.sent == ["arrived"]


def test_the_end_of_the_epoch_ends_the_wait():
    member = Member(Close(0, "old"), Close(1, "a worker died"), REPAIR)
    with pytest.raises(EpochClosed, match="a worker died"):
        protocol.run(protocol.await_order(member, Repair, "arrived"))
    assert member.sent == ["arrived"] and member.closed


def test_the_order_to_finish_is_for_all_epochs():
    member = Member(Close(0, "old"), Finish(), quiet=1)
    protocol.run(protocol.finish(member, 9))
    assert [(report.epoch, report.step) for report in member.sent] == [(1, 9)] * 2


def test_a_worker_enters_the_first_newer_epoch_in_which_it_has_a_seat():
    member = Member(opens(1, "n0.w0"), opens(2, "n0.w1"), opens(3, "n0.w1", "n0.w0"))
    protocol.run(protocol.enter_next_epoch(member, "released"))
    assert (member.rank, member.epoch, member.progress.epoch, member.closed) == (1, 3, 3, False)


def test_a_worker_that_is_seated_otherwise_than_it_was_built_ends():
    member = Member(opens(2, "n0.w1", "n0.w0"))
    member.rank = 0
    with pytest.raises(SystemExit, match="seated as logical rank 1"):
        protocol.run(protocol.enter_next_epoch(member))


def test_a_standby_ends_with_the_run():
    with pytest.raises(SystemExit) as end:
        protocol.run(protocol.take_seat(Member(Finish(), epoch=-1)))
    assert end.value.code == 0


@pytest.mark.parametrize("fresh", [True, False])
def test_a_worker_joins_if_its_first_epoch_is_not_fresh(fresh):
    member = Member(opens(4, "n0.w0", fresh=fresh), epoch=-1)
    protocol.run(protocol.take_seat(member))
    assert member.joins is not fresh and member.sent[0].address == "n0:1"


def test_an_epoch_that_is_closed_before_it_is_entered_is_known_to_be_closed():
    member = Member(opens(2, "n0.w0"), Close(2, "again"))
    protocol.run(protocol.enter_next_epoch(member))
    assert member.closed


def test_an_error_is_reported_until_the_epoch_is_closed():
    member = Member(quiet=2)
    error = ValueError("odd")
    protocol.run(protocol.report_failure(member, 5, error))
    assert len(member.sent) == 3 and member.errors == [error]
    assert (member.sent[0].kinds[0], member.sent[0].step) == ("ValueError", 5)


def test_an_error_that_the_end_of_the_epoch_has_caused_is_not_reported():
    member = Member(Close(1, "a worker died"))
    protocol.run(protocol.report_failure(member, 5, ValueError("odd")))
    protocol.run(protocol.report_failure(Member(), 5, EpochClosed(1, "a worker died")))
    assert member.sent == []


def test_a_suspended_coroutine_is_an_error_outside_of_a_simulation():
    with pytest.raises(RuntimeError, match="outside of a simulation"):
        protocol.run(asyncio.sleep(0))


def waits(name):
    """Return whether an inspection finds the thread in a wait of this project, as if it was a rank's training
    thread."""
    one = next(thread for thread in running_threads() if thread.name == name)
    return is_in_own_wait(Rank(0, threads=(replace(one, trains=True),)))


def test_an_inspection_knows_who_waits_for_a_verdict_and_who_waits_for_an_order():
    left, orders = threading.Event(), Orders(lambda order: None)
    member = SimpleNamespace(_left=left, worker="n0.w0", epoch=1, send=lambda report: None)
    member.wait_closed = lambda within_s: Session.wait_closed(member, within_s)
    member.timeouts = SimpleNamespace(verdict_s=60.0)
    suspects = threading.Thread(target=Session.suspect, args=(member, "dp", OSError()), name="suspects", daemon=True)
    awaits = threading.Thread(target=orders.next, args=(60.0,), name="awaits", daemon=True)
    try:
        for thread in (suspects, awaits):
            thread.start()
            until = time.monotonic() + 120
            while not waits(thread.name):
                assert time.monotonic() < until and thread.is_alive()
                time.sleep(0.01)
    finally:
        left.set()
        orders.deliver(Finish())
        suspects.join(60.0)
        awaits.join(60.0)
