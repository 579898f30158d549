"""What ``ft report`` and ``ft status`` do with the folder of an FT-HSDP run."""

import time
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.job.replicas.host import FOLDER as LAUNCHERS
from ft.observe.hsdp.record import load
from ft.observe.hsdp.status import as_text, as_values, status
from ft.observe.report.presence import gone
from ft.show.files import replace

_RECENT = 1 << 18
"""Bytes of each file of commits that tell how a run stands: some hundreds of steps."""

_NODES = 2
"""Nobody says how many nodes have launchers: another one may take the lease over."""

NOT_CLEAN = 1
"""Exit code of a report whose audit found samples twice or lost, or a record that does not prove otherwise."""


def write_report(folder: str | Path) -> tuple[str, int]:
    """Writes ``timeline.png`` and ``report.html`` into the run's folder.

    Returns:
        (a summary for the terminal, exit code: 0, or ``NOT_CLEAN``).

    Raises:
        UserError: there is no such run, or its folder cannot be written.
    """
    # Matplotlib takes longer to import than everything else that the command line does.
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
    """(text, JSON values, whether it has ended) of the run at this moment.

    Raises:
        UserError: there is no such run.
    """
    record = load(folder, _RECENT)
    found = status(record, time.time())
    if not found.ended and (why := gone(Path(folder) / LAUNCHERS, None, _NODES, is_steady=True)):
        record = load(folder, _RECENT)  # it may have ended while its lease was watched
        found = status(record, time.time(), why)
    return as_text(found, str(record.folder)), as_values(found), found.ended
