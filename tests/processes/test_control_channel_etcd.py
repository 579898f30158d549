"""The control channel on etcd while servers die and stall, and while other clients write to its keys."""

import threading
import time

import pytest
from etcd_servers import Servers, etcd  # noqa: F401 - a fixture
from test_control_channel import (
    LIMIT_S,
    TOKEN,
    ChannelEnds,
    Follower,
    eventually,
    numbered,
    numbers,
    order,
    receive,
    report,
)

from ft.base.errors import UserError
from ft.job.control import channel as channels
from ft.job.control.channel import Posted, Record, etcd_agent, etcd_control, etcd_ledger
from ft.job.control.channel.etcd_address import Address
from ft.job.control.channel.etcd_arrivals import Arrivals
from ft.job.control.channel.etcd_client import Etcd
from ft.job.control.channel.etcd_keys import Keys, pack
from ft.job.control.channel.etcd_wire import Compacted, Entry, below, one, shut
from ft.job.messages import AgentBeat, encode


@pytest.fixture
def three(etcd):  # noqa: F811
    return etcd(3)


@pytest.fixture
def single(etcd):  # noqa: F811
    return etcd(1)


@pytest.fixture
def channel_on():
    """``channel_on(servers)`` makes control channels whose ends are closed after the test."""
    made: list[ChannelEnds] = []

    def make(servers: Servers) -> ChannelEnds:
        made.append(ChannelEnds(servers.url))
        return made[-1]

    yield make
    for one_channel in made:
        one_channel.close()


class Traffic:
    """A control plane with two agents, in full conversation from start to ``end``, which checks that nothing was lost,
    came twice or out of order."""

    def __init__(self, channel: ChannelEnds):
        self.control = channel.host()
        self._agents = {node: channel.connect(self.control, node) for node in ("n0", "n1")}
        self.followers = [Follower(agent) for agent in self._agents.values()]
        self._ends_at: int | None = None
        self._posted = dict.fromkeys(self._agents, 0)
        self._seen: dict[str, list[int]] = {node: [] for node in self._agents}
        self._published = 0
        self._errors: list[Exception] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._guard, args=(self._say, node)) for node in self._agents]
        self._threads.append(threading.Thread(target=self._guard, args=(self._decide,)))
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def goes_on(self, orders: int = 20) -> None:
        """Until that many more orders have come to both agents."""
        wanted = self._published + orders
        eventually(lambda: self._errors or all(f.seen and f.seen[-1][0] >= wanted for f in self.followers))
        assert not self._errors, self._errors

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
        assert not self._errors, self._errors
        assert not any(thread.is_alive() for thread in self._threads)
        for follower in self.followers:
            assert follower.wait_for(self._published - 1) == numbered(0, self._published - 1)
        for node, count in self._posted.items():
            assert self._seen[node] == list(range(1, count + 1))
            eventually(lambda node=node, count=count: self._agents[node].taken() == count)

    def _guard(self, work, *arguments) -> None:
        try:
            work(*arguments)
        except Exception as error:
            self._errors.append(error)

    def _say(self, node: str) -> None:
        while not self._over.wait(0.01):
            self._posted[node] += 1
            self._agents[node].post(self._posted[node], report(self._posted[node]))
            if self._posted[node] % 10 == 0:
                self._agents[node].post(0, AgentBeat(node))
                self._agents[node].taken()

    def _decide(self) -> None:
        """An order for each report."""
        while not self._over.is_set() or sum(map(len, self._seen.values())) < sum(self._posted.values()):
            posted = self.control.receive(0.1)
            if posted is not None and posted.number:
                self._seen[posted.node].append(posted.number)
                self.control.publish(order(self._published))
                self._published += 1
                self.control.took(posted.node, posted.number)


# --- what needs no server --------------------------------------------------------------------------------------------


KEYS = Keys("ft/run-0", TOKEN)


def entry_of(key: str, text: str, keys: Keys = KEYS) -> Entry:
    return Entry(key, keys.sign(key, text), 1)


def test_reports_wait_for_those_before_them():
    arrivals = Arrivals(KEYS, {"n0": 3})
    assert arrivals.take(entry_of(KEYS.report("n0", 6), encode(report(6)))) == []
    assert arrivals.take(entry_of(KEYS.report("n0", 3), encode(report(3)))) == []
    assert arrivals.take(entry_of(KEYS.report("n0", 4), encode(report(4)))) == [Posted("n0", 4, report(4))]
    assert arrivals.take(entry_of(KEYS.report("n0", 4), encode(report(4)))) == []
    both = [Posted("n0", 5, report(5)), Posted("n0", 6, report(6))]
    assert arrivals.take(entry_of(KEYS.report("n0", 5), encode(report(5)))) == both


def test_what_is_no_report_is_skipped():
    arrivals = Arrivals(KEYS, {})
    stranger = Keys("ft/run-0", "a guess")
    assert arrivals.take(entry_of(KEYS.report("n0", 1), encode(report(1)), stranger)) == []
    assert arrivals.take(entry_of(KEYS.report("n0", 1), "{}")) == []
    assert arrivals.take(Entry(KEYS.report("n0", 2), KEYS.sign(KEYS.report("n1", 2), encode(report(2))), 1)) == []
    assert arrivals.take(Entry(KEYS.report("n0", 2), None, 1)) == []
    assert arrivals.take(entry_of(KEYS.report("n0", 2), encode(report(2)))) == [Posted("n0", 2, report(2))]


def test_a_heartbeat_that_is_older_than_the_last_is_skipped():
    arrivals, key, beat = Arrivals(KEYS, {}), KEYS.beat("n0"), encode(AgentBeat("n0"))
    assert arrivals.take(entry_of(key, pack(7, beat))) == [Posted("n0", 0, AgentBeat("n0"))]
    assert arrivals.take(entry_of(key, pack(7, beat))) == arrivals.take(entry_of(key, pack(6, beat))) == []
    assert len(arrivals.take(entry_of(key, pack(8, beat)))) == 1


# --- servers ---------------------------------------------------------------------------------------------------------


def test_nothing_is_lost_when_the_leader_is_killed_and_then_each_other_server(three, channel_on):
    traffic = Traffic(channel_on(three))
    leader = three.leader()
    for member in (leader, (leader + 1) % 3, (leader + 2) % 3):
        traffic.goes_on()
        three.kill(member)
        traffic.goes_on()
        three.start(member)
        three.wait()
    traffic.end()


def test_a_server_that_stands_still_holds_nothing_up(three, channel_on):
    traffic = Traffic(channel_on(three))
    for member in range(3):
        traffic.goes_on()
        three.stop(member)
        traffic.goes_on()
        three.go_on(member)
    traffic.goes_on()
    traffic.end()


def test_all_goes_on_once_a_majority_is_back(three, channel_on):
    traffic = Traffic(channel_on(three))
    traffic.goes_on()
    three.kill(0)
    three.kill(1)
    time.sleep(3.0)
    three.start(1)
    traffic.goes_on()
    traffic.end()


def test_without_a_majority_nobody_is_said_to_be_silent(three, channel_on):
    control = channel_on(three).host()
    assert control.receive(0.01) is None
    three.kill(0)
    three.kill(1)
    time.sleep(2.5)
    came = []
    waiting = threading.Thread(target=lambda: came.append(control.receive(0.01)), daemon=True)
    waiting.start()
    waiting.join(1.0)
    assert not came and control.absences == 0
    three.start(0)
    waiting.join(LIMIT_S)
    assert came == [None] and control.absences == 1


def test_who_has_waited_long_enough_for_a_majority_is_told(three, channel_on, monkeypatch):
    for module in (etcd_agent, etcd_control):
        monkeypatch.setattr(module, "PATIENCE_S", 2.0)
    channel = channel_on(three)
    control = channel.host()
    agent = channel.connect(control)
    follower = Follower(agent)
    three.kill(0)
    three.kill(1)
    for call in (lambda: agent.post(1, report(1)), agent.taken, lambda: control.receive(0.1)):
        with pytest.raises(ConnectionError, match="etcd"):
            call()
    assert isinstance(follower.wait_for_end(), ConnectionError)
    with pytest.raises(ConnectionError):
        control.publish(order(0))


def test_without_etcd_there_is_no_control_plane(monkeypatch):
    monkeypatch.setattr(etcd_control, "PATIENCE_S", 0.5)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:1"):
        channels.host("etcd://127.0.0.1:1", "run-0", TOKEN)
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:1"):
        channels.connect("etcd://127.0.0.1:1/ft/run-0", "n0", TOKEN, 0.5)


@pytest.mark.parametrize("url", ["etcd://", "etcd://host", "etcd://host:port", "etcd://a:1,,b:2"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(UserError, match="cannot be read"):
        channels.host(url, "run-0", TOKEN)


def test_a_password_is_not_repeated():
    with pytest.raises(UserError) as caught:
        Address.parse("etcd://me:secret@host")
    assert "secret" not in str(caught.value)


def test_the_past_that_etcd_has_given_up_is_not_needed(single, channel_on):
    channel = channel_on(single)
    control = channel.host()
    agent = channel.connect(control)
    follower = Follower(agent)
    control.publish(order(0))
    agent.post(1, report(1))
    assert follower.wait_for(0) and numbers(receive(control, 1)) == [1]
    held = [Held(agent._watch), Held(control._watch)]
    for number in range(1, 6):
        control.publish(order(number))
        agent.post(number + 1, report(number + 1))
    Stranger(single, control.where).delete(Keys(Address.parse(control.where).path, TOKEN).order(3))
    etcd_end = Etcd(Address.parse(single.url), LIMIT_S)
    etcd_end.compact(etcd_end.get(one("x"))[1])
    etcd_end.close()
    for watch in held:
        watch.let_go()
    assert follower.wait_for(5) == numbered(0, 5)
    assert numbers(receive(control, 5)) == [2, 3, 4, 5, 6]
    assert all(watch.compacted for watch in held)
    assert Follower(channel.connect(control, "n1")).wait_for(5) == numbered(0, 5)


class Held:
    """Keeps a watch from listening until ``let_go``; ``compacted``: it then asked for what was no longer there."""

    def __init__(self, watch):
        self._watch, self._free, self._waits = watch, threading.Event(), threading.Event()
        self.compacted = False
        self._listen, watch._listen = watch._listen, self._held
        shut(watch._connection)
        assert self._waits.wait(LIMIT_S)

    def let_go(self) -> None:
        self._free.set()

    def _held(self, revision: int):
        self._waits.set()
        self._free.wait(LIMIT_S)
        try:
            yield from self._listen(revision)
        except Compacted:
            self.compacted = True
            raise


def test_users_of_etcd_say_their_password(single, channel_on, monkeypatch):
    for path, body in (
        ("auth/user/add", {"name": "root", "password": "se cret"}),
        ("auth/role/add", {"name": "root"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/user/add", {"name": "trainer", "password": "of steam"}),
        ("auth/role/add", {"name": "trainers"}),
        ("auth/role/grant", {"name": "trainers", "perm": {"permType": "READWRITE", **below("ft/")}}),
        ("auth/user/grant", {"user": "trainer", "role": "trainers"}),
        ("auth/enable", {}),
    ):
        assert "header" in single.ask(0, path, body), path
    hosts = single.url.removeprefix("etcd://")
    with monkeypatch.context() as impatient:
        impatient.setattr(etcd_control, "PATIENCE_S", 1.0)
        for wrong in (f"etcd://{hosts}", f"etcd://root:guess@{hosts}"):
            with pytest.raises(UserError):
                channels.host(wrong, "run-0", TOKEN)

    def works(url: str) -> None:
        control = channels.host(url, "run-0", TOKEN)
        control.resume(Record())
        agent = channels.connect(control.where, "n0", TOKEN, LIMIT_S)
        follower = Follower(agent)
        agent.post(1, report(1))
        assert numbers(receive(control, 1)) == [1]
        control.publish(order(0))
        follower.wait_for(0)
        agent.close()
        control.close()

    works(f"etcd://root:se%20cret@{hosts}")
    monkeypatch.setenv("ETCDCTL_USER", "trainer:of steam")  # may write below ft/ alone
    works(f"etcd://{hosts}")
    with pytest.raises(UserError, match="permission denied"):
        works(f"etcd://{hosts}/elsewhere")


# --- other control planes --------------------------------------------------------------------------------------------


def test_a_control_plane_that_was_succeeded_changes_nothing(single, channel_on):
    channel = channel_on(single)
    old = channel.host()
    old.publish(order(0))
    follower = Follower(channel.connect(old))
    follower.wait_for(0)
    new = channel.host(Record(0, [order(0)]))
    with pytest.raises(ConnectionError, match="taken"):
        old.publish(order(99))
    with pytest.raises(ConnectionError, match="taken"):
        while True:
            old.receive(0.1)
    assert "taken over" in str(follower.wait_for_end())
    new.publish(order(1))
    assert Follower(channel.connect(new)).wait_for(1) == numbered(0, 1)


def test_agents_hear_that_their_control_plane_was_killed(single, channel_on):
    channel = channel_on(single)
    control = channel.host()
    agent = channel.connect(control)
    follower = Follower(agent)
    control._fail(ConnectionError("as if killed"))  # its threads end
    control._pulse.close()
    assert "gone" in str(follower.wait_for_end())
    with pytest.raises(ConnectionError):
        agent.taken()


def test_nothing_is_left_of_a_control_plane_that_is_not_on_record(single, channel_on):
    channel = channel_on(single)
    old = channel.host()
    for number in range(3):
        old.publish(order(number + 70))
    channel.connect(old, "n9").post(1, report(70))
    channel.connect(old).post(1, report(70))
    new = channel.host(Record())
    follower = Follower(channel.connect(new))
    agent = channel.connect(new)
    new.publish(order(0))
    assert follower.wait_for(0) == numbered(0, 0)
    agent.post(1, report(1))
    assert receive(new, 1)[0].node == "n0"
    time.sleep(0.3)
    assert new.receive(0.01) is None and follower.seen == numbered(0, 0)


def test_etcd_holds_no_more_orders_than_are_kept(single, channel_on, monkeypatch):
    monkeypatch.setattr(etcd_ledger, "KEPT_ORDERS", 5)
    control = channel_on(single).host()
    for number in range(12):
        control.publish(order(number))
    keys = Stranger(single, control.where).keys
    ((found,), _) = control._etcd.get(below(keys.orders))
    assert [entry.key for entry in found] == [keys.order(number) for number in range(7, 12)]


# --- strangers -------------------------------------------------------------------------------------------------------


class Stranger:
    """Somebody who may write to the same etcd and has no token."""

    def __init__(self, servers: Servers, where: str):
        self._etcd = Etcd(Address.parse(servers.url), LIMIT_S)
        self.keys = Keys(Address.parse(where).path, "a guess")

    def write(self, key: str, text: str) -> None:
        self._etcd.put(key, self.keys.sign(key, text))

    def put(self, key: str, value: str) -> None:
        self._etcd.put(key, value)

    def delete(self, key: str) -> None:
        self._etcd.transact([], [{"request_delete_range": one(key)}])

    def read(self, key: str) -> str | None:
        ((found,), _) = self._etcd.get(one(key))
        return found[0].value if found else None

    def wipe(self) -> None:
        """Deletes everything."""
        self._etcd.transact([], [{"request_delete_range": below(self.keys.prefix)}])


@pytest.fixture
def conversation(single, channel_on):
    """(channel, control, agent, stranger), with orders 0 to 4 published."""
    channel = channel_on(single)
    control = channel.host()
    agent = channel.connect(control)
    for number in range(5):
        control.publish(order(number))
    return channel, control, agent, Stranger(single, control.where)


def test_what_a_stranger_writes_is_ignored(conversation):
    channel, control, agent, stranger = conversation
    keys = stranger.keys
    follower = Follower(agent)
    follower.wait_for(4)
    text = '{"kind":"Close","epoch":5,"reason":"a stranger"}'
    stranger.write(keys.order(5), text)
    stranger.write(keys.order(6), text)
    stranger.put(keys.order(7), "junk")
    stranger.put(keys.down + "junk", "junk")
    stranger.put(keys.boxes + "junk", "junk")
    stranger.write(keys.report("n0", 1), text)
    stranger.write(keys.beat("n0"), "9 " + text)
    stranger.write(keys.taken("n0"), "77")
    stranger.write(keys.head, '{"reign": 99}')
    assert agent.taken() == 0
    agent.post(1, report(1))
    assert numbers(receive(control, 1)) == [1]
    assert control.receive(0.1) is None
    for number in range(5, 9):
        control.publish(order(number))
    assert follower.wait_for(8) == numbered(0, 8)
    assert Follower(channel.connect(control, "n1")).wait_for(8) == numbered(0, 8)


def test_what_a_stranger_deletes_or_overwrites_is_put_back(conversation):
    channel, control, agent, stranger = conversation
    keys = stranger.keys
    control.took("n0", 3)
    eventually(lambda: agent.taken() == 3)
    owned = (keys.order(2), keys.head, keys.taken("n0"))
    before = {key: stranger.read(key) for key in owned}
    for spoil in (stranger.delete, lambda key: stranger.put(key, "junk")):
        for key in owned:
            spoil(key)
            eventually(lambda key=key: stranger.read(key) == before[key])
    assert Follower(channel.connect(control, "n1")).wait_for(4) == numbered(0, 4)


def test_all_is_put_back_when_everything_was_deleted(conversation):
    channel, control, agent, stranger = conversation
    agent.post(1, report(1))
    receive(control, 1)
    follower = Follower(agent)
    follower.wait_for(4)
    stranger.wipe()
    eventually(lambda: stranger.read(stranger.keys.alive) is not None)
    control.publish(order(5))
    assert follower.wait_for(5) == numbered(0, 5)
    assert agent.taken() == 0
    assert stranger.read(stranger.keys.report("n0", 1)) is not None
    assert Follower(channel.connect(control, "n1")).wait_for(5) == numbered(0, 5)


def test_an_agent_puts_back_a_report_that_nobody_has_read(single, channel_on):
    channel = channel_on(single)
    first = channel.host()
    agent = channel.connect(first)
    for number in (1, 2, 3):
        agent.post(number, report(number))
    receive(first, 3)
    stranger = Stranger(single, first.where)
    for spoil in (stranger.delete, lambda key: stranger.put(key, "junk")):
        key = stranger.keys.report("n0", 2)
        before = stranger.read(key)
        spoil(key)
        assert agent.taken() == 0
        assert stranger.read(key) == before


def test_reports_are_deleted_once_they_are_on_record(conversation):
    _, control, agent, stranger = conversation
    for number in (1, 2, 3):
        agent.post(number, report(number))
    receive(control, 3)
    control.took("n0", 2)
    eventually(lambda: stranger.read(stranger.keys.report("n0", 2)) is None)
    assert stranger.read(stranger.keys.report("n0", 1)) is None
    assert stranger.read(stranger.keys.report("n0", 3)) is not None
