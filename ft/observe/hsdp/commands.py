"""Implement ``ft report`` and ``ft status`` for the folder of an FT-HSDP run, in which several replicas train together.

A replica is a full copy of the model with its own workers. Each replica logs the steps that it commits.
"""

import time
from pathlib import Path
from typing import Any

from ft.base.files import replace_all
from ft.job.replicas.host import FOLDER as LAUNCHERS
from ft.observe.hsdp.record import load
from ft.observe.hsdp.status import as_text, as_values, status
from ft.observe.report.presence import gone

_RECENT = 1 << 18
"""Bytes read from the end of each replica's commit log for the status, which suffices for some hundreds of steps."""

_NODES = 2
"""Assumed number of nodes with launchers (the processes that ``ft run`` starts). No file records the number. With 2,
``ft status`` allows for the time in which another node takes over the lease of the quorum server's host.
"""

NOT_CLEAN = 1
"""Exit code of a report whose audit does not prove that every sample was trained exactly once."""


def write_report(folder: str | Path) -> tuple[str, str, int]:
    """Write ``timeline.png`` and ``report.html`` into the run's folder.

    Returns:
        (a summary for the terminal; why a file could not be written, or ""; exit code: 0, or ``NOT_CLEAN``).

    Raises:
        UserError: there is no such run.
    """
    # Import these modules here: importing matplotlib takes longer than everything else in this command.
    from ft.observe.hsdp.page import page
    from ft.observe.hsdp.story import tell
    from ft.observe.hsdp.text import summary
    from ft.observe.hsdp.timeline import draw

    story = tell(load(folder))
    image = draw(story)
    pages = {story.record.folder / "timeline.png": image, story.record.folder / "report.html": page(story, image)}
    written, problem = replace_all(pages)
    return summary(story, written), problem, 0 if story.audit.is_clean else NOT_CLEAN


def now(folder: str | Path) -> tuple[str, dict[str, Any], bool]:
    """Return (text, JSON values, whether the run has ended) for the run at this moment.

    Raises:
        UserError: there is no such run.
    """
    record = load(folder, _RECENT)
    found = status(record, time.time())
    if not found.ended and (why := gone(Path(folder) / LAUNCHERS, None, _NODES, is_steady=True)):
        record = load(folder, _RECENT)  # read again: the run may have ended while its lease was watched for renewals
        found = status(record, time.time(), why)
    return as_text(found, str(record.folder)), as_values(found), found.ended
