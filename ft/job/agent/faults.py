"""Fault injection in a node agent of ``ft run``: triggers the planned faults whose target is the node or its network.

A fault can also target the control plane's process on the node.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ft.base import events
from ft.faults import Fault
from ft.faults.agent import AgentInjector
from ft.job.messages import Beat, Observed, Open

_WRITTEN_S, _POLL_S = 20.0, 0.01


class AgentFaults(AgentInjector):
    """Follows the run's progress, and reports each fault to the control plane before it carries it out.

    Args:
        record: function that sends a report to the control plane and returns once the report was sent.

    Raises:
        UserError: this process lacks the permission for a fault that is planned for it.
    """

    def __init__(self, faults: Sequence[Fault], node: str, run_dir: str, record: Callable[[Any], None]):
        super().__init__(faults, node, run_dir, self._report)
        self._record, self._events = record, self._run_dir / "events.jsonl"

    def opened(self, order: Open, began: float) -> None:
        """Record that an epoch begins.

        Args:
            order: the control plane's order that opens the epoch; it lists the faults injected so far.
            began: wall-clock time at which the first epoch began; injection times are relative to it.
        """
        self.update(order.fired)
        self.begin(began)

    def heard(self, beats: Mapping[str, Beat]) -> None:
        """Take the highest step in the workers' heartbeats as that of the run."""
        steps = [beat.step for beat in beats.values() if beat.doing != "idle"]
        if steps:
            self.progressed(max(steps))

    def _report(self, fault: Fault) -> None:
        stamps = {"wall": time.time(), "monotonic": time.monotonic(), "node": self._node}
        where = "step" if fault.step is not None else "time"
        self._record(Observed(events.FAULT_INJECTED, {**stamps, **fault.values(), "where": where}))
        if fault.kind in ("kill", "kill-agent"):
            self._wait_written(fault.number)

    def _wait_written(self, number: int) -> None:
        """Wait until the event log holds fault ``number``, for at most ``_WRITTEN_S`` seconds.

        The fault kills this agent, and with it a control plane on this node. If the event log did not hold the fault by
        then, the next control plane would have it injected again.
        """
        deadline = time.monotonic() + _WRITTEN_S
        while time.monotonic() < deadline:
            for event in reversed(events.read(self._events)):
                if event.name == events.FAULT_INJECTED and event.detail.get("number") == number:
                    return
            time.sleep(_POLL_S)
