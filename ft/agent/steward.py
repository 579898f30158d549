"""The agent's part in there being a control plane: starting one, again after its death, and in a lost node's place."""

import contextlib
import os
import time
from collections import deque
from pathlib import Path

from ft.agent import succession
from ft.agent.sidecar import Sidecar
from ft.control import tenure
from ft.control.tenure import SUCCEEDED, Standing
from ft.control.timeouts import Timeouts

_MOST_DEATHS, _WINDOW_S = 3, 60.0
"""A control plane that dies more often than this may well die of its journal: the run begins anew without it."""

_PREPARE_S = 20.0
"""A run that has lasted so long is worth a process that waits to take over."""


class Steward:
    """Claims terms and runs the side-car in them.

    Args:
        run_dir: the run's. node, node_rank: of this agent. sidecar: not started yet.
    """

    def __init__(self, run_dir: Path, node_rank: int, sidecar: Sidecar, timeouts: Timeouts):
        self._run_dir, self._node_rank, self._timeouts = run_dir, node_rank, timeouts
        self._watch = tenure.Watch(run_dir, time.monotonic())
        self._serving: tuple[int, float] | None = None
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS + 1)
        self._life, self._since = 0, time.monotonic()
        self.sidecar = sidecar

    @property
    def hosts(self) -> bool:
        """The control plane runs beside this agent."""
        return self.sidecar.pid >= 0

    @property
    def events(self) -> Path:
        """The run's events, as the control plane writes them."""
        return self._run_dir / "events.jsonl"

    def start(self, life: int, node: str) -> bool:
        """Claims the next term and starts the side-car for it; False if another agent was faster.

        Raises:
            OSError: the run's directory cannot be written.
        """
        term = tenure.newest(self._run_dir) + 1
        if not tenure.claim(self._run_dir, term, node):
            return False
        if life != self._life:
            self._deaths.clear()
        self._life = life
        self.sidecar.kill()
        self._keep_alive(Standing(term, life, "", node, os.getpid()))
        self.sidecar.start(term, node, life)
        return True

    def ended(self, code: int, now: float) -> bool:
        """The side-car has ended and was reaped. Returns whether it is to be started again."""
        self.sidecar.reaped(code)
        if code == SUCCEEDED:
            return False
        self._deaths.append(now)
        return True

    def dies_again_and_again(self, now: float) -> bool:
        return len(self._deaths) > _MOST_DEATHS and now - self._deaths[0] < _WINDOW_S

    def look(self, now: float, contact_at: float) -> tuple[str, str]:
        """(what ``succession.decide`` says, why)."""
        standing = self._watch.look(now)
        if standing is not None and standing.where and (self._serving is None or self._serving[0] != standing.term):
            self._serving = (standing.term, now)
        if standing is not None and self.hosts and not standing.where:
            self._keep_alive(standing)
        serving = standing is not None and standing.where and self._serving is not None
        if now - self._since > _PREPARE_S and now - contact_at < self._timeouts.contact_s:
            self.sidecar.prepare()
        view = succession.View(
            silent_s=now - contact_at,
            lease_s=self._watch.age(now) if standing is not None else None,
            serving_s=now - self._serving[1] if serving else None,
            turn=0 if self.hosts else self._node_rank + 1,
        )
        return succession.decide(view, self._timeouts)

    def _keep_alive(self, standing: Standing) -> None:
        """Renews the lease of a control plane that is on its way: imports take longer than a lease lasts."""
        with contextlib.suppress(OSError):
            tenure.renew(self._run_dir, Standing(**{**vars(standing), "count": standing.count + 1}))
