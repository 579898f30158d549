"""The section of the report about hangs: what the looks of the run say, with a picture of who waits for whom."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ft.base import events
from ft.base.errors import UserError
from ft.faults.hang.look import Look
from ft.faults.hang.series import over_time
from ft.observe.diagnose.hang import as_text
from ft.observe.diagnose.hang_picture import png
from ft.record import looks
from ft.record.run import EVENTS
from ft.show.html import picture, safe

_MOST = 5


def panel(run: Path) -> str:
    """Return the newest looks in which a rank was at fault, as HTML; empty if there is none.

    Of a run of replicas, those of the same moment are one look.
    """
    parts: list[str] = []
    hosts = events.hosts(events.read(run / EVENTS))
    for number, read in reversed(_stored(run)):
        if len(parts) == _MOST:
            break
        try:
            look = read()
        except UserError as error:
            parts.append(f"<p>{safe(error)}</p>")
            continue
        look = replace(look, hosts=hosts)
        found = over_time([look])
        if found.causes:
            drawn = picture(png(look, found), "who waits for whom, back to the ranks at fault")
            text = safe(as_text(look, found))
            parts.append(f"{drawn}<details><summary>look {number}</summary><pre>{text}</pre></details>")
    return "".join(parts)


def _stored(run: Path) -> list[tuple[int, Callable[[], Look]]]:
    """Return (number, function that reads it) of each look, the oldest first."""
    if looks.folders(run):
        moments = enumerate(looks.moments(run), 1)
        return [(number, partial(looks.read_together, run, moment.numbers)) for number, moment in moments]
    return [(number, partial(looks.read, run, number)) for number in looks.numbers(run)]
