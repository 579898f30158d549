"""Colours of replicas' states and of incidents in the pictures of FT-HSDP runs.

A replica is a full copy of the model with its own workers. An incident is a failure or a rejoin of replicas, or a full
restart of the run.
"""

from ft.observe.hsdp.lanes import CATCHING_UP, OFFLINE, ONLINE, REBUILDING
from ft.observe.hsdp.stalls import FAILURE, REJOIN, RESTART
from ft.record.recoveries import RESTART as RESTARTED
from ft.show import palette

STATE = {
    ONLINE: palette.FIRST_WORKER,
    CATCHING_UP: palette.PHASE["assemble"],
    REBUILDING: palette.PHASE["resume"],
    OFFLINE: palette.FAULT,
}
INCIDENT = {FAILURE: palette.FAULT, REJOIN: palette.PHASE["rebuild"], RESTART: palette.OUTCOME[RESTARTED]}
