"""Faults on purpose: what is to break, when and where, and the code that breaks it.

``parse`` and ``read_scenario`` read what was asked for, ``schedule`` turns it into numbered faults; workers read
them from the file ``FT_FAULTS`` and act through :class:`ft.faults.worker.Injector`, agents through
:class:`ft.faults.agent.AgentInjector`.
"""

from ft.faults.faults import Fault, from_json, planned, to_json, write
from ft.faults.scenario import read_scenario, read_specs
from ft.faults.schedule import schedule
from ft.faults.spec import FaultSpec, parse

__all__ = [
    "Fault",
    "FaultSpec",
    "from_json",
    "parse",
    "planned",
    "read_scenario",
    "read_specs",
    "schedule",
    "to_json",
    "write",
]
