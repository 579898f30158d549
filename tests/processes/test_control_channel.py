"""The control channel between agents and the control plane."""

import contextlib
import json
import threading
import time
from concurrent.futures import wait

import pytest
from waiting import eventually

from ft.job.control.channel import KEPT_ORDERS, AgentChannel, ChannelRecord, ControlChannel, Posted
from ft.job.messages import AgentBeat, Close, Observed

LIMIT_S = 20.0
SOON_S = 0.3
TOKEN = "the token of the test"


@pytest.fixture
def channel():
    """Control channels; all their ends are closed after the test."""
    made = ChannelEnds()
    yield made
    made.close()


class ChannelEnds:
    """Makes the ends of a control channel, and closes them."""

    def __init__(self):
        self._ends = []

    def host(self, record: ChannelRecord | None = ChannelRecord()) -> ControlChannel:  # noqa: B008 - frozen
        control = ControlChannel("tcp://127.0.0.1:0", TOKEN)
        self._ends.append(control)
        if record is not None:
            control.resume(record)
        return control

    def connect(self, control: ControlChannel, node: str = "n0") -> AgentChannel:
        agent = AgentChannel(control.where, node, TOKEN, LIMIT_S)
        self._ends.append(agent)
        return agent

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(ConnectionError):
                end.close()


class Follower:
    """Follows orders in a thread; ``seen`` is what has come, ``error`` how it ended."""

    def __init__(self, agent: AgentChannel, start: int = 0):
        self.seen: list[tuple[int, int]] = []
        self.error: Exception | None = None
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._follow, args=(agent, start), daemon=True)
        self._thread.start()

    def _follow(self, agent: AgentChannel, start: int) -> None:
        try:
            agent.follow(self._take, start)
        except Exception as error:
            self.error = error

    def _take(self, number: int, order: Close) -> None:
        with self._news:
            self.seen.append((number, order.epoch))
            self._news.notify_all()

    def wait_for(self, number: int) -> list[tuple[int, int]]:
        """Until the order of that number is there."""
        with self._news:
            is_there = self._news.wait_for(lambda: self.seen and self.seen[-1][0] >= number, LIMIT_S)
            assert is_there, f"{self.seen[-3:]} {self.error!r}"
            return self.seen

    def wait_for_end(self) -> Exception | None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self.error


def order(number: int) -> Close:
    return Close(number, "test")


def report(number: int) -> Observed:
    return Observed("test", {"number": number})


def numbered(first: int, last: int) -> list[tuple[int, int]]:
    return [(number, number) for number in range(first, last + 1)]


def receive(control: ControlChannel, count: int) -> list[Posted]:
    """That many reports; heartbeats are left out."""
    found: list[Posted] = []
    deadline = time.monotonic() + LIMIT_S
    while len(found) < count:
        posted = control.receive(0.2)
        assert time.monotonic() < deadline, f"{len(found)} of {count}: {found[-3:]}"
        if posted is not None and posted.number:
            found.append(posted)
    return found


def numbers(posted: list[Posted]) -> list[int]:
    assert all(entry.report == report(entry.number) for entry in posted)
    return [entry.number for entry in posted]


def test_a_control_plane_whose_own_connection_is_lost_gets_nothing_and_goes_on(channel):
    control = channel.host()
    assert control.receive(0.0) is None
    control._reader.break_off()
    control._inbox.join(LIMIT_S)
    assert not control._inbox.is_alive() and control.receive(0.0) is None


def test_a_heartbeat_comes_without_a_number(channel):
    control = channel.host()
    agent = channel.connect(control)
    agent.post(0, AgentBeat("n0"))
    found = []
    eventually(lambda: found.append(control.receive(0.1)) or found[-1] is not None)
    assert found[-1] == Posted("n0", 0, AgentBeat("n0"))
    assert agent.taken() == 0


def test_every_follower_gets_every_order_from_where_it_starts(channel):
    control = channel.host()
    blocked = Follower(channel.connect(control))
    for number in range(3):
        time.sleep(SOON_S)  # it has caught up, and waits
        control.publish(order(number))
        blocked.wait_for(number)
    late = [(Follower(channel.connect(control, f"n{start}"), start), start) for start in (0, 1, 3)]
    for number in range(3, 30):
        control.publish(order(number))
    assert all(follower.wait_for(29) == numbered(start, 29) for follower, start in ((blocked, 0), *late))


def test_two_agents_report_at_once_and_each_in_its_order(channel, aside):
    control = channel.host()
    agents = [channel.connect(control, node) for node in ("n0", "n1")]

    def say(agent: AgentChannel) -> None:
        for number in range(1, 41):
            agent.post(number, report(number))

    talking = [aside(say, agent) for agent in agents]
    found = receive(control, 80)
    for each in talking:
        each.result(LIMIT_S)
    for node in ("n0", "n1"):
        assert numbers([posted for posted in found if posted.node == node]) == list(range(1, 41))


def test_what_is_posted_again_comes_in_order_or_not_at_all(channel):
    control = channel.host()
    first = channel.connect(control)
    for number in (1, 2, 3):
        first.post(number, report(number))
    assert numbers(receive(control, 3)) == [1, 2, 3]
    control.took("n0", 1)
    eventually(lambda: first.taken() == 1)
    assert channel.connect(control, "n1").taken() == 0
    first.close()
    second = channel.connect(control)
    for number in (2, 3, 4):
        second.post(number, report(number))
    found = []
    while not found or found[-1].number != 4:
        found += receive(control, 1)
    assert numbers(found) in ([2, 3, 4], [4])


def test_a_control_plane_takes_over_from_one_that_is_gone(channel):
    old = channel.host()
    for number in range(3):
        old.publish(order(number))
    agent = channel.connect(old)
    for number in (1, 2):
        agent.post(number, report(number))
    receive(old, 2)
    old.took("n0", 1)
    follower = Follower(agent)
    follower.wait_for(2)
    old.close()
    agent.close()
    assert isinstance(follower.wait_for_end(), ConnectionError)
    new = channel.host(ChannelRecord(0, [order(0), order(1), order(2)], {"n0": 1}))
    again = channel.connect(new)
    assert again.taken() == 1
    again.post(2, report(2))
    assert numbers(receive(new, 1)) == [2]
    new.publish(order(3))
    assert Follower(again, 3).wait_for(3) == numbered(3, 3)


def test_agents_wait_until_the_channel_is_as_on_record(channel, aside):
    control = channel.host(None)
    agent = channel.connect(control)
    asking = aside(agent.taken)
    assert not wait([asking], SOON_S).done
    control.resume(ChannelRecord(taken={"n0": 9}))
    assert asking.result(LIMIT_S) == 9


def test_the_oldest_orders_go_and_the_first_of_a_record_without_orders_is_the_next(channel):
    control = channel.host(ChannelRecord(first=12))
    for number in range(12, KEPT_ORDERS + 17):
        control.publish(order(number))
    last = KEPT_ORDERS + 16
    assert Follower(channel.connect(control)).wait_for(last) == numbered(17, last)


def test_a_record_of_as_many_orders_as_are_kept_is_taken_whole(channel):
    last = KEPT_ORDERS + 2
    control = channel.host(ChannelRecord(3, [order(number) for number in range(3, last + 1)]))
    assert Follower(channel.connect(control)).wait_for(last) == numbered(3, last)


def test_an_inbox_survives_every_message(channel):
    control = channel.host()
    agent = channel.connect(control)
    deep = "[" * 200_000
    bad = ('["n0",1e400,"{}"]', '["n0",1,[1]]', deep, json.dumps(["n0", 1, deep]), "5", "end of it", "[1,2,3]")
    for text in bad:
        agent._writer.queue_push("control/inbox", text)
    agent._writer.queue_push("control/inbox", b"\xff\xfe")
    agent.post(1, report(1))
    assert numbers(receive(control, 1)) == [1]


def test_an_agents_end_that_is_closed_wakes_its_follower(channel):
    agent = channel.connect(channel.host())
    follower = Follower(agent)
    time.sleep(SOON_S)
    agent.close()
    assert isinstance(follower.wait_for_end(), ConnectionError)
    with pytest.raises(ConnectionError):
        agent.post(1, report(1))


def test_long_messages_and_all_letters_get_through(channel):
    control = channel.host()
    agent = channel.connect(control, "kö/ln n0")
    told = Observed("test", {"text": "ü\n\"'\x00" * 50_000})
    agent.post(1, told)
    assert receive(control, 1) == [Posted("kö/ln n0", 1, told)]
