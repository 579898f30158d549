"""Fault injection: description, planning and execution of faults in a run, to test its recovery.

``parse`` reads ``--inject`` and ``read_scenario`` reads scenario files; ``schedule`` turns their entries into numbered
faults with a victim and a time. Workers carry out theirs with :class:`ft.faults.worker.Injector`, agents with
:class:`ft.faults.agent.AgentInjector`.
"""

from ft.faults.faults import Fault, from_json, left, missed, planned, to_json, write
from ft.faults.spec import FaultSpec, parse, read_scenario, read_specs, schedule

__all__ = [
    "Fault",
    "FaultSpec",
    "from_json",
    "left",
    "missed",
    "parse",
    "planned",
    "read_scenario",
    "read_specs",
    "schedule",
    "to_json",
    "write",
]
