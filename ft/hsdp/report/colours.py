"""Colours of replicas' states and of incidents, from those of the other pictures."""

from ft.hsdp.report.lanes import CATCHING_UP, OFFLINE, ONLINE, REBUILDING
from ft.hsdp.report.stalls import FAILURE, REJOIN, RESTART
from ft.report import palette
from ft.report.recoveries import RESTART as RESTARTED

STATE = {
    ONLINE: palette.FIRST_WORKER,
    CATCHING_UP: palette.PHASE["assemble"],
    REBUILDING: palette.PHASE["resume"],
    OFFLINE: palette.FAULT,
}
INCIDENT = {FAILURE: palette.FAULT, REJOIN: palette.PHASE["rebuild"], RESTART: palette.OUTCOME[RESTARTED]}
