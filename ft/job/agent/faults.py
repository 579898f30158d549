"""The injected faults that an agent carries out: the end of its node, of its network, of the control plane."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ft.base import events
from ft.faults import Fault
from ft.job.messages import Beat, Observed, Open

_WRITTEN_S, _LOOK_S = 20.0, 0.01


class AgentFaults:
    """What ``ft.faults.agent.AgentInjector`` has to hear; without a fault for this agent it is never loaded.

    Args:
        faults: of the whole run. node: of this agent. run_dir: the run's.
        record: puts a report on record, returns when it is.

    Raises:
        UserError: this process may not do what is planned for it.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        node: str,
        run_dir: str,
        record: Callable[[Any], None],
    ):
        self._node, self._record, self._events = node, record, Path(run_dir) / "events.jsonl"
        self._injector = None
        if any(fault.is_agents for fault in faults):
            from ft.faults.agent import AgentInjector

            self._injector = AgentInjector(faults, node, run_dir, self._announce)

    def opened(self, order: Open, began: float) -> None:
        """An epoch begins; the first one did at the wall time ``began``."""
        if self._injector is not None:
            self._injector.update(order.fired)
            self._injector.begin(began)

    def heard(self, beats: Mapping[str, Beat]) -> None:
        """What the workers are at."""
        steps = [beat.step for beat in beats.values() if beat.doing != "idle"]
        if self._injector is not None and steps:
            self._injector.progressed(max(steps))

    def close(self) -> None:
        if self._injector is not None:
            self._injector.close()

    def _announce(self, fault: Fault) -> None:
        stamps = {"wall": time.time(), "monotonic": time.monotonic(), "node": self._node}
        where = "step" if fault.step is not None else "time"
        self._record(Observed(events.FAULT_INJECTED, {**stamps, **fault.values(), "where": where}))
        if fault.kind in ("kill", "kill-agent"):
            self._wait_written(fault.number)

    def _wait_written(self, number: int) -> None:
        """A control plane beside this agent dies with it: the fault would be forgotten, and happen again."""
        deadline = time.monotonic() + _WRITTEN_S
        while time.monotonic() < deadline:
            for event in reversed(events.read(self._events)):
                if event.name == events.FAULT_INJECTED and event.detail.get("number") == number:
                    return
            time.sleep(_LOOK_S)
