"""The injected faults that an agent carries out: the end of its node, of its network, of the control plane."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ft.inject import Fault
from ft.messages import Beat, Observed, Open


class AgentFaults:
    """What ``ft.inject.agent.AgentInjector`` has to hear; without a fault for this agent it is never loaded.

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
        self._node, self._record = node, record
        self._injector = None
        if any(fault.is_agents for fault in faults):
            from ft.inject.agent import AgentInjector

            self._injector = AgentInjector(faults, node, run_dir, self._announce)

    def opened(self, order: Open) -> None:
        """An epoch begins."""
        if self._injector is not None:
            self._injector.update(order.fired)
            self._injector.begin()

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
        self._record(Observed("fault_injected", {**stamps, **fault.values(), "where": where}))
