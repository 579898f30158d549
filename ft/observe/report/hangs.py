"""The section of the report about hangs: what the looks of the run say, with a picture of who waits for whom."""

from pathlib import Path

from ft.base.errors import UserError
from ft.faults.hang.causes import diagnose
from ft.observe.diagnose.hang import as_text
from ft.observe.diagnose.hang_picture import png
from ft.record import looks
from ft.show.html import picture, safe

_MOST = 5


def panel(run: Path) -> str:
    """Return the newest looks in which a rank was at fault, as HTML; empty if there is none."""
    parts: list[str] = []
    for number in reversed(looks.numbers(run)):
        if len(parts) == _MOST:
            break
        try:
            look = looks.read(run, number)
        except UserError as error:
            parts.append(f"<p>{safe(error)}</p>")
            continue
        found = diagnose(look)
        if found.causes:
            drawn = picture(png(look, found), "who waits for whom, back to the ranks at fault")
            text = safe(as_text(look, found))
            parts.append(f"{drawn}<details><summary>look {number}</summary><pre>{text}</pre></details>")
    return "".join(parts)
