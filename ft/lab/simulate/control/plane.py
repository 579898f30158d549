"""The control plane's process: the production decision code and journal, with the simulation's I/O around them.

Its death loses everything but the journal. The next one, on this host or another, is built from it, and takes up the
numbering of reports and orders where the journal ends.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft.job import messages as m
from ft.job.control import controller, journal
from ft.job.control.channel import Posted
from ft.job.control.state import ENDED, Options, State
from ft.net.codec import to_json

if TYPE_CHECKING:
    from ft.lab.simulate.control.agent import Host
    from ft.lab.simulate.control.cluster import Cluster
    from ft.lab.simulate.control.network import Link

BEFORE, TORN, WRITTEN, AFTER = "before", "torn", "written", "after"
"""Moments to die at, while a report is taken in: before it is written down, while, before its orders go out, after."""


class Plane:
    """``path``: of its journal, None where it is not going to die: then nothing is written.

    Attributes:
        log: all orders. said: reports taken, for echoes. is_up: there is a process; paused: it is stopped.
        serves_since: true time.
        was_cut_off: the network of its host did not pass for some time.
    """

    def __init__(self, cluster: "Cluster", host: "Host", options: Options, path: Path | None):
        self._cluster, self.host, self._options, self._path = cluster, host, options, path
        self.state = State.begin(options)
        self.log: list[Any] = []
        self.said: list[Any] = []
        self.is_up, self.paused, self.dies_at, self.was_cut_off = True, False, "", False
        self._taken: dict[str, int] = {}
        self._inbox: list[tuple[Link, str, int, Any]] = []
        self._due, self._life = 0.0, 0
        self._last: Any = None
        self.serves_since, self._ahead = cluster.time.now, 0.0
        self._journal = None if path is None else journal.Journal(path, options)

    def start(self) -> None:
        self._take(None)

    def hear(self, link: "Link", node: str, number: int, report: Any) -> None:
        """A report arrives over ``link``; number 0: a heartbeat."""
        if not self.is_up:
            return
        if self.paused:
            self._inbox.append((link, node, number, report))
            return
        if number and number <= self._taken.get(node, 0):
            link.taken(number)
            return
        self._take(report, node, number)
        if self.is_up:
            link.taken(number)

    def echo(self, report: Any) -> None:
        """What the protocol excludes: a report reaches ``decide`` once more."""
        if not self.is_up or self.paused:
            return
        before = to_json(self.state)
        self._take(report)
        if to_json(self.state) != before:
            self._cluster.checks.fail(f"a report that came a second time has changed the state: {m.encode(report)}")

    def clock(self) -> float:
        """What ``decide`` takes for now (``ft.job.control.sidecar``)."""
        return self.host.clock.read(self._cluster.time.now) + self._ahead

    def _wall(self) -> float:
        return self._cluster.time.now + self.host.skew_s

    # --- taking in ---------------------------------------------------------------------------------------------------

    def _take(self, report: Any | None, node: str = "", number: int = 0) -> None:
        now = self.clock()
        if report is not None and self.dies_at == BEFORE and number:
            self.die()
            return
        checks = self._cluster.checks
        checks.before(report)
        decisions = controller.decide(self.state, now, report)
        checks.decided(report, decisions)
        if self._journal is not None:
            posted = None if report is None else Posted(node, number, report)
            self._journal.enter(now, self._wall(), posted, decisions)
        if self.dies_at == TORN and number:
            self.die()
            self._tear()
            self._last = None
            return
        checks.on_record(report)
        if number:
            self._taken[node] = number
            self.said.append(report)
        if self.dies_at == WRITTEN and number:
            self.die()
            return
        self._publish([order for decision in decisions for order in decision.orders])
        if self.dies_at == AFTER and number:
            self.die()
            return
        self._plan(now, report)

    def _publish(self, orders: list[Any]) -> None:
        if not orders:
            return
        self.log += orders
        for agent in self._cluster.agents.values():
            if agent.alive:
                agent.link.pump()
        for order in orders:
            self._cluster.ordered(order)

    def _plan(self, now: float, report: Any | None) -> None:
        """When the clock is to be looked at (``ft.job.control.sidecar``)."""
        following = controller.next_deadline(self.state, now)
        self._cluster.checks.plans(now, following)
        if report is None or following < self._due:
            self._due = following
            self._life += 1
            self._cluster.time.after(self.host.clock.true(following - now), self._look, self._life)

    def _look(self, life: int) -> None:
        self.was_cut_off |= self.host.is_cut(self._cluster.time.now)
        if life == self._life and self.is_up and not self.paused and self.state.phase != ENDED:
            self._take(None)

    # --- absences ----------------------------------------------------------------------------------------------------

    def go_on(self, superseded: bool) -> None:
        """After a stop: what has come in is taken before the clock is looked at. ``superseded``: another one has taken
        its place meanwhile, and it ends."""
        if not self.paused:
            return
        if superseded:
            self.die()
            return
        self.paused = False
        inbox, self._inbox = self._inbox, []
        for entry in inbox:
            self.hear(*entry)
        if self.is_up:
            self._take(None)

    def crash_soon(self, moment: str) -> None:
        """Dies while it takes the next numbered report in."""
        self.dies_at = moment

    def die(self) -> None:
        """The process ends; its journal stays."""
        self.is_up, self.paused, self.dies_at = False, False, ""
        self._last = _without_heartbeats(self.state)
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._inbox.clear()
        self._life += 1
        self._cluster.control_ended()

    def _tear(self) -> None:
        """The last line of the journal is only begun."""
        whole = self._path.read_bytes()
        last = whole.rstrip(b"\n").rfind(b"\n") + 1
        self._path.write_bytes(whole[: self._cluster.rng.randrange(last, len(whole) - 1)])

    def restart(self, host: "Host") -> None:
        """Another process takes over, with the journal and nothing else."""
        memory = journal.recall(self._path)
        log = list(memory.record.orders)
        if memory.record.first or log[: len(self.log)] != self.log:
            self._cluster.checks.fail("the orders in the journal are not those that were published")
        if self._last not in (None, _without_heartbeats(memory.state)):
            self._cluster.checks.fail("the state in the journal is not the one that the control plane died with")
        self.state, self._taken = memory.state, dict(memory.record.taken or {})
        self.host, self.is_up, self.serves_since = host, True, self._cluster.time.now
        away = max(0.0, self._wall() - memory.wall)
        self._ahead = memory.now + away - host.clock.read(self._cluster.time.now)
        self._journal = journal.Journal(self._path, None)
        self._publish(log[len(self.log) :])
        self._take(m.ControlBack(self._cluster.crashes, f"n{host.number}"))
        self._take(None)


def _without_heartbeats(state: State) -> Any:
    """What the journal has to keep of the state."""
    values = to_json(state)
    for agent in values["agents"].values():
        agent["beats"] = agent["heard_at"] = None
    return values
