"""Implement ``ft report`` and ``ft status`` for the folder of an FT-HSDP run, in which several replicas train together.

A replica is a full copy of the model with its own workers. Each replica logs the steps that it commits.
"""

import time
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.base.files import replace
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


def write_report(folder: str | Path) -> tuple[str, int]:
    """Write ``timeline.png`` and ``report.html`` into the run's folder.

    Returns:
        (a summary for the terminal, exit code: 0, or ``NOT_CLEAN``).

    Raises:
        UserError: there is no such run, or its folder cannot be written.
    """
    # Import these modules here: importing matplotlib takes longer than everything else in this command.
    from ft.observe.hsdp.page import page
    from ft.observe.hsdp.story import tell
    from ft.observe.hsdp.text import summary
    from ft.observe.hsdp.timeline import draw

    story = tell(load(folder))
    image, report = story.record.folder / "timeline.png", story.record.folder / "report.html"
    try:
        draw(story, image)
        replace(report, page(story, image.read_bytes()))
    except OSError as error:
        raise UserError(f"the report cannot be written: {error}", "make the run's folder writable") from error
    return summary(story, [image, report]), 0 if story.audit.is_clean else NOT_CLEAN


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
