"""Watches the health of a node for its agent: reads it in a thread, judges it by rules, and reports what is new.

Reading may take seconds, or hang in a driver, so the agent never waits for it. Findings are events of the run; with
``--health drain`` the control plane also acts on those that speak against a device or the node: no further worker gets
it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ft.base import events
from ft.faults.health import THIS, WATCH, Finding, rules
from ft.faults.verdict import HOST
from ft.job.agent.devices import Devices
from ft.job.agent.options import DRAIN, OFF
from ft.job.messages import DeviceReleased, Observed
from ft.platform.health import Reading
from ft.platform.health.reader import Reader

HEALTH_ROOT = "FT_HEALTH_ROOT"
"""Environment variable: a folder whose /sys, /proc and /dev are read instead of this node's, for drills and tests."""
PERIOD_S, NEWS_S = 30.0, 1.0
"""Seconds between two readings, and between two readings of the events alone."""
STUCK_S = 60.0
"""Seconds after which a reading that has not ended is a finding itself."""
AGAIN_S = 600.0
"""Seconds after which a finding that happens again is reported again."""


class News:
    """Remembers which findings were reported, so that each is reported once while it lasts."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], float] = {}
        self._present: set[tuple[str, str]] = set()

    def new(self, found: list[Finding], now: float, is_whole: bool = True) -> list[Finding]:
        """Return the findings that are new, or that happened again after ``AGAIN_S`` seconds.

        Args:
            found: the findings of one reading.
            now: monotonic time in seconds.
            is_whole: whether the reading was one of all sources, so that what it does not find is over.
        """
        fresh = []
        for each in found:
            told = self._told.get(each.key)
            if told is None or (each.key not in self._present and now - told > AGAIN_S):
                self._told[each.key] = now
                fresh.append(each)
        present = {each.key for each in found}
        self._present = present if is_whole else self._present | present
        return fresh


class HealthWatch:
    """Reads the node's health while the agent runs.

    Args:
        mode: "off", "watch" or "drain".
        reader: function that makes the reader, called in the thread.
        period_s: seconds between two readings.
        news_s: seconds between two readings of the events alone.
    """

    def __init__(
        self,
        mode: str,
        reader: Callable[[], Reader],
        devices: Devices,
        post: Callable[[Any], None],
        complain: Callable[[str], None],
        period_s: float = PERIOD_S,
        news_s: float = NEWS_S,
    ):
        self._mode, self._make_reader, self._devices = mode, reader, devices
        self._post, self._complain = post, complain
        self._period_s, self._news_s = period_s, news_s
        self._found: deque[tuple[Finding, str]] = deque()
        self._news = News()
        self._over = threading.Event()
        self._reader: Reader | None = None
        self._since = 0.0
        self._was_stuck = False
        self._broken = ""

    def start(self) -> None:
        """Begin to read the node, in another thread."""
        if self._mode != OFF:
            threading.Thread(target=self._run, name="ft-health", daemon=True).start()

    def poll(self, node: str, now: float) -> None:
        """Report the findings since the last call; never waits.

        Args:
            node: present name of this node's agent.
            now: monotonic time in seconds.
        """
        while self._found:
            self._tell(*self._found.popleft(), node)
        if self._broken:
            self._complain(f"{node}: its health is not read any more: {self._broken}")
            self._broken = ""
        since, reader = self._since, self._reader
        if since and now - since > STUCK_S and not self._was_stuck and reader is not None:
            self._was_stuck = True
            self._tell(_stuck(node, reader.asking, now - since), "", node)

    def close(self) -> None:
        """End the readings. A reading that is under way is not waited for."""
        self._over.set()

    def _run(self) -> None:
        try:
            self._read_on()
        except Exception as error:  # the run goes on without its health being read
            self._since = 0.0
            self._broken = f"{type(error).__name__}: {error}"

    def _read_on(self) -> None:
        self._devices.wait()
        reader = self._reader = self._make_reader()
        before = self._timed(reader.read)
        # what happened before the run is no finding of the run, what is wrong now is one
        self._judge(rules(before, before), before, True)
        following = time.monotonic() + self._period_s
        while not self._over.wait(self._news_s):
            if time.monotonic() < following:
                news = self._timed(reader.news)
                self._judge(rules(None, news), news, False)
                continue
            following = time.monotonic() + self._period_s
            reading = self._timed(reader.read)
            self._judge(rules(before, reading), reading, True)
            before = reading
        reader.close()

    def _timed(self, read: Callable[[], Reading]) -> Reading:
        self._since = time.monotonic()
        reading = read()
        self._since, self._was_stuck = 0.0, False
        return reading

    def _judge(self, found: list[Finding], reading: Reading, is_whole: bool) -> None:
        for each in self._news.new(found, time.monotonic(), is_whole):
            self._found.append((each, reading.id_of(each.device)))

    def _tell(self, found: Finding, uuid: str, node: str) -> None:
        """Report a finding. ``uuid``: id of the GPU that it is about, or ""."""
        index = self._devices.index_of(uuid)
        # a GPU that this run does not use is no reason to act
        is_concerned = index is not None or not found.device.startswith("gpu")
        acts = self._mode == DRAIN and found.is_evidence and found.cause == THIS and is_concerned
        detail = {
            **{name: getattr(found, name) for name in ("device", "observation", "category", "action", "cause")},
            **{name: getattr(found, name) for name in ("reason", "advice", "source")},
        }
        stamps = {"wall": found.when, "monotonic": time.monotonic(), "node": node}
        self._post(Observed(events.HEALTH_FOUND, {**stamps, **detail, "index": index, "acts": acts}))
        if found.action != WATCH:
            self._complain(f"{node}, {found.device or 'the node'}: {found.action}: {found.reason}\n    {found.advice}")
        if acts and index is not None and self._devices.count:
            self._devices.reject(index, found.reason)
            self._post(DeviceReleased("", node, index, found.reason))


def _stuck(node: str, source: str, seconds: float) -> Finding:
    """Return the finding that a reading does not end."""
    return Finding(
        *(node, "", "health.stuck", HOST, WATCH, THIS),
        reason=f"reading {source or 'the node'} has not ended after {seconds:.0f} s: its driver may hang",
        advice="Look at the kernel log, and whether nvidia-smi answers.",
        source="ft/job/agent/health.py",
        when=time.time(),
    )
