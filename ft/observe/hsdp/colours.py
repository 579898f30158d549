"""Colours of replicas' states and of incidents, taken from the palette of all pictures."""

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
