"""The control plane's process: production decision code and journal, with simulated I/O.

The process receives reports from agents, passes each to the decision code (``ft.job.control.controller.decide``),
writes report and decisions to the journal, and publishes the resulting orders. When the process dies, everything but
the journal is lost. Its successor, on this host or another, is restored from the journal and continues the numbering
of reports and orders.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft.job import messages as m
from ft.job.control import controller, journal
from ft.job.control.channel import Posted
from ft.job.control.state import ENDED, ControlOptions, ControlState
from ft.net.codec import to_json

if TYPE_CHECKING:
    from tests.simulation.control.agent import Host, Link
    from tests.simulation.control.cluster import Cluster

BEFORE, TORN, WRITTEN, AFTER = "before", "torn", "written", "after"
"""Moments of a crash while a report is processed: before the journal entry is written, while it is written (which
leaves a truncated line), between the entry and the publication of the orders, and after the publication.
"""


class Plane:
    """The control plane of a simulated cluster, over all its successive processes.

    Args:
        cluster: the simulated cluster.
        host: host on which the control plane runs.
        options: options of the production code.
        path: path of the journal; None: no journal is written, because the control plane will not die.

    Attributes:
        host: host of the current process.
        state: state of the production decision code.
        log: all published orders.
        said: all numbered reports that were processed; the fault that delivers a report again chooses one of them.
        is_up: whether the process exists.
        paused: whether the process is stopped.
        dies_at: BEFORE, TORN, WRITTEN or AFTER: when the process crashes while it processes its next numbered report;
            "" if it does not crash.
        serves_since: true time in seconds at which the current process began to serve.
        was_cut_off: whether the network of the control plane's host was cut at some time.
    """

    def __init__(self, cluster: "Cluster", host: "Host", options: ControlOptions, path: Path | None):
        self._cluster, self.host, self._options, self._path = cluster, host, options, path
        self.state = ControlState.begin(options)
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
        """Run the decision code for the first time, and schedule its next deadline."""
        self._take(None)

    def hear(self, link: "Link", node: str, number: int, report: Any) -> None:
        """Receive a report over ``link``, and acknowledge it; process each number only once. 0 is a heartbeat."""
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
        """Deliver a report to the decision code a second time, and check that the state does not change.

        The protocol never delivers a report twice, but the decision code must not rely on this.
        """
        if not self.is_up or self.paused:
            return
        before = to_json(self.state)
        self._take(report)
        if to_json(self.state) != before:
            self._cluster.checks.fail(f"a report that came a second time has changed the state: {m.encode(report)}")

    def clock(self) -> float:
        """Return the time that the decision code sees, in seconds (``ft.job.control.sidecar``): the host's monotonic
        clock, shifted so that it continues the clock of the previous process.
        """
        return self.host.clock.read(self._cluster.time.now) + self._ahead

    def _wall(self) -> float:
        return self._cluster.time.now + self.host.skew_s

    # --- processing of reports ---------------------------------------------------------------------------------------

    def _take(self, report: Any | None, node: str = "", number: int = 0) -> None:
        """Run the decision code for a report (None: only time has passed), write the journal and publish the orders.

        If ``dies_at`` is set, the process crashes at that moment of the call.
        """
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
        """Schedule the next deadline (``ft.job.control.sidecar``)."""
        following = controller.next_deadline(self.state, now)
        self._cluster.checks.plans(now, following)
        if report is None or following < self._due:
            self._due = following
            self._life += 1
            self._cluster.time.after(self.host.clock.true(following - now), self._look, self._life)

    def _look(self, life: int) -> None:
        self.was_cut_off |= self._cluster.is_cut(self.host)
        if life == self._life and self.is_up and not self.paused and self.state.phase != ENDED:
            self._take(None)

    # --- pause, crash and restart ------------------------------------------------------------------------------------

    def go_on(self, superseded: bool) -> None:
        """Resume after a pause: process the reports received meanwhile, and only then check the deadlines.

        ``superseded``: another control plane process has taken over meanwhile, so that this one ends.
        """
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

    def die(self) -> None:
        """End the process; its journal remains."""
        self.is_up, self.paused, self.dies_at = False, False, ""
        self._last = _without_heartbeats(self.state)
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._inbox.clear()
        self._life += 1
        self._cluster.control_ended()

    def _tear(self) -> None:
        """Truncate the journal within its last line."""
        whole = self._path.read_bytes()
        last = whole.rstrip(b"\n").rfind(b"\n") + 1
        self._path.write_bytes(whole[: self._cluster.rng.randrange(last, len(whole) - 1)])

    def restart(self, host: "Host") -> None:
        """Start the successor process on ``host`` from the journal alone, and check that the journal is complete."""
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
        self._journal = journal.Journal(self._path, None, memory=memory)
        self._publish(log[len(self.log) :])
        self._take(m.ControlBack(self._cluster.crashes, f"n{host.number}"))
        self._take(None)


def _without_heartbeats(state: ControlState) -> Any:
    """Return the state as JSON values without the times of heartbeats, which the journal does not contain."""
    values = to_json(state)
    for agent in values["agents"].values():
        agent["beats"] = agent["heard_at"] = None
    return values
