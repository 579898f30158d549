"""Colours of all pictures and reports, chosen to be distinguishable for readers with red-green colour blindness."""

INK, QUIET, FAINT, PAPER = "#1f2933", "#66717d", "#dfe4ea", "#ffffff"
FIRST_WORKER = "#c3d3e4"
"""Colour of the workers that were started together, at the start of the run or by a warm restart."""

LATER_WORKERS = ("#4f7fb0", "#3f8f55", "#b07d2a", "#a8527f", "#2f8a97", "#7468b3", "#8f6650", "#6d8a35")
LOSS, FAULT, MISMATCH = "#33659c", "#c8322b", "#0b7a75"
PHASE = {
    "detect": "#c8322b",
    "release": "#e8853d",
    "assemble": "#f1c453",
    "rebuild": "#4f94c4",
    "restore": "#6aab8e",
    "resume": "#9a86c0",
}
OUTCOME = {
    "replaced": "#c8322b",
    "in place": "#d98e04",
    "restart": "#4b3f72",
    "stopped": "#1f2933",
    "under way": "#66717d",
}
"""Colour of each outcome of a recovery (``ft.record.recoveries``)."""
